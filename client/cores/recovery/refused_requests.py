"""The refusal of requests that are equal to a request that was to blame for deaths of cores."""

import time
from typing import NamedTuple

from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.errors import EngineGenerateError

_REFUSAL_S = 300.0
"""Seconds for which equal requests are refused."""
_MAX_REFUSED = 1024
"""Number of digests that are kept; the oldest is forgotten first."""


class _Refusal(NamedTuple):
    request_id: str
    time: float
    """When the request failed, in seconds of `time.monotonic()`."""
    why: str


class RefusedRequests:
    """Digests of the requests that were to blame in the last minutes."""

    def __init__(self) -> None:
        self._refusals: dict[bytes, _Refusal] = {}
        """By digest, the oldest first."""

    def add(self, stream: RequestStream, why: str) -> None:
        """Refuse requests that are equal to `stream`'s from now on; `why` says what it was to blame for."""
        digest = stream.digest()
        self._refusals.pop(digest, None)
        self._refusals[digest] = _Refusal(stream.request_id, time.monotonic(), why)
        if len(self._refusals) > _MAX_REFUSED:
            del self._refusals[next(iter(self._refusals))]

    def check(self, stream: RequestStream) -> None:
        """Raise EngineGenerateError if a request that is equal to `stream`'s was to blame less than 5 minutes ago."""
        oldest = time.monotonic() - _REFUSAL_S
        for digest, refusal in list(self._refusals.items()):
            if refusal.time > oldest:
                break
            del self._refusals[digest]
        if not self._refusals or (found := self._refusals.get(stream.digest())) is None:
            return
        raise EngineGenerateError(
            f"request {stream.request_id} is refused: it is equal to request {found.request_id}, which failed "
            f"{time.monotonic() - found.time:.0f} s ago because {found.why}; change the request, or send it again "
            f"{_REFUSAL_S:g} s after that failure"
        )
