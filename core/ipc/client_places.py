"""The places for clients of a core: a share for each owner, and places kept for operators and for those that return."""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

from vllm_mp import wire

_MAX_KEPT_FOR_OPERATORS: Final = 64
_OWNER_SHARE: Final = 0.75
"""Share of the places that other owners leave which the clients of one owner may take."""
_RETURN_S: Final = 60.0
"""Seconds that the clients of the predecessor have for their return, from the first client on."""


class ClientPlaces:
    """Counts the clients of each owner, a process of this machine or a key, and refuses those beyond a share.

    However many clients one owner opens, a client of another owner finds a place, and so does an operator. Clients of
    the core that died keep their places for a while.
    """

    def __init__(self, returning: Iterable[bytes] = ()) -> None:
        """`returning` are the tokens of the clients that the predecessor had."""
        self._num_of: Counter[str] = Counter()
        self._returning = set(returning)
        self._return_until: float | None = None
        """In seconds of `time.monotonic()`."""

    def check(self, owner: str, token: bytes, is_operator: bool) -> None:
        """Raise ValueError, with the remedy, if there is no place for a new client."""
        now = time.monotonic()
        if self._return_until is None:
            self._return_until = now + _RETURN_S
        if now > self._return_until:
            self._returning.clear()
        if token in self._returning:
            return
        limit = wire.MAX_CLIENTS
        num_free = limit - self._num_of.total() - len(self._returning)
        if is_operator:
            if num_free <= 0:
                raise ValueError(f"too many clients of this core: the limit is {limit}; close some clients")
            return
        num_own = self._num_of[owner]
        share = int(_OWNER_SHARE * (num_own + num_free - min(_MAX_KEPT_FOR_OPERATORS, limit // 8)))
        if num_own >= share:
            of_owner = f", of which {owner} has {num_own} and may have {max(0, share)}" if owner else ""
            raise ValueError(f"too many clients of this core: the limit is {limit}{of_owner}; close some clients")

    def take(self, owner: str, token: bytes) -> None:
        """Count a new client."""
        self._returning.discard(token)
        self._num_of[owner] += 1

    def give_back(self, owner: str) -> None:
        """Count a client no longer, which has left."""
        self._num_of[owner] -= 1
        if not self._num_of[owner]:
            del self._num_of[owner]
