"""Who is an operator: whoever sends one of the operators' keys."""

import hashlib
import hmac

from starlette.requests import Request

from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.http.security import given_key
from vllm_mp.server.http.state import ServerState


def check_operator(request: Request) -> ServerState:
    """Return the server of a request that an operator sends. Raises ApiError for other requests."""
    server: ServerState = request.app.state.server
    if not server.options.operator_key:
        raise ApiError(
            403,
            f"{request.url.path} is for operators, and this server has no key for them; start it with "
            "--operator-key-file FILE",
            type="permission_error",
            code="no_operator_key",
        )
    given = hashlib.sha256(given_key(request.scope)).digest()
    # Every key is compared, so that the time does not tell which of them matches.
    matches = [hmac.compare_digest(given, hashlib.sha256(key.encode()).digest()) for key in server.options.operator_key]
    if not any(matches):
        raise ApiError(
            401,
            f"{request.url.path} is for operators; send the header `Authorization: Bearer KEY` with an operator's key",
            type="authentication_error",
            code="invalid_operator_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return server
