"""What a pooling request may ask for, validated when it is constructed."""

import numbers
from typing import Any

import msgspec

from vllm_mp.arguments.unserved_arguments import AcceptsUnserved

POOLING_TYPES = ("last", "mean", "cls")
POOLING_TASKS = ("embed", "classify")
_OTHER_TASKS = {
    **dict.fromkeys(("token_embed", "token_classify"), "a prompt has one vector, not one for each of its tokens"),
    "score": "call score()",
}
"""Tasks of vLLM that are not served, with the reason or the remedy."""


class PoolingParams(msgspec.Struct, omit_defaults=True, metaclass=AcceptsUnserved):
    """How one vector is made from a prompt's hidden states.

    `pooling_type` is "last" (of the last token), "mean" (the average of all tokens) or "cls" (of the first token), in
    upper or lower case. None uses the type that the model's folder names, or "last" for decoders and "mean" for
    encoders. `dimensions` keeps that many leading components (Matryoshka embeddings). `normalize` then scales the
    vector to length 1; None does so unless the model's folder says otherwise. `truncate_prompt_tokens` cuts longer
    prompts to that many tokens, -1 to the model's context: the tokenizer truncates text in its own way; of token ids
    the first ones are kept.

    A model with classes, such as BertForSequenceClassification, returns their probabilities instead of an embedding
    unless `task` is "embed". `use_activation=False` returns the outputs of its head as they are. In a pair of texts,
    `second_text_at` is the position of the first token that has the token type of the second text.

    Raises ValueError, naming the field, its value and its range, when a field is out of range, and TypeError when it
    is of the wrong type.
    """

    pooling_type: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    task: str | None = None
    """"embed", "classify", or None for what the model is made for."""
    use_activation: bool | None = None
    second_text_at: int | None = None

    def __post_init__(self) -> None:
        if self.pooling_type is not None:
            if not isinstance(self.pooling_type, str):
                raise TypeError(f"pooling_type must be a string or None, got {self.pooling_type!r}")
            if self.pooling_type.lower() not in POOLING_TYPES:
                raise ValueError(f"pooling_type must be one of {', '.join(POOLING_TYPES)}, got {self.pooling_type!r}")
            self.pooling_type = self.pooling_type.lower()
        for name in ("normalize", "use_activation"):
            if (given := getattr(self, name)) is not None and not isinstance(given, bool):
                raise TypeError(f"{name} must be True, False or None, got {given!r}")
        for name, low in (("dimensions", 1), ("truncate_prompt_tokens", -1), ("second_text_at", 1)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            number = int(value)  # the wire does not carry NumPy's scalars
            if not low <= number < 2**31 or number == 0:
                raise ValueError(f"{name} must be {'-1 or ' if low < 0 else ''}in [1, 2**31), got {value}")
            setattr(self, name, number)
        check_task("task", self.task)


def check_task(name: str, task: Any) -> None:
    """Raise TypeError or ValueError with `name`, the argument's, unless `task` is one of `POOLING_TASKS` or None."""
    if task is not None and not isinstance(task, str):
        raise TypeError(f"{name} must be a string or None, got {task!r}")
    if task not in (None, *POOLING_TASKS):
        remedy = f"; {_OTHER_TASKS[task]}" if task in _OTHER_TASKS else ""
        raise ValueError(f"{name} must be 'embed', 'classify' or None, got {task!r}{remedy}")
