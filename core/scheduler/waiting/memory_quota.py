"""The memory of the core that live requests take, and the share of each owner, client and tenant."""

from collections import Counter
from typing import TypeVar

from vllm_mp.core.scheduler.request import Line, Request

MAX_BYTES = 2**31
"""Limit for all live requests together: bytes of their messages on the wire, and `REQUEST_BYTES` for each."""
REQUEST_BYTES = 2**10
"""Bytes that a request takes beside its message."""


_Party = TypeVar("_Party", Line, str)
_OWNER_SHARE = 0.75
"""Share of what other owners leave that all requests of one owner may take."""


class NoRoomError(ValueError):
    """There is no memory for a request, until others have ended."""


class MemoryQuota:
    """Counts the bytes of live requests, by the owners of clients and by the lines of each owner.

    An owner may take most of what other owners leave, and a line as much as it leaves of that for others (the dynamic
    threshold of Choudhury and Hahne, 1998): the first line gets at most a half of it, the next a quarter. So some
    memory is always left for a new line, and for a new owner, however many clients another owner has.
    """

    def __init__(self) -> None:
        self._used: Counter[Line] = Counter()
        self._used_by_owner: Counter[str] = Counter()
        self._total = 0

    def check(self, request: Request) -> None:
        """Raise NoRoomError if there is no room for `request`."""
        own, num_bytes = self._used_by_owner[request.owner], request.num_bytes
        room = int(_OWNER_SHARE * (MAX_BYTES - self._total + own)) - own - num_bytes
        if self._used[request.line] + num_bytes > room:
            raise NoRoomError(
                f"no room for a request of {num_bytes} bytes: the live requests of this client take "
                f"{self._used[request.line]} bytes, all requests of its process or key {own}, the requests of all "
                f"clients {self._total} of {MAX_BYTES} bytes; wait until some of them have ended"
            )

    def take(self, request: Request) -> None:
        """Count the bytes of `request`."""
        self._used[request.line] += request.num_bytes
        self._used_by_owner[request.owner] += request.num_bytes
        self._total += request.num_bytes

    def give_back(self, request: Request) -> None:
        """Count the bytes of `request` no longer."""
        self._total -= request.num_bytes
        _subtract(self._used, request.line, request.num_bytes)
        _subtract(self._used_by_owner, request.owner, request.num_bytes)


def _subtract(counts: Counter[_Party], party: _Party, num_bytes: int) -> None:
    counts[party] -= num_bytes
    if not counts[party]:
        del counts[party]
