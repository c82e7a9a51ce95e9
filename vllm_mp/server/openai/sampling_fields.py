"""The sampling parameters as fields of a request, derived from the declarations of `SamplingParams`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from vllm_mp.arguments.parameters import Integer, Number, Parameter
from vllm_mp.client.images.media import image_number, renamed
from vllm_mp.requests.sampling_params import PARAMETERS, RequestOutputKind, SamplingParams
from vllm_mp.server.http.body import Ignored, Refused, RequestBody
from vllm_mp.server.http.errors import ApiError, as_refusal
from vllm_mp.server.openai.output_form import GUIDED_FIELDS, output_form

_INTERNAL = frozenset({"output_kind", "detokenize", "extra_args", "structured_outputs", "guided_decoding"})
"""Fields of `SamplingParams` that the server sets itself."""
_REFUSED = ("kv_transfer_params",)
"""Fields of vLLM's that are not served: extensions of its engine."""
_OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
}
"""Further names of parameters, which endpoints declare as they need them."""
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
            ("repeat_penalty", float | None, None),  # llama.cpp's and Ollama's name of repetition_penalty
        ],
        bases=(RequestBody,),
        kw_only=True,
        module=__name__,
        namespace={"__doc__": "A body with the sampling parameters; each is null unless the request sets it."},
    )


def sampling_params(body: SamplingFields, defaults: dict[str, Any], **own: Any) -> SamplingParams:
    """Return the parameters that `body` asks for, over `defaults`; the parameters of `own` precede both.

    The fields of `_OTHER_NAMES` are names of others. A request that `asks_for_no_tokens` gets one, the least that the
    engine makes. Raises ApiError, naming the field, for values out of range, for names of a field that differ, and for
    what is not served.
    """
    if getattr(body, "use_beam_search", None):
        raise ApiError(
            400,
            "use_beam_search is not served; leave it out, and sample with n instead",
            param="use_beam_search",
            code="unsupported_field",
        )
    given = {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
    for other, name in _OTHER_NAMES.items():
        value = getattr(body, other, None)
        if value is not None and given.setdefault(name, value) != value:
            raise ApiError(
                400,
                f"{other}={value} and its other name {name}={given[name]} differ; leave out one of them",
                param=other,
            )
    if asks_for_no_tokens(body):
        if given.get("min_tokens"):
            message = f"min_tokens={given['min_tokens']} is more than {_given_name('max_tokens', body)}=0; lower it"
            raise ApiError(400, message, param="min_tokens")
        own["max_tokens"] = 1
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
        if refusal.param is not None and (name := _given_name(refusal.param, body)) != refusal.param:
            message = refusal.message.replace(refusal.param, name, 1)
            raise ApiError(refusal.status, message, param=name, code=refusal.code) from None
        raise refusal from None


def asks_for_no_tokens(body: SamplingFields) -> bool:
    """Return whether the request wants its prompt read, and no token after it: `max_tokens` is 0."""
    return getattr(body, _given_name("max_tokens", body), None) == 0


def _given_name(name: str, body: SamplingFields) -> str:
    """Return the name that the request gives to the parameter `name`."""
    names = [name, *(other for other, means in _OTHER_NAMES.items() if means == name)]
    return next((name for name in names if getattr(body, name, None) is not None), name)


def refused_parameters(error: Exception, prompt_path: str, image_paths: Sequence[str] = ()) -> ApiError:
    """Return the ApiError for what the engine raised for a request's parameters, or for its prompt at `prompt_path`.

    `image_paths` are the fields with the images of the prompt, in order.
    """
    number = image_number(str(error))
    if number is not None and number < len(image_paths):
        return ApiError(400, renamed(str(error), image_paths[number]), param=image_paths[number])
    refusal = as_refusal(error, (*_FIELDS, "extra_args", "priority", "cache_salt", "request_id"))
    if refusal.param is None:
        refusal.param = prompt_path
    return refusal
