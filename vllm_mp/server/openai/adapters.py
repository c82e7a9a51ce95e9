"""The endpoints /v1/load_lora_adapter and /v1/unload_lora_adapter: LoRA adapters of a running server."""

import msgspec
from starlette.responses import Response

from vllm_mp.errors import EngineDeadError, EngineError, NotOperatorError
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.server.http.body import RequestBody
from vllm_mp.server.http.endpoint import Call, json_response, post
from vllm_mp.server.http.errors import ApiError, as_refusal


class LoadAdapterBody(RequestBody, kw_only=True):
    """An adapter to load."""

    lora_name: str
    """The name under which requests name it as their model."""
    lora_path: str
    """The folder that holds it, on the core's machine."""
    load_inplace: bool | None = None
    """Read the folder again, and replace the adapter of this name."""


class UnloadAdapterBody(RequestBody, kw_only=True):
    """An adapter to remove."""

    lora_name: str
    lora_int_id: int | None = None
    """The id of the adapter, which is checked if it is given."""


class AdapterAnswer(msgspec.Struct):
    """What has been done."""

    message: str


async def load_adapter(call: Call, body: LoadAdapterBody) -> Response:
    """Load an adapter, which requests may then name as their model."""
    _check_allowed(call)
    async with call.server.adapter_lock(body.lora_name):
        await _load(call, body)
    return _answer(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def _load(call: Call, body: LoadAdapterBody) -> None:
    adapters = call.server.adapters
    known = adapters.get(body.lora_name)
    if body.lora_name == call.server.engine.model_config.served_model_name or (known and not body.load_inplace):
        raise ApiError(
            400,
            f"the model {body.lora_name[:100]!r} exists already; choose another name, or set load_inplace",
            param="lora_name",
        )
    try:
        number = known.lora_int_id if known else await _new_id(call)
        lora = LoRARequest(body.lora_name, number, body.lora_path, load_inplace=known is not None)
        await call.server.engine.add_lora(lora)
    except (ValueError, TypeError) as error:
        raise as_refusal(error, ("lora_name", "lora_path")) from None
    except EngineDeadError:
        raise
    except NotOperatorError as error:
        raise ApiError(403, str(error)) from None
    except EngineError as error:
        raise ApiError(400, str(error), param="lora_path") from None
    adapters[body.lora_name] = LoRARequest(body.lora_name, number, body.lora_path)


async def unload_adapter(call: Call, body: UnloadAdapterBody) -> Response:
    """Remove an adapter; requests that use it run to their ends."""
    _check_allowed(call)
    async with call.server.adapter_lock(body.lora_name):
        await _unload(call, body)
    return _answer(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _unload(call: Call, body: UnloadAdapterBody) -> None:
    lora = call.server.adapters.get(body.lora_name)
    if lora is None or body.lora_int_id not in (None, lora.lora_int_id):
        raise ApiError(404, f"the adapter {body.lora_name[:100]!r} does not exist", param="lora_name")
    try:
        await call.server.engine.remove_lora(lora.lora_int_id)
    except NotOperatorError as error:
        raise ApiError(403, str(error)) from None
    del call.server.adapters[body.lora_name]


def _check_allowed(call: Call) -> None:
    """Raise ApiError unless the operator lets requests name folders."""
    if not call.server.options.allow_runtime_lora_updating:
        raise ApiError(
            403,
            "this server loads no adapters for requests; start it with --allow-runtime-lora-updating, or with "
            "--lora-modules NAME=FOLDER",
        )


async def _new_id(call: Call) -> int:
    """Return an id that no adapter has, also none that is being loaded."""
    server = call.server
    listed = await server.engine.list_loras()
    known = [lora.lora_int_id for lora in server.adapters.values()]
    server.last_adapter_id = max([server.last_adapter_id, *listed, *known]) + 1
    return server.last_adapter_id


def _answer(message: str) -> Response:
    return json_response(AdapterAnswer(message))


ROUTES = [
    post("/v1/load_lora_adapter", load_adapter, LoadAdapterBody, AdapterAnswer),
    post("/v1/unload_lora_adapter", unload_adapter, UnloadAdapterBody, AdapterAnswer),
]
