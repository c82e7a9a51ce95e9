"""The endpoint /live: what the engine does, as server-sent events, for the page at `/`."""

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from vllm_mp.server.http.state import ServerState


async def live(request: Request) -> StreamingResponse:
    """Stream a greeting and then a snapshot each second; 503 if there are too many viewers."""
    server: ServerState = request.app.state.server
    server.live_feed.check_capacity()
    # Proxies must neither keep nor collect the events.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(server.live_feed.events(), headers=headers, media_type="text/event-stream")


ROUTES = [Route("/live", live, include_in_schema=False)]
