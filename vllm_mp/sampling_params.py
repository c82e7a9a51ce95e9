"""What a request may ask of the sampler, validated when it is constructed."""

import enum
import numbers
import reprlib
from typing import Any

import msgspec

_BIAS_LIMIT = 1e6
SEED_LIMIT = 2**63
"""Seeds are integers in [-2**63, 2**63)."""


class RequestOutputKind(enum.IntEnum):
    """How much of the answer each `RequestOutput` repeats."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """Only what is new since the last output that this consumer took."""
    FINAL_ONLY = 2
    """One output, at the end."""


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """Sampling parameters of one request; names, defaults and meanings are vLLM's.

    `temperature` 0 means greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 switch these filters off; they apply
    in the order temperature, min-p, top-k, top-p, each to the distribution that the one before it left.
    `max_tokens` None means up to the model's context. `seed` None draws one for the request.

    Raises ValueError, naming the field, its value and its range, when a field is out of range, and TypeError
    when it is of the wrong type.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    guided_decoding: Any = None
    structured_outputs: Any = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list | tuple | set | frozenset):
                raise TypeError(f"{name} must be a list, got {value!r}")
            setattr(self, name, list(value or ()))
        self._check_numbers()
        self._check_lists()
        if self.seed == -1:
            self.seed = None  # callers of the older API write -1 for "no seed"
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError as error:
            raise ValueError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}") from error

    def _check_numbers(self) -> None:
        self._integer("n", 1, 10_000)
        self._integer("best_of", 1, 10_000)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("repetition_penalty", 0.0, 1e6, open_low=True)
        self._number("temperature", 0.0, 1e6)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._integer("top_k", -1, 2**31 - 1)
        self._number("min_p", 0.0, 1.0)
        self._integer("seed", -SEED_LIMIT, SEED_LIMIT - 1)
        self._integer("max_tokens", 1, 2**31 - 1)
        self._integer("min_tokens", 0, 2**31 - 1)
        self._integer("logprobs", -1, 2**31 - 1)
        self._integer("prompt_logprobs", -1, 2**31 - 1)
        self._integer("truncate_prompt_tokens", -1, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}")
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def _check_lists(self) -> None:
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                if not isinstance(text, str):
                    raise TypeError(f"{name} must hold strings, got {text!r}")
                if not text:
                    raise ValueError(f"{name} must not hold an empty string")
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize=True; use stop_token_ids with detokenize=False")
        for name in ("stop_token_ids", "allowed_token_ids"):
            given = getattr(self, name)
            ids = []
            for token_id in given or ():
                if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral):
                    raise TypeError(f"{name} must hold token ids, got {token_id!r}")
                ids.append(int(token_id))
                if not 0 <= ids[-1] < 2**31:
                    raise ValueError(f"{name} must hold token ids, integers in [0, 2**31), got {token_id}")
            setattr(self, name, None if given is None else ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must not be empty; leave it None to allow every token")
        for token_id, bias in (self.logit_bias or {}).items():
            if not isinstance(bias, int | float) or not -_BIAS_LIMIT <= bias <= _BIAS_LIMIT:
                raise ValueError(
                    f"logit_bias[{token_id!r}] must be in [-{_BIAS_LIMIT:g}, {_BIAS_LIMIT:g}], got {bias!r}"
                )

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if value is None and name in _OPTIONAL_INTEGERS:
            return
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        number = int(value)  # NumPy's scalars have no place on the wire
        if not low <= number <= high:
            raise ValueError(f"{name} must be in [{low}, {high}], got {value}")
        setattr(self, name, number)

    def _number(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a number, got {value!r}")
        number = float(value)
        # Written so that NaN, which compares false with everything, is refused too.
        if not low <= number <= high or (open_low and number == low):
            raise ValueError(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value}")
        setattr(self, name, number)

    def clone(self) -> "SamplingParams":
        """A copy whose fields can be changed without touching this one (lists are not copied)."""
        return msgspec.structs.replace(self)


_OPTIONAL_INTEGERS = frozenset(
    {"best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"}
)

_NOT_SERVED = (
    "n",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "bad_words",
    "logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "logit_bias",
    "allowed_token_ids",
    "guided_decoding",
    "structured_outputs",
    "extra_args",
)
_DEFAULTS = SamplingParams()


def check_served(params: SamplingParams) -> None:
    """Raise NotImplementedError naming the first field that is set but not served by this version."""
    for name in _NOT_SERVED:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            raise NotImplementedError(
                f"SamplingParams.{name}={reprlib.repr(value)} is not served yet; leave it at its default "
                f"({getattr(_DEFAULTS, name)!r})"
            )
