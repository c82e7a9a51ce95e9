"""The memory of the core that live requests take, and the share of each client."""

from collections import Counter

MAX_BYTES = 2**31
"""Limit for all live requests together: bytes of their messages on the wire, and `REQUEST_BYTES` for each."""
REQUEST_BYTES = 2**10
"""Bytes that a request takes beside its message."""


class MemoryQuota:
    """Counts the bytes of live requests by client.

    A client may take as much as it leaves for others (the dynamic threshold of Choudhury and Hahne, 1998). The first
    client gets at most a half, the next a quarter. So some memory is always left for a new client.
    """

    def __init__(self) -> None:
        self._used: Counter[int] = Counter()
        self._total = 0

    def check(self, client: int, num_bytes: int) -> None:
        """Raise ValueError if `client` may not take `num_bytes` more."""
        if self._used[client] + num_bytes > MAX_BYTES - self._total - num_bytes:
            raise ValueError(
                f"no room for a request of {num_bytes} bytes: the live requests of this client take "
                f"{self._used[client]} bytes, the requests of all clients {self._total} of {MAX_BYTES} bytes; wait "
                "until some of them have ended"
            )

    def take(self, client: int, num_bytes: int) -> None:
        """Count `num_bytes` more for `client`."""
        self._used[client] += num_bytes
        self._total += num_bytes

    def give_back(self, client: int, num_bytes: int) -> None:
        """Count `num_bytes` less for `client`."""
        self._used[client] -= num_bytes
        self._total -= num_bytes
        if not self._used[client]:
            del self._used[client]
