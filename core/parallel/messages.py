"""What a core and the processes of its other ranks say to each other, beside steps.

The launch goes to a rank's standard input, calls go through the ring, and everything that a rank says comes through a
pair of Unix sockets that it has inherited. So no other process can join or answer.
"""

import enum
import hashlib
from typing import Any, Final

import msgspec

from vllm_mp import __version__
from vllm_mp.config import VllmConfig
from vllm_mp.wire import SCHEMA

PROTOCOL: Final = 1
"""Version of the messages between the ranks of a core."""
MAX_REPLY_BYTES: Final = 2**16


class Kind(enum.IntEnum):
    """The first 8 bytes of a message in the ring."""

    STEP = 1
    LOGITS = 2
    CALL = 3


class WorkerLaunch(msgspec.Struct, kw_only=True):
    """The line that the process of a rank reads from its standard input before it does anything else."""

    config: VllmConfig
    rank: int
    parent_pid: int
    memory: int
    """Descriptor of the shared memory."""
    slot_bytes: int
    """Bytes of a slot of the ring, which is the beginning of the memory; the group follows."""
    event: int
    """Event descriptor that the core writes to when it has written a message."""
    socket: int
    """Descriptor of the socket for what the rank says."""
    has_own_cpus: bool
    """No other rank has the CPUs of this rank, so that it may spin for a moment when it waits."""
    meeting_place: str
    """Path of the file by which torch.distributed finds the ranks."""


class Joined(msgspec.Struct, tag="joined", kw_only=True):
    """A rank has read its configuration and chosen device, dtype and sizes as the core must have."""

    rank: int
    protocol: int
    package: str
    digest: str


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """A rank has loaded its share of the weights and waits for steps."""

    rank: int


class Reply(msgspec.Struct, tag="reply", kw_only=True):
    """The result of a call, plain data, or the error that it raised."""

    number: int
    result: Any = None
    error: str | None = None


class Failed(msgspec.Struct, tag="failed", kw_only=True):
    """A rank ends because of an error."""

    error: str
    is_mistake: bool = False
    """The error is a mistake in the configuration, explained to the user."""


class Call(msgspec.Struct, kw_only=True):
    """A method that all ranks run."""

    number: int
    method: str
    arguments: list[Any]


class AdapterTable(msgspec.Struct, kw_only=True):
    """The shapes of the factors of an adapter, which are broadcast in this order."""

    parts: list[str]
    shapes: list[tuple[int, int, int, int]]
    """[rank, inputs] and [outputs, rank] of each part."""
    dtype: str


FromRank = Joined | Ready | Reply | Failed


def digest_of(config: VllmConfig) -> str:
    """Return a digest of what all ranks must have in common: this package, its messages, and the configuration."""
    facts = [PROTOCOL, __version__, SCHEMA, msgspec.json.encode(config).decode()]
    return hashlib.blake2b(msgspec.json.encode(facts), digest_size=16).hexdigest()
