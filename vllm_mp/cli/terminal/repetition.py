"""Answers that repeat the same block of text without end: what prevents them, and what detects them."""

from collections.abc import Mapping
from typing import Any

_MIN_CHARACTERS, _MIN_COPIES = 400, 3
"""Repeated text is a loop from this length and this number of copies. Rows of a table and refrains stay below them."""
_MAX_BLOCK = 2000
"""Length of the longest block that is detected, in characters."""
_CHECK_INTERVAL = 32
"""Number of new characters after which a growing text is searched."""
_PROBE = 32
"""Length of the end of the text whose earlier occurrences give the possible lengths of the block."""
_FREQUENCY_PENALTY = 0.3
"""Keeps small models out of loops. Unlike a repetition penalty it leaves the words of the question alone."""


def penalty_against_loops(model_defaults: Mapping[str, Any]) -> dict[str, float]:
    """Return the penalty of answers to messages of a user; none for a model that sets a repetition penalty."""
    return {} if "repetition_penalty" in model_defaults else {"frequency_penalty": _FREQUENCY_PENALTY}


class LoopGuard:
    """Finds out whether a growing text has begun to repeat itself."""

    def __init__(self) -> None:
        self._num_checked = 0
        """Number of characters that were searched."""

    def finds_loop(self, text: str) -> bool:
        """Return whether the end of `text` repeats a block; False if little was added since the last search."""
        if len(text) - self._num_checked < _CHECK_INTERVAL:
            return False
        self._num_checked = len(text)
        return repeated_block(text) > 0


def repeated_block(text: str) -> int:
    """Return the length of the block that the end of `text` repeats, in characters; 0 if there is none."""
    if len(text) < _MIN_CHARACTERS:
        return 0
    probe = text[-_PROBE:]
    start = max(0, len(text) - _PROBE - _MAX_BLOCK)
    position = len(text) - _PROBE
    while (position := text.rfind(probe, start, position + _PROBE - 1)) != -1:
        block = len(text) - _PROBE - position
        length = max(_MIN_CHARACTERS, _MIN_COPIES * block)
        if len(text) >= length and text[-length:-block] == text[block - length :]:
            return block
    return 0


def without_repetition(text: str) -> str:
    """Return `text` up to the end of the first copy of the block that its end repeats.

    More copies in a conversation would lead the next answers into the same loop.
    """
    block = repeated_block(text)
    end = len(text)
    while block and end > block and text[end - 1] == text[end - 1 - block]:
        end -= 1
    return text[:end]
