"""The endpoint /v1/models: the models that requests may name."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_mp.server.state import ServerState


async def list_models(request: Request) -> Response:
    """Return the served model in OpenAI's list."""
    server: ServerState = request.app.state.server
    config = server.engine.model_config
    model = {
        "id": config.served_model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "vllm_mp",
        "max_model_len": config.max_model_len,
    }
    return Response(msgspec.json.encode({"object": "list", "data": [model]}), media_type="application/json")


ROUTES = [Route("/v1/models", list_models)]
