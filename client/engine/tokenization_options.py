"""The `tokenization_kwargs` of a request: arguments of the tokenizer, and how the prompt is truncated."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from vllm_mp.arguments.suggestions import did_you_mean
from vllm_mp.arguments.unserved_arguments import drop_unserved
from vllm_mp.arguments.unserved_table import TOKENIZATION_ARGUMENTS
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.sampling_params import SamplingParams

_OF_TOKENIZER: Final = frozenset(
    (
        *("add_special_tokens", "truncation", "max_length", "padding", "padding_side", "pad_to_multiple_of", "stride"),
        *("text_pair", "is_split_into_words", "split_special_tokens", "verbose", "return_tensors", "return_length"),
        *("return_token_type_ids", "return_attention_mask", "return_overflowing_tokens", "return_offsets_mapping"),
        "return_special_tokens_mask",
    )
)
"""The arguments that a call of a tokenizer of transformers takes."""
_TRUNCATION: Final = ("truncate_prompt_tokens", "truncation_side")
_SIDES: Final = (None, "left", "right")

Params = TypeVar("Params", SamplingParams, PoolingParams)


class TokenizationOptions(NamedTuple):
    """The `tokenization_kwargs` of a request, checked."""

    of_tokenizer: dict[str, Any]
    """The arguments of the tokenizer's call."""
    truncate_prompt_tokens: int | None = None
    """Overrides the field of the request's parameters; None: that field applies."""
    truncation_side: str | None = None
    """The end from which tokens are taken away: "left" or "right"; None: the left for text, the right for vectors."""

    def truncated(self, params: Params) -> Params:
        """Return `params` with the truncation that these options ask for. Raises ValueError for a bad number."""
        if self.truncate_prompt_tokens is None:
            return params
        return msgspec.structs.replace(params, truncate_prompt_tokens=self.truncate_prompt_tokens)


def tokenization_options(given: Mapping[str, Any] | None) -> TokenizationOptions:
    """Return the options in `given`, the `tokenization_kwargs` of a request.

    Raises TypeError for a name that neither vLLM nor a tokenizer knows, NotImplementedError for an option of vLLM that
    is not served, and ValueError for a bad `truncation_side`.
    """
    if not given:
        return TokenizationOptions({})
    if given.keys() <= _OF_TOKENIZER:
        return TokenizationOptions(dict(given))
    known = [*_TRUNCATION, *sorted(_OF_TOKENIZER)]
    for name in given:
        if name not in known and name not in TOKENIZATION_ARGUMENTS:
            raise TypeError(
                f"tokenization_kwargs has no option {name!r}{did_you_mean(str(name), known)}; "
                f"it takes {', '.join(known)}"
            )
    options = drop_unserved("tokenization_kwargs", given, known, TOKENIZATION_ARGUMENTS)
    limit, side = (options.pop(name, None) for name in _TRUNCATION)
    if side not in _SIDES:
        raise ValueError(f"truncation_side must be 'left' or 'right', got {side!r:.100}")
    return TokenizationOptions(options, limit, side)


def with_truncation(given: dict[str, Any] | None, truncate_prompt_tokens: int | None) -> dict[str, Any] | None:
    """Return `tokenization_kwargs` that also have the argument `truncate_prompt_tokens` of a call."""
    if truncate_prompt_tokens is None:
        return given
    return {**(given or {}), "truncate_prompt_tokens": truncate_prompt_tokens}
