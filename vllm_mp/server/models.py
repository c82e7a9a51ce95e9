"""The endpoint /v1/models: the models that requests may name."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_mp.server.errors import ApiError
from vllm_mp.server.state import ServerState


class Model(msgspec.Struct):
    """A model that requests may name."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    """Maximum number of tokens of a request, prompt and completion together."""


class ModelList(msgspec.Struct):
    """The models of the server."""

    object: str
    data: list[Model]


def check_model(server: ServerState, name: str | None) -> str:
    """Return the name of the served model. Raises ApiError if a request names another; it may name none."""
    served = server.engine.model_config.served_model_name
    if name is not None and name != served:
        raise ApiError(
            404,
            f"the model {name[:100]!r} does not exist; the server has {served!r}",
            param="model",
            code="model_not_found",
        )
    return served


async def list_models(request: Request) -> Response:
    """Return the served model in OpenAI's list."""
    models = ModelList("list", [_served_model(request.app.state.server)])
    return Response(msgspec.json.encode(models), media_type="application/json")


async def retrieve_model(request: Request) -> Response:
    """Return the served model, if the path names it."""
    server: ServerState = request.app.state.server
    check_model(server, request.path_params["model"])
    return Response(msgspec.json.encode(_served_model(server)), media_type="application/json")


def _served_model(server: ServerState) -> Model:
    config = server.engine.model_config
    return Model(config.served_model_name, "model", server.created, "vllm_mp", config.max_model_len)


ROUTES = [Route("/v1/models", list_models), Route("/v1/models/{model:path}", retrieve_model)]
