"""The sampling parameters as fields of a request, derived from the declarations of `SamplingParams`."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from vllm_mp.arguments.parameters import Integer, Number, Parameter
from vllm_mp.requests.sampling_params import PARAMETERS, RequestOutputKind, SamplingParams
from vllm_mp.server.http.body import Ignored, Refused, RequestBody
from vllm_mp.server.http.errors import ApiError, as_refusal
from vllm_mp.server.openai.output_form import GUIDED_FIELDS, output_form

_INTERNAL = frozenset({"output_kind", "detokenize", "extra_args", "structured_outputs", "guided_decoding"})
"""Fields of `SamplingParams` that the server sets itself."""
_REFUSED = ("kv_transfer_params",)
"""Fields of vLLM's that are not served: extensions of its engine."""
_FIELDS = tuple(name for name in PARAMETERS if name not in _INTERNAL)


def _declaration(name: str, parameter: Parameter) -> Any:
    """Return the type of the field of a request: that of `SamplingParams` with its range, or null."""
    plain = next(field.type for field in msgspec.structs.fields(SamplingParams) if field.name == name)
    # The ranges are only described here: `SamplingParams` enforces them, with messages that say more.
    schema: dict[str, Any] = {}
    if isinstance(parameter, Integer):
        schema = {"minimum": parameter.low, "maximum": parameter.high}
    elif isinstance(parameter, Number):
        schema = {"exclusiveMinimum" if parameter.open_low else "minimum": parameter.low, "maximum": parameter.high}
    return Annotated[plain, msgspec.Meta(extra_json_schema=schema)] | None


if TYPE_CHECKING:

    class SamplingFields(RequestBody, kw_only=True):
        """A body with the sampling parameters; each is null unless the request sets it."""
else:
    SamplingFields = msgspec.defstruct(
        "SamplingFields",
        [
            *[(name, _declaration(name, PARAMETERS[name]), None) for name in _FIELDS],
            *[(name, Refused, None) for name in _REFUSED],
            ("structured_outputs", dict[str, Any] | None, None),
            *[(name, kind | None, None) for name, (_, kind) in GUIDED_FIELDS.items()],
            ("use_beam_search", bool | None, None),
            ("vllm_xargs", dict[str, Any] | None, None),  # vLLM's name of extra_args
            ("length_penalty", Ignored, None),  # it only concerns beam search
        ],
        bases=(RequestBody,),
        kw_only=True,
        module=__name__,
        namespace={"__doc__": "A body with the sampling parameters; each is null unless the request sets it."},
    )


def sampling_params(body: SamplingFields, defaults: dict[str, Any], **own: Any) -> SamplingParams:
    """Return the parameters that `body` asks for, over `defaults`; the parameters of `own` precede both.

    A field `max_completion_tokens` is a name of `max_tokens`. Raises ApiError, naming the field, for values out of
    range, for names of a field that differ, and for what is not served.
    """
    if getattr(body, "use_beam_search", None):
        raise ApiError(
            400,
            "use_beam_search is not served; leave it out, and sample with n instead",
            param="use_beam_search",
            code="unsupported_field",
        )
    given = {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
    max_tokens = getattr(body, "max_completion_tokens", None)
    if max_tokens is not None and given.setdefault("max_tokens", max_tokens) != max_tokens:
        raise ApiError(
            400,
            f"max_completion_tokens={max_tokens} and its other name max_tokens={given['max_tokens']} differ; leave out "
            "one of them",
            param="max_completion_tokens",
        )
    if (extra_args := getattr(body, "vllm_xargs", None)) is not None:
        given["extra_args"] = extra_args
    form, _ = output_form(body)
    if form is not None:
        given["structured_outputs"] = form
    kind = RequestOutputKind.DELTA if getattr(body, "stream", False) else RequestOutputKind.FINAL_ONLY
    try:
        return SamplingParams(**{"output_kind": kind, **defaults, **given, **own})
    except (ValueError, TypeError, NotImplementedError) as error:
        refusal = as_refusal(error, (*_FIELDS, "extra_args"))
        if refusal.param == "max_tokens":
            name = _name_of_max_tokens(body)
            message = refusal.message.replace("max_tokens", name, 1)
            raise ApiError(refusal.status, message, param=name, code=refusal.code) from None
        raise refusal from None


def _name_of_max_tokens(body: SamplingFields) -> str:
    """Return the name that the request gives to `max_tokens`."""
    names = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    return next((name for name in names if getattr(body, name, None) is not None), "max_tokens")


def refused_parameters(error: Exception, prompt_path: str) -> ApiError:
    """Return the ApiError for what the engine raised for a request's parameters, or for its prompt at `prompt_path`."""
    refusal = as_refusal(error, (*_FIELDS, "extra_args", "priority", "cache_salt", "request_id"))
    if refusal.param is None:
        refusal.param = prompt_path
    return refusal
