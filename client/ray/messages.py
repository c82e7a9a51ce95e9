"""Messages between the client and its driver process: lines of JSON, on the driver's standard input and output."""

import msgspec

from vllm_mp.config import VllmConfig


class Launch(msgspec.Struct, kw_only=True):
    """The first message to the driver."""

    config: VllmConfig
    folder: str
    """The client's private folder, in which the driver makes the key files of the client."""
    operator_key: bytes
    """The key with which the client is an operator of the cores."""
    address: str | None
    """The cluster that an earlier driver has used; None: the cluster that `RAY_ADDRESS` or this machine has, else a
    local one."""
    parent_pid: int


class StartCore(msgspec.Struct, tag="start", frozen=True):
    """Start a core in a free slot."""

    slot: int


class StopCore(msgspec.Struct, tag="stop", frozen=True):
    """End a core, and release what is reserved for it alone."""

    slot: int


class Connected(msgspec.Struct, tag="connected", frozen=True):
    """The driver is connected to a cluster."""

    address: str | None
    """None: a local cluster, which ends with the driver."""


class Waits(msgspec.Struct, tag="waits", frozen=True):
    """The cluster has no room for a core, which starts once there is."""

    slot: int
    why: str


class Serves(msgspec.Struct, tag="serves", frozen=True):
    """A core serves."""

    slot: int
    address: str
    key_file: str
    """The client's key file for this core."""
    nodes: list[str]
    """The names of its nodes, for people; the first has the core."""
    resources: dict[str, float]
    """What is reserved for the core on each node."""

    @property
    def node(self) -> str:
        """The nodes in one text."""
        return " and ".join(self.nodes)


class Lost(msgspec.Struct, tag="lost", frozen=True):
    """The slot has no core: it did not start, or its actor or its node is gone."""

    slot: int
    cause: str
    is_final: bool
    """Another attempt would fail too."""


class Stopped(msgspec.Struct, tag="stopped", frozen=True):
    """The answer to `StopCore`."""

    slot: int


Order = StartCore | StopCore
State = Waits | Serves | Lost | Stopped
"""What the driver says of a core slot."""
