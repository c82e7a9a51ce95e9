"""The memory that live requests take in the core, and what each client may have of it."""

from collections import Counter

MAX_BYTES = 2**31
"""Of all live requests together, as they came over the wire, and `REQUEST_BYTES` for each."""
REQUEST_BYTES = 2**10
"""What a request takes besides what it says."""


class MemoryQuota:
    """Counts bytes by client.

    A client may take as much as it leaves for others (the dynamic threshold of Choudhury and Hahne, 1998): one alone
    gets a half, the next a quarter, and however much somebody asks for, there is something left for whoever comes.
    """

    def __init__(self) -> None:
        self._used: Counter[int] = Counter()
        self._total = 0

    def check(self, client: int, num_bytes: int) -> None:
        """Raise ValueError if `client` may not have `num_bytes` more."""
        if self._used[client] + num_bytes > MAX_BYTES - self._total - num_bytes:
            raise ValueError(
                f"the live requests of this client take {self._used[client]} bytes, those of all clients {self._total} "
                f"of {MAX_BYTES}: this one of {num_bytes} bytes has no room; wait for some to end"
            )

    def take(self, client: int, num_bytes: int) -> None:
        """Note that `client` has `num_bytes` more."""
        self._used[client] += num_bytes
        self._total += num_bytes

    def give_back(self, client: int, num_bytes: int) -> None:
        """Note that `client` has `num_bytes` less."""
        self._used[client] -= num_bytes
        self._total -= num_bytes
        if not self._used[client]:
            del self._used[client]
