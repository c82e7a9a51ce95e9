"""Log-probabilities as they arrive: columns of numbers, made into objects when a consumer takes them."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_mp.outputs import Logprob, LogprobsOnePosition
from vllm_mp.wire import TokenLogprobs

TokenText = Callable[[int], str]
"""Returns the text of a single token."""


class LogprobColumns:
    """The log-probabilities at successive positions of a completion or of a prompt.

    A position stays in columns until a consumer takes it: 8 bytes for each token, where an object takes about 100, and
    a hundredth of the time.
    """

    __slots__ = ("_made", "_num_arrived", "_ranks", "_token_ids", "_token_text", "_values", "_width", "num_made", "sum")

    def __init__(self, token_text: TokenText | None, first: int = 0) -> None:
        """`token_text` gives the objects the text of their tokens; `first` is the first position that has any."""
        self._token_text = token_text
        self._num_arrived = first
        self._width = 0
        """Number of tokens at each position; 0 before the first position."""
        self._token_ids = bytearray()
        """int32 [positions without objects, width], little-endian, as are the next two."""
        self._values = bytearray()
        """float32 [positions without objects, width]."""
        self._ranks = bytearray()
        """uint32 [positions without objects]."""
        self._made: list[Any] = [None] * first
        self.num_made = first
        """Number of positions whose objects have been made."""
        self.sum: float | None = None
        """Sum of the chosen tokens' log-probabilities over the positions whose objects have been made."""

    def __len__(self) -> int:
        """Return the position after the last that has arrived."""
        return self._num_arrived

    @property
    def made(self) -> list[Any]:
        """The objects of each position that has them, without those that `take` returned; None before `first`."""
        return self._made

    def append(self, message: TokenLogprobs) -> None:
        """Add the positions of `message`; repeated positions are ignored.

        Raises ValueError for a message that leaves a gap or whose parts disagree.
        """
        token_ids, values, ranks = message.token_ids, message.values, message.ranks
        count = len(ranks) // 4
        width = len(token_ids) // (4 * count) if count else 0
        if (
            not width
            or len(ranks) != 4 * count
            or len(token_ids) != 4 * count * width
            or len(values) != len(token_ids)
            or self._width not in (0, width)
        ):
            raise ValueError(
                f"the log-probabilities of position {message.position} disagree: {len(token_ids)} bytes of token ids, "
                f"{len(values)} of values, {len(ranks)} of ranks"
            )
        if not token_ids[3::4].isascii():  # the bytes with the signs
            raise ValueError(f"log-probabilities of position {message.position} came with a negative token id")
        num_known = self._num_arrived - message.position
        if num_known:
            if num_known < 0:
                raise ValueError(
                    f"log-probabilities of position {message.position} came, but position {self._num_arrived} is the "
                    "next"
                )
            if num_known >= count:
                return
            count -= num_known
            token_ids, values = token_ids[4 * num_known * width :], values[4 * num_known * width :]
            ranks = ranks[4 * num_known :]
        self._width = width
        self._num_arrived += count
        self._token_ids += token_ids
        self._values += values
        self._ranks += ranks

    def make(self, until: int, max_objects: int = sys.maxsize) -> int:
        """Make the objects of the next positions below `until`; return the number of objects.

        It is at most `max_objects`, except for a single position.
        """
        width, first = self._width, self.num_made
        count = min(until, self._num_arrived) - first
        if count <= 0:
            return 0
        count = min(count, max(1, max_objects // width))
        size = 4 * count * width
        token_ids = np.frombuffer(self._token_ids[:size], "<i4").tolist()
        values = np.frombuffer(self._values[:size], "<f4").tolist()
        ranks = np.frombuffer(self._ranks[: 4 * count], "<u4").tolist()
        del self._token_ids[:size], self._values[:size], self._ranks[: 4 * count]
        token_text, total = self._token_text, self.sum or 0.0
        for row, rank in enumerate(ranks):
            start = row * width
            token_id, value = token_ids[start], values[start]
            total += value
            entry = {token_id: Logprob(value, rank, token_text(token_id) if token_text else None)}
            for column in range(1, width):
                token_id = token_ids[start + column]
                # The chosen token comes first, and a second time at its rank if it is among the most likely.
                if token_id not in entry:
                    text = token_text(token_id) if token_text else None
                    entry[token_id] = Logprob(values[start + column], column, text)
            self._made.append(entry)
        self.num_made, self.sum = first + count, total
        return count * width

    def take(self) -> list[LogprobsOnePosition]:
        """Return `made`, and forget it."""
        made, self._made = self._made, []
        return made

    def cut(self, count: int) -> None:
        """Forget all positions from `count` on; none has its objects yet."""
        rows = max(0, count - self.num_made)
        del self._token_ids[4 * rows * self._width :], self._values[4 * rows * self._width :], self._ranks[4 * rows :]
        self._num_arrived = min(self._num_arrived, count)
