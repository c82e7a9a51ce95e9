"""What a client has been sent and has not read."""

import secrets
from collections import deque

_MARK_BYTES = 2**16
"""Output after which a client is sent a mark."""
_MAX_UNREAD_STEPS = 4
"""Results of steps that a client may leave unread, however large they are."""


class UnreadOutput:
    """Counts the bytes of the messages to one client that it has not read.

    After some output the client is sent a mark, a random number that it must return. It cannot return a mark that it
    has not read, so a client that only pretends to read is found out.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes sent since the latest mark that the client has returned."""
        self._marks: deque[tuple[int, int]] = deque()
        """(mark, bytes sent between the mark before and this one) of the marks that the client has not returned."""
        self._since_mark = 0
        self._step_bytes = 0
        """Bytes of results of the step since the last call of `exceeds`."""
        self._max_step_bytes = 0
        self._max_message_bytes = 0

    def add(self, num_bytes: int, is_of_step: bool) -> int | None:
        """Count a message that was sent; return the mark to send next, if one is due.

        `is_of_step`: the message has results of a step.
        """
        self.num_bytes += num_bytes
        self._step_bytes += num_bytes * is_of_step
        self._max_message_bytes = max(self._max_message_bytes, num_bytes)
        self._since_mark += num_bytes
        if self._since_mark < _MARK_BYTES:
            return None
        mark = secrets.randbits(63)
        self._marks.append((mark, self._since_mark))
        self._since_mark = 0
        return mark

    def note_seen(self, mark: int) -> bool:
        """Count all before `mark` as read; return False if this is not the oldest mark that is awaited."""
        if not self._marks or self._marks[0][0] != mark:
            return False
        self.num_bytes -= self._marks.popleft()[1]
        return True

    def exceeds(self, limit: int) -> bool:
        """Return whether the client has left more than `limit` bytes and a message unread; call this between two steps.

        A message, or the results of a step, may exceed any limit, and no client can read them before they are sent.
        """
        self._max_step_bytes, self._step_bytes = max(self._max_step_bytes, self._step_bytes), 0
        return self.num_bytes > max(limit + self._max_message_bytes, _MAX_UNREAD_STEPS * self._max_step_bytes)
