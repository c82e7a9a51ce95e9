"""The width of a terminal, and texts shortened to it."""

import os
from typing import Any

_UNKNOWN = 80
"""Columns of a terminal that does not tell its width."""


def terminal_columns(stream: Any) -> int:
    """Return the number of columns of the terminal behind `stream`, 80 if it is not known."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _UNKNOWN
    except (OSError, ValueError, AttributeError):  # it has no file descriptor, or that of no terminal
        return _UNKNOWN


def shortened(text: str, columns: int) -> str:
    """Return `text`, cut to fit into `columns`: between words if possible, and never within a number."""
    if len(text) <= columns:
        return text
    end = max(columns - 1, 0)
    space = text.rfind(" ", 0, end + 1)
    if space >= end // 2 > 0:
        end = space
    elif text[end : end + 1].isdigit():
        end = len(text[:end].rstrip("0123456789."))
    return (text[:end].rstrip() + "…")[:columns]
