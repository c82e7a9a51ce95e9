"""Messages between a core and the rank hosts of other machines, over TCP with keys.

A rank host sends single frames. A core sends a frame that names the kind (`ANSWER`, `MESSAGE` or `PROBE`), then the
answer to a Hello, the parts of a message for the ring, or nothing.
"""

import signal
from typing import Annotated, Any, Final

import msgspec

from vllm_mp.core.parallel.messages import FromRank

ANSWER: Final = b"answer"
MESSAGE: Final = b"message"
PROBE: Final = b"probe"
"""Nothing to do: the core finds out whether the connection still exists."""
BEAT_S: Final = 0.5
"""Interval in which a rank host shows that it and its ranks are alive."""
MAX_SAID_BYTES: Final = 2**24


_Name = Annotated[str, msgspec.Meta(max_length=256)]


class Hello(msgspec.Struct, tag="hello", kw_only=True):
    """A rank host wants to run the ranks of a node. New fields come last and have defaults."""

    node: int
    protocol: int
    package: _Name
    machine: _Name
    options: dict[_Name, Any]
    """The options that `messages.shared_options` returns."""


class Started(msgspec.Struct, tag="started", kw_only=True):
    """The processes of the ranks, in the order of ranks."""

    pids: list[int]


class Said(msgspec.Struct, tag="said", kw_only=True):
    """A message of a rank."""

    rank: int
    said: FromRank


class Beats(msgspec.Struct, tag="beats", kw_only=True):
    """The number of beats of each rank, in the order of ranks."""

    num_beats: list[int]


class RanksFailed(msgspec.Struct, tag="ranks_failed", kw_only=True):
    """A rank has ended or failed, or the ranks could not be started."""

    error: str
    is_mistake: bool
    """The error is a mistake in the configuration, explained to the user."""
    outside_signal: Annotated[int, msgspec.Meta(ge=0, le=signal.NSIG)] = 0
    """The field of `WorkerFailedError`."""


class Refused(msgspec.Struct, tag="refused", kw_only=True):
    """The rank host cannot join."""

    reason: str


class Welcome(msgspec.Struct, tag="welcome", kw_only=True):
    """The rank host starts its ranks, which meet the others at `meeting_place`."""

    meeting_place: str


FromHost = Hello | Started | Said | Beats | RanksFailed
Answer = Refused | Welcome
