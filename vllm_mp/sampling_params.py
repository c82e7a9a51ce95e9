"""What a request may ask of the sampler, validated when it is constructed."""

import enum
import math
import numbers
import operator
import reprlib
from typing import Annotated, Any

import msgspec

_BIAS_LIMIT = 1e6
_PENALTY_LIMIT = 1e6
"""Repetition penalties lie between its reciprocal and it, so that logits stay finite in float32."""
MAX_BAD_WORDS = 1024
_MAX_STRINGS = {"stop": 64, "bad_words": MAX_BAD_WORDS}
_MAX_CHARACTERS = 256
"""Of one of these strings."""
_MAX_ANSWERS = 1024
_MAX_IDS = {"stop_token_ids": 1024, "allowed_token_ids": 2**18, "logit_bias": 2**18}
SEED_LIMIT = 2**63
"""Seeds are integers in [-2**63, 2**63)."""


def _at_most(count: int) -> msgspec.Meta:
    """A bound that a decoder heeds before it makes the list."""
    return msgspec.Meta(max_length=count)


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

    `temperature` 0 means greedy. What changes the logits applies in this order: allowed tokens, stop tokens barred
    below `min_tokens`, bad words, `logit_bias`, penalties (repetition, over prompt and answer; then frequency and
    presence, over the answer), temperature, min-p, top-k, top-p, each to what the one before it left. `top_k` 0 or
    -1, `top_p` 1 and `min_p` 0 switch these filters off. `logprobs` and `prompt_logprobs` are of the model's own
    distribution, before all of these: the most likely that many tokens (-1: all) and the chosen one.
    `max_tokens` None means up to the model's context, and a larger number than fits ends there too. `min_tokens`
    also keeps `stop` strings from being looked for. `seed` None draws one for the request; with `n` answers, answer
    i has `seed` + i. `truncate_prompt_tokens` keeps that many tokens from the end of the prompt, -1 as many as leave
    room for `max_tokens`, or for one token where that alone fills the context. `best_of` is only accepted where it
    changes nothing, equal to `n`.

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
    stop: str | Annotated[list[str], _at_most(_MAX_STRINGS["stop"])] | None = None
    stop_token_ids: Annotated[list[int], _at_most(_MAX_IDS["stop_token_ids"])] | None = None
    bad_words: Annotated[list[str], _at_most(_MAX_STRINGS["bad_words"])] | None = None
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
    logit_bias: Annotated[dict[int, float], _at_most(_MAX_IDS["logit_bias"])] | None = None
    allowed_token_ids: Annotated[list[int], _at_most(_MAX_IDS["allowed_token_ids"])] | None = None
    guided_decoding: Any = None
    structured_outputs: Any = None
    extra_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list | tuple | set | frozenset):
                raise TypeError(f"{name} must be a list, got {reprlib.repr(value)}")
            if value is not None or name != "allowed_token_ids":  # whose None allows more than an empty list
                setattr(self, name, list(value or ()))
        self._check_numbers()
        self._check_lists()
        self._check_together()
        if self.seed == -1:
            self.seed = None  # callers of the older API write -1 for "no seed"
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError as error:
            raise ValueError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}") from error

    def _check_numbers(self) -> None:
        self._integer("n", 1, _MAX_ANSWERS)
        self._integer("best_of", 1, _MAX_ANSWERS)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("repetition_penalty", 1 / _PENALTY_LIMIT, _PENALTY_LIMIT)
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
            texts = getattr(self, name)
            if len(texts) > _MAX_STRINGS[name]:
                raise ValueError(f"{name} must hold at most {_MAX_STRINGS[name]} strings, got {len(texts)}")
            for text in texts:
                if not isinstance(text, str):
                    raise TypeError(f"{name} must hold strings, got {reprlib.repr(text)}")
                if not text or len(text) > _MAX_CHARACTERS:
                    raise ValueError(
                        f"{name} must hold strings of 1 to {_MAX_CHARACTERS} characters, got one of {len(text)}: "
                        f"{reprlib.repr(text)}"
                    )
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    raise ValueError(f"{name} must hold valid Unicode, got {reprlib.repr(text)}") from error
        for name in ("stop_token_ids", "allowed_token_ids"):
            given = getattr(self, name)
            if given is None:
                continue
            self._check_count(name, given)
            ids = []
            for token_id in given:
                if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral):
                    raise TypeError(f"{name} must hold token ids, got {token_id!r}")
                ids.append(int(token_id))
                if not 0 <= ids[-1] < 2**31:
                    raise ValueError(f"{name} must hold token ids, integers in [0, 2**31), got {token_id}")
            setattr(self, name, list(dict.fromkeys(ids)))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must not be empty; leave it None to allow every token")
        if self.logit_bias is not None:
            self.logit_bias = self._checked_bias(self.logit_bias)

    def _checked_bias(self, given: Any) -> dict[int, float]:
        """`given` with plain keys and values; JSON makes strings of the ids, so those are taken too."""
        if not isinstance(given, dict):
            raise TypeError(f"logit_bias must be a dict of token ids and numbers, got {reprlib.repr(given)}")
        self._check_count("logit_bias", given)
        checked = {}
        for token_id, bias in given.items():
            try:
                if isinstance(token_id, bool):
                    raise TypeError("a bool is no token id")
                key = operator.index(int(token_id) if isinstance(token_id, str) else token_id)
            except (TypeError, ValueError) as error:
                raise TypeError(f"logit_bias must have token ids as keys, got {reprlib.repr(token_id)}") from error
            if isinstance(bias, bool) or not isinstance(bias, numbers.Real):
                raise TypeError(f"logit_bias[{key}] must be a number, got {bias!r}")
            if not 0 <= key < 2**31:
                raise ValueError(f"logit_bias must have token ids as keys, integers in [0, 2**31), got {key}")
            checked[key] = _as_float(bias)
            if not -_BIAS_LIMIT <= checked[key] <= _BIAS_LIMIT:
                raise ValueError(f"logit_bias[{key}] must be in [-{_BIAS_LIMIT:g}, {_BIAS_LIMIT:g}], got {bias!r}")
        return checked

    @staticmethod
    def _check_count(name: str, given: Any) -> None:
        """Whoever has to look at them one by one has a bound."""
        if len(given) > _MAX_IDS[name]:
            raise ValueError(f"{name} must hold at most {_MAX_IDS[name]} token ids, got {len(given)}")

    def _check_together(self) -> None:
        """What each field allows by itself, but not beside the others."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}")
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(
                f"best_of must be None or equal to n={self.n}, got {self.best_of}: answers that nobody receives are "
                "not drawn; set n to that many, ask for logprobs, and choose by cumulative_logprob"
            )
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n must be 1 with temperature=0, got {self.n}: all answers would be the same; set temperature above 0"
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize=True; use stop_token_ids with detokenize=False")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be -1 or at least 1, got 0")
        if self.extra_args:
            raise ValueError(f"extra_args must be empty, got {reprlib.repr(self.extra_args)}: nothing here reads any")

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
        number = _as_float(value)
        # Written so that NaN, which compares false with everything, is refused too.
        if not low <= number <= high or (open_low and number == low):
            raise ValueError(f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value}")
        setattr(self, name, number)

    def clone(self) -> "SamplingParams":
        """A copy whose fields can be changed without touching this one (lists are not copied)."""
        return msgspec.structs.replace(self)


def _as_float(value: Any) -> float:
    """`value`, a real number; infinite if it is too large for a float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


_OPTIONAL_INTEGERS = frozenset(
    {"best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"}
)

_NOT_SERVED = ("guided_decoding", "structured_outputs")
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
