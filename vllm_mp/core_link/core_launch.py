"""How a core process is launched: the line on its standard input, and its files."""

import contextlib
import signal
from pathlib import Path

import msgspec

from vllm_mp.config import VllmConfig
from vllm_mp.core_link.core_status import NOT_SUSPENDED, Suspension
from vllm_mp.requests.lora_request import AdapterRecord
from vllm_mp.wire import NO_DIGEST, PROTOCOL_VERSION, SCHEMA, LastDeath, ModelDigest

STACKS_SIGNAL = signal.SIGUSR1
"""The signal on which a core writes the Python stacks of its threads to its log."""
_MAX_CAUSE_CHARACTERS = 500


def lock_path(socket_path: Path) -> Path:
    """Return the path of the lock file of a Unix socket that clients share."""
    return socket_path.with_name(f"{socket_path.name}.lock")


def status_path(socket_path: Path) -> Path:
    """Return the path of the status page of the cores at a Unix socket that clients share."""
    return socket_path.with_name(f"{socket_path.name}.status")


def waiting_path(status_path: Path) -> Path:
    """Return the path of the status page of a core that does not serve yet, and then renames it to `status_path`."""
    return status_path.with_name(f"{status_path.name}.waiting")


class PublicAddress(msgspec.Struct, kw_only=True):
    """The address at which clients find the cores of one parent, which holds it across incarnations."""

    address: str
    """ipc://PATH or tcp://HOST:PORT."""
    listener: int
    """Descriptor of the listening socket, which the core inherits."""
    key_file: str | None
    """Path of the key file, required for tcp."""

    def remove_files(self) -> None:
        """Remove the files of a Unix socket, the lock last, for the parent."""
        if self.address.startswith("ipc://"):
            path = Path(self.address.removeprefix("ipc://"))
            for file in (waiting_path(status_path(path)), status_path(path), path, lock_path(path)):
                with contextlib.suppress(OSError):
                    file.unlink()


class Predecessor(msgspec.Struct, kw_only=True, frozen=True):
    """The core that served before this one and died, and what it was computing."""

    incarnation: int
    cause: str
    kind: str
    """As in `wire.LastDeath`."""
    is_from_outside: bool
    """Another process killed or stopped the core, which no request can have caused."""
    in_step: list[tuple[bytes, int, int]]
    """(token of the client, slot, progress as in `wire.LastDeath`) of each request in the pending steps, or for which
    the core did something outside of steps; the token is empty for a client without one."""
    in_earlier_steps: list[tuple[bytes, int, int]] = []
    """The same for the cores before it, of requests that may still be suspects."""
    num_restarts: int = 1
    """Number of restarts by the parent, with the one that followed this death."""
    clients: list[bytes] = []
    """The tokens of its clients, and of those of the cores shortly before it, that may come back."""
    earlier_deaths: list[tuple[int, list[bytes]]] = []
    """(incarnation, tokens of the clients with requests in the pending steps) of the cores that died shortly before."""
    calls: list[tuple[bytes, int]] = []
    """(token of the client, id) of each call that was carried out."""
    model: ModelDigest = NO_DIGEST
    """What the core had loaded at its death."""

    @property
    def deaths(self) -> list[tuple[int, list[bytes]]]:
        """This death and `earlier_deaths`, the latest first."""
        tokens = {token for token, _, _ in self.in_step} | {token for token, _ in self.calls}
        return [(self.incarnation, sorted(filter(None, tokens))), *self.earlier_deaths]

    def suspects(self) -> dict[tuple[bytes, int], int]:
        """Return the furthest progress of each request that was in the step of a death, by (token, slot)."""
        furthest: dict[tuple[bytes, int], int] = {}
        for token, slot, progress in self.in_earlier_steps + self.in_step:
            if token:
                furthest[token, slot] = max(progress, furthest.get((token, slot), progress))
        return furthest

    def last_death(self, token: bytes) -> LastDeath:
        """Return what the client with `token` may know of this death."""
        own = [(slot, progress) for other, slot, progress in self.in_step if token and other == token]
        # What follows the first clause may quote the core's log, which is not for every client.
        cause = self.cause.partition(";")[0][:_MAX_CAUSE_CHARACTERS]
        num_at_work = len(self.in_step) + len(self.calls)
        calls = [call_id for other, call_id in self.calls if token and other == token]
        return LastDeath(
            self.incarnation,
            cause,
            self.kind,
            self.is_from_outside,
            num_at_work,
            own,
            self.num_restarts,
            calls,
            self.model,
        )


class KeptCache(msgspec.Struct, kw_only=True, frozen=True):
    """Memory for the KV cache that its parent keeps for one core after another."""

    descriptors: list[int]
    """A file in memory for each rank, which the core inherits."""
    mailboxes: list[tuple[int, int]] = []
    """By rank the ends of a mailbox (see `mailbox`), which the core inherits; empty if it computes on CPUs."""
    adopts: bool
    """What an earlier core has left there may be used."""
    prefix_file: int | None = None
    """Descriptor of the prefix cache file, which the core inherits; None: there is none."""


class CoreLaunch(msgspec.Struct, kw_only=True):
    """The launch line that a core process reads from its standard input before it does anything else.

    A process that takes over from a core (`waits`) reads a second line, of the same configuration. If that core belongs
    to another parent, a third line says when it may serve (`serves_later`).

    A core belongs to the process that started it, and ends when that process ends.
    """

    config: VllmConfig
    address: str
    """The address for the parent: ipc://PATH in the runtime folder."""
    listener: int
    """Descriptor of the socket that listens there, which the core inherits."""
    incarnation: int
    status_path: str | None
    """Path of the status page once the core may serve; None: the page is private to the process."""
    runtime_dir: str | None = None
    """Folder of the socket, status page and log, which the core removes if its parent has died."""
    protocol: tuple[int, str] = (PROTOCOL_VERSION, SCHEMA)
    """The version of the parent's protocol, and the digest of its messages."""
    serves_later: bool = False
    """The core answers its parent alone until standard input has one more line, which is empty."""
    waits: bool = False
    """The process loads its weights, and then waits for another launch line, with which it serves."""
    parent_pid: int = 0
    """Process id of the parent."""
    public: PublicAddress | None = None
    """The address for other clients; None: the core serves its parent alone."""
    number: int = 1
    """The number of this core among the cores that its parent has started."""
    suspension: Suspension = NOT_SUSPENDED
    """The pause and the sleep that the core must enter before it serves, as its predecessor had them."""
    operator_key: bytes = b""
    """The key of the clients that may change the core for all clients; empty: there are none."""
    predecessor: Predecessor | None = None
    """The core that served before this one and died; None for the first core."""
    adapters: list[AdapterRecord] | None = None
    """The LoRA adapters that the predecessor knew; None if no core has served before."""
    kept_cache: KeptCache | None = None
    """Where the KV cache lies; None: it ends with the core."""
    tried_constraints: list[bytes] = []
    """The digests of the constraints that earlier cores of this parent have compiled after a trial, and that need none
    now."""
