"""The endpoint /v1/models: the models that requests may name."""

from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_mp.model_store.resolve import is_path
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.server.http.endpoint import json_response
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.http.state import ServerState
from vllm_mp.validation.request_validation import check_generates

_MAX_NAMES = 20
"""Maximum number of names that an error lists."""


class Model(msgspec.Struct):
    """A model that requests may name."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    """What the model was started as: an alias or an id of the hub; instead of a local path, the same as `id`."""
    max_model_len: int
    """Maximum number of tokens of a request, prompt and completion together."""
    parent: str | UnsetType = UNSET
    """The model that an adapter changes; absent for the model itself."""


class ModelList(msgspec.Struct):
    """The models of the server."""

    object: str
    data: list[Model]


class ChosenModel(NamedTuple):
    """The model that answers a request."""

    name: str
    lora: LoRARequest | None
    """The adapter with that name; None for the base model."""


def check_model(server: ServerState, name: str | None, *, generates: bool = False) -> ChosenModel:
    """Return the model that a request names: the base model, also if the name is missing or empty, or an adapter.

    Raises ApiError for any other name, and with `generates` if the model generates no text.
    """
    if generates:
        try:
            check_generates(server.engine.model_config)
        except ValueError as error:
            raise ApiError(400, str(error), param="model") from None
    served = server.engine.model_config.served_model_name
    if not name or name == served:
        return ChosenModel(served, None)
    if (lora := server.adapters.get(name)) is not None:
        return ChosenModel(name, lora)
    names = ", ".join(map(repr, [served, *server.adapters][:_MAX_NAMES]))
    raise ApiError(
        404, f"the model {name[:100]!r} does not exist; the server has {names}", param="model", code="model_not_found"
    )


async def list_models(request: Request) -> Response:
    """Return the served model and its adapters in OpenAI's list."""
    server: ServerState = request.app.state.server
    models = [_described(server, server.engine.model_config.served_model_name)]
    models += [_described(server, name) for name in server.adapters]
    return json_response(ModelList("list", models))


async def retrieve_model(request: Request) -> Response:
    """Return the model or the adapter that the path names."""
    server: ServerState = request.app.state.server
    chosen = check_model(server, request.path_params["model"])
    return json_response(_described(server, chosen.name))


def _described(server: ServerState, name: str) -> Model:
    config = server.engine.model_config
    is_adapter = name in server.adapters
    # A path of the machine is not for clients.
    root = name if is_adapter or is_path(config.model) else config.model
    parent = config.served_model_name if is_adapter else UNSET
    return Model(name, "model", server.created, "vllm_mp", root, config.max_model_len, parent)


ROUTES = [Route("/v1/models", list_models), Route("/v1/models/{model:path}", retrieve_model)]
