"""What a request may ask of the sampler, validated when it is constructed.

Each field of `SamplingParams` is declared once, by its type, its default and a `Parameter`
(`vllm_mp/arguments/parameters.py`). The validation, the flags of the command line, the names in generation_config.json,
the columns of the core's batch and the values that tests draw all come from `PARAMETERS`. A new field also needs a case
in `vllm_mp/testing/sampling_cases.py`; one that filters the distribution needs a filter in `kernels/sampling.py`.
"""

import enum
import numbers
from dataclasses import dataclass
from typing import Annotated, Any, get_args

import msgspec

from vllm_mp.arguments.parameters import (
    Integer,
    LogprobCount,
    Number,
    Parameter,
    PlainData,
    ProcessorNames,
    Strings,
    Switch,
    TokenBiases,
    TokenIds,
)
from vllm_mp.arguments.unserved_arguments import AcceptsUnserved
from vllm_mp.requests.structured_outputs import GuidedDecodingParams as GuidedDecodingParams
from vllm_mp.requests.structured_outputs import StructuredOutputsParams, checked_form

MAX_BAD_WORDS = 1024
MAX_EXTRA_ARGS_BYTES = 2**14
_MAX_PROCESSORS = 64
_MAX_STOP_STRINGS = 64
_MAX_STOP_IDS = 1024
_MAX_VOCAB_IDS = 2**18
_MAX_COMPLETIONS = 1024
_MAX_INT = 2**31 - 1
_PENALTY_LIMIT = 1e6
"""Repetition penalties lie between its reciprocal and it, so that logits stay finite in float32."""
SEED_LIMIT = 2**63
"""Seeds are integers in [-2**63, 2**63)."""


class RequestOutputKind(enum.IntEnum):
    """How much of the completions each `RequestOutput` repeats."""

    CUMULATIVE = 0
    """Everything so far."""
    DELTA = 1
    """Only what is new since the last output that this consumer took."""
    FINAL_ONLY = 2
    """One output, at the end."""


class SamplingType(enum.IntEnum):
    """How tokens are chosen."""

    GREEDY = 0
    """The most likely token, because the temperature is 0."""
    RANDOM = 1
    RANDOM_SEED = 2
    """Drawn with the seed of the request."""


@dataclass(frozen=True)
class OutputKind(Parameter):
    """A `RequestOutputKind`, or its number."""

    def checked(self, name: str, value: Any) -> RequestOutputKind:
        try:
            return RequestOutputKind(value)
        except ValueError as error:
            raise ValueError(f"{name} must be a RequestOutputKind, got {value!r}") from error


@dataclass(frozen=True)
class OutputForm(Parameter):
    """`StructuredOutputsParams`, or a dict of its fields, or None."""

    def checked(self, name: str, value: Any) -> StructuredOutputsParams | None:
        return checked_form(name, value)


MAX_DRAFTS = "num_speculative_tokens"
"""The key of `extra_args` that limits the draft tokens of the request in a step; 0: the request gets none."""
EXTRA_ARGS = PlainData(MAX_EXTRA_ARGS_BYTES)
"""The declaration of `SamplingParams.extra_args`."""


def _at_most(count: int) -> msgspec.Meta:
    """Return a bound that a decoder enforces before it builds the list."""
    return msgspec.Meta(max_length=count)


