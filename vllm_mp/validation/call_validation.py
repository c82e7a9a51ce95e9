"""The arguments of the operations pause, sleep and wake_up, which the core checks again, and limits of time."""

import reprlib
from collections.abc import Collection
from typing import Any

from vllm_mp.wire import PAUSE_MODES, SLEEP_LEVELS, SLEEP_MODES, SLEEP_TAGS


def check_pause(mode: Any, clear_cache: Any) -> None:
    """Raise ValueError for an unknown mode, and TypeError unless `clear_cache` is a bool; both name the value."""
    if mode not in PAUSE_MODES:
        raise ValueError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {reprlib.repr(mode)}")
    if not isinstance(clear_cache, bool):
        raise TypeError(f"clear_cache must be true or false, got {reprlib.repr(clear_cache)}")


def check_sleep(level: Any, mode: Any) -> None:
    """Raise ValueError, naming the argument and its value, unless both arguments of a sleep are valid."""
    if type(level) is not int or level not in SLEEP_LEVELS:
        raise ValueError(
            "level must be 1, which keeps the weights in host memory, or 2, which drops them, got "
            f"{reprlib.repr(level)}"
        )
    if mode not in SLEEP_MODES:
        raise ValueError(
            f"mode must be one of {', '.join(SLEEP_MODES)}, got {reprlib.repr(mode)}; to let requests end, call "
            "pause_generation('wait') first"
        )


def check_timeout(timeout: Any) -> None:
    """Raise ValueError, naming the value, unless `timeout` is None or a number of seconds above 0."""
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and timeout > 0):
        raise ValueError(
            f"timeout must be a number of seconds above 0, or None for the default, got {reprlib.repr(timeout)}"
        )


def check_wake_up(tags: Any) -> tuple[str, ...]:
    """Return the tags to wake up, in the order in which their memory comes back; None stands for all tags.

    Raises ValueError, naming the wrong value, unless `tags` is None or a collection of at least one of
    `wire.SLEEP_TAGS`.
    """
    if tags is None:
        return SLEEP_TAGS
    is_list = isinstance(tags, Collection) and not isinstance(tags, str | bytes) and len(tags) > 0
    for tag in tags if is_list else [tags]:
        if not is_list or tag not in SLEEP_TAGS:
            raise ValueError(
                f"tags must be a list of {' and '.join(SLEEP_TAGS)}, or None for both, got {reprlib.repr(tag)}"
            )
    return tuple(tag for tag in SLEEP_TAGS if tag in tags)