class SamplingParams(msgspec.Struct, omit_defaults=True, metaclass=AcceptsUnserved):
    """Sampling parameters of one request; names, defaults and meanings are vLLM's.

    `temperature` 0 takes the most likely token at each position. The logits change in this order: allowed tokens, stop
    tokens barred below `min_tokens`, bad words, `logit_bias`, registered logits processors, penalties (repetition, over
    prompt and completion; then frequency and presence, over the completion), temperature, registered logits processors
    that are argmax-invariant, typical-p, min-p, top-k, top-p. Each of the last four, the filters, works on the tokens
    that the filter before it left. `typical_p` 1, `min_p` 0, `top_k` 0 or -1 and
    `top_p` 1 switch them off. `typical_p` is not a parameter of vLLM's: it is locally typical sampling (Meister et al.
    2022), with the meaning that it has in transformers.

    `logprobs` and `prompt_logprobs` count the most likely tokens (-1: all; True: 1) to report beside the chosen one.
    They come from the model's own distribution, before all of these changes. `max_tokens` None, or more than fits,
    means up to the model's context. `stop` strings that end within the first `min_tokens` tokens do not count. `seed`
    None draws a seed for the request: from the seed of the engine if it has one, in the order of the client's requests.
    With `n` completions, completion i has `seed` + i. `truncate_prompt_tokens` keeps that many tokens from the end of
    the prompt; -1 keeps as many as leave room for `max_tokens`, or for one token if `max_tokens` alone fills the
    context. `best_of` is only accepted if it is equal to `n`, where it changes nothing. `logits_processors` names
    processors that the engine has registered for the requests that name them; `extra_args` holds the arguments of
    registered processors, plain data of at most 16 KiB, and under "num_speculative_tokens" the maximum number of draft
    tokens of the request in a step (0: it gets none). `structured_outputs` is the form that each completion must have
    (`StructuredOutputsParams`, or a dict of its fields); tokens that it forbids are barred before all other changes.
    `guided_decoding` is its older name: what is given there is in both fields.

    Raises ValueError, naming the field, its value and its range, when a field is out of range, and TypeError
    when it is of the wrong type.
    """

    n: Annotated[int, Integer(1, _MAX_COMPLETIONS)] = 1
    best_of: Annotated[int | None, Integer(1, _MAX_COMPLETIONS, optional=True)] = None
    presence_penalty: Annotated[
        float, Number(-2.0, 2.0, help="Make tokens of the completion less likely, if X is above 0.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Number(-2.0, 2.0, help="Make frequent tokens of the completion less likely, if X is above 0.")
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Number(
            1 / _PENALTY_LIMIT,
            _PENALTY_LIMIT,
            help="Make tokens of prompt and completion less likely, if X is above 1.",
            generation_config="repetition_penalty",
        ),
    ] = 1.0
    temperature: Annotated[
        float,
        Number(
            0.0,
            1e6,
            help="Draw with this randomness; 0: always the most likely token.",
            generation_config="temperature",
            column="float32",
        ),
    ] = 1.0
    top_p: Annotated[
        float,
        Number(
            0.0,
            1.0,
            open_low=True,
            help="Draw from the smallest set of tokens with this probability.",
            generation_config="top_p",
            column="float32",
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Integer(
            -1,
            _MAX_INT,
            help="Draw from the N most likely tokens; 0: from all.",
            generation_config="top_k",
            column="int64",
        ),
    ] = 0
    min_p: Annotated[
        float,
        Number(
            0.0,
            1.0,
            help="Draw from tokens with at least this share of the highest probability.",
            generation_config="min_p",
            column="float32",
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        Integer(
            -SEED_LIMIT,
            SEED_LIMIT - 1,
            optional=True,
            help="Draw for each prompt with this seed.",
            flag="sampling-seed",
            column="int64",
        ),
    ] = None
    stop: Annotated[
        str | Annotated[list[str], _at_most(_MAX_STOP_STRINGS)] | None,
        Strings(
            _MAX_STOP_STRINGS, allow_single=True, help="End the completion before TEXT; the option may be repeated."
        ),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[int], _at_most(_MAX_STOP_IDS)] | None,
        TokenIds(_MAX_STOP_IDS),
    ] = None
    bad_words: Annotated[
        Annotated[list[str], _at_most(MAX_BAD_WORDS)] | None,
        Strings(MAX_BAD_WORDS),
    ] = None
    ignore_eos: Annotated[bool, Switch(help="Go on past the end-of-sequence token.")] = False
    max_tokens: Annotated[
        int | None,
        Integer(
            1,
            _MAX_INT,
            optional=True,
            help="End a completion after N tokens.",
            generation_config="max_new_tokens",
        ),
    ] = 16
    min_tokens: Annotated[int, Integer(0, _MAX_INT, help="Let a completion end after N tokens at the earliest.")] = 0
    logprobs: Annotated[int | None, LogprobCount(-1, _MAX_INT, optional=True)] = None
    prompt_logprobs: Annotated[int | None, LogprobCount(-1, _MAX_INT, optional=True)] = None
    detokenize: Annotated[bool, Switch()] = True
    skip_special_tokens: Annotated[bool, Switch()] = True
    spaces_between_special_tokens: Annotated[bool, Switch()] = True
    include_stop_str_in_output: Annotated[bool, Switch()] = False
    truncate_prompt_tokens: Annotated[int | None, Integer(-1, _MAX_INT, optional=True)] = None
    output_kind: Annotated[RequestOutputKind, OutputKind()] = RequestOutputKind.CUMULATIVE
    logit_bias: Annotated[
        Annotated[dict[int, float], _at_most(_MAX_VOCAB_IDS)] | None,
        TokenBiases(_MAX_VOCAB_IDS),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[int], _at_most(_MAX_VOCAB_IDS)] | None,
        TokenIds(_MAX_VOCAB_IDS, optional=True),
    ] = None
    guided_decoding: Annotated[Any, OutputForm()] = None
    structured_outputs: Annotated[Any, OutputForm()] = None
    extra_args: Annotated[dict[str, Any] | None, EXTRA_ARGS] = None
    typical_p: Annotated[
        float,
        Number(
            0.0,
            1.0,
            open_low=True,
            help="Draw from the tokens of most typical likelihood, as many as reach this probability.",
            generation_config="typical_p",
            column="float32",
        ),
    ] = 1.0
    logits_processors: Annotated[
        Annotated[list[str], _at_most(_MAX_PROCESSORS)] | None,
        ProcessorNames(_MAX_PROCESSORS),
    ] = None

    def __post_init__(self) -> None:
        for name, default, checked in _CHECKS:
            value = getattr(self, name)
            if value is default:
                continue
            plain = checked(name, value)
            if plain is not value:
                setattr(self, name, plain)
        self._check_together()
        if self.guided_decoding is not None:
            self.structured_outputs = self.guided_decoding
        if self.seed == -1:
            self.seed = None  # callers of the older API write -1 for "no seed"

    @classmethod
    def from_optional(cls, **fields: Any) -> "SamplingParams":
        """Return the parameters of `fields`, as the constructor does, but more leniently.

        None stands for the default of a field that cannot be None, and each bias of `logit_bias` is clamped to
        [-100, 100].
        """
        given = {
            name: value
            for name, value in fields.items()
            if value is not None or name not in PARAMETERS or getattr(PARAMETERS[name], "optional", False)
        }
        biases = given.get("logit_bias")
        if isinstance(biases, dict):
            given["logit_bias"] = {token_id: _clamped(bias) for token_id, bias in biases.items()}
        return cls(**given)

    def _check_together(self) -> None:
        """Raise ValueError for values that are valid in their fields, but not together."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}")
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(
                f"best_of must be None or equal to n={self.n}, got {self.best_of}: no completions are drawn that are "
                "not returned; set n to that many, ask for logprobs, and choose by cumulative_logprob"
            )
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n must be 1 with temperature=0, got {self.n}: all completions would be the same; set "
                "temperature above 0"
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize=True; use stop_token_ids with detokenize=False")
        if self.guided_decoding is not None and self.structured_outputs not in (None, self.guided_decoding):
            raise ValueError("guided_decoding and structured_outputs must not differ: give structured_outputs alone")
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be -1 or at least 1, got 0")

    @property
    def sampling_type(self) -> SamplingType:
        """Return how tokens are chosen."""
        if self.temperature == 0:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    def clone(self) -> "SamplingParams":
        """Return a copy whose fields can be changed without changing this object (lists are not copied).

        Raises what the constructor raises, if fields were changed since.
        """
        return msgspec.structs.replace(self)


def _clamped(bias: Any) -> Any:
    """Return `bias`, or the nearer end of [-100, 100] for a number outside it; anything but a number as it is."""
    is_number = isinstance(bias, numbers.Real)
    if is_number and bias < -100:
        return -100.0
    return 100.0 if is_number and bias > 100 else bias


def _declared(field: msgspec.structs.FieldInfo) -> Parameter:
    """Return the declaration in the type of `field`."""
    for metadata in get_args(field.type):
        if isinstance(metadata, Parameter):
            return metadata
    raise TypeError(f"SamplingParams.{field.name} has no declaration; write its type as Annotated[type, Parameter]")


PARAMETERS = {field.name: _declared(field) for field in msgspec.structs.fields(SamplingParams)}
"""The declaration of each field, in the order of the fields."""
_UNSET = object()
_CHECKS = tuple(
    (name, default if checked(name, default) is default else _UNSET, checked)
    for name, default, checked in (
        (field.name, field.default, PARAMETERS[field.name].checked) for field in msgspec.structs.fields(SamplingParams)
    )
)
"""The name of each field, the value that needs no check, if there is one, and the check. Most fields of most requests
have their default."""


class BeamSearchParams:
    """The parameters of vLLM's beam search, which is not served."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("there is no beam search: ask for n completions with logprobs, and choose among them")
