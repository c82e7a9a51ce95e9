"""What a source of cores gives, and how a client tells whether the next core serves the same model.

The sources are processes of this client (`launcher.py`), a shared core at an address (`remote_core.py`), and the nodes
of a Ray cluster (`client/ray/ray_core.py`).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from vllm_mp import wire
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.client.cores.sources.process import CoreProcess
from vllm_mp.config import VllmConfig
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.core_link.status_page import StatusPage

_FILES = ("weights", "config.json", "tokenizer")
"""What the digests of a model are of, in words."""
Check = Callable[[], None]
"""Called repeatedly while a core starts; raises when the wait must end."""


class ServedModel(NamedTuple):
    """All that a successor must have in common with a core, so that streams can continue there."""

    digest: wire.ModelDigest
    limits: Mapping[str, object]
    """What `model_limits` returns."""

    def changes(self, new: "ServedModel", *, with_tokenizer: bool) -> list[str]:
        """Return what differs in `new`, with values where they mean something.

        Digests do not count if one of both has no weights, because the files may change in a sleep at level 2. Without
        `with_tokenizer` the tokenizer may differ, by an edited chat template for example.
        """
        old, other = self.digest, new.digest
        if wire.NO_DIGEST in (old, other):
            return limit_changes(self.limits, new.limits)
        if not with_tokenizer:
            other = msgspec.structs.replace(other, tokenizer=old.tokenizer)
        pairs = zip(_FILES, msgspec.structs.astuple(old), msgspec.structs.astuple(other), strict=True)
        changes = [f"other {name}" for name, was, now in pairs if now != was]
        return changes + limit_changes(self.limits, new.limits)


class Core(NamedTuple):
    """A core that serves."""

    connection: CoreConnection
    client: int
    """The core's number for this client."""
    config: VllmConfig
    """The configuration as the core has completed it."""
    page: StatusPage | None
    """The core's status page; None if this process cannot see it, as over TCP."""
    process: CoreProcess | None
    """The core's process; None for the core of another process."""
    welcome: wire.Welcome

    @property
    def digest(self) -> wire.ModelDigest:
        """The digests of what the core has loaded last, also before its death; `NO_DIGEST` if it has no weights."""
        return self.connection.model if self.page is None else self.page.model

    @property
    def model(self) -> "ServedModel":
        """What the core has loaded last, also before its death."""
        return ServedModel(self.digest, model_limits(self.config))

    def model_of_former(self, former: "Core") -> "ServedModel":
        """Return what `former`, which this core follows, had loaded at its end, as far as either of them tells.

        A client that does not see the status page may have missed the latest message of `former`.
        """
        last_death = self.welcome.last_death
        if self.connection.incarnation == former.connection.incarnation:
            return self.model  # the connection broke, and the core lives
        if last_death is not None and last_death.incarnation == former.connection.incarnation:
            return former.model._replace(digest=last_death.model)
        return former.model

    @property
    def num_restarts(self) -> int:
        """Number of restarts by the core's parent before this core served."""
        death = self.welcome.last_death
        return 0 if death is None else death.num_restarts

    @property
    def last_cause(self) -> str | None:
        """Why the predecessor died; None for the first core of the parent."""
        death = self.welcome.last_death
        return None if death is None else death.cause


class AwaitedSource(Protocol):
    """Where a client gets its first core from, and after a death the next one, if other processes start them."""

    reconnect_timeout: float
    """Seconds that requests wait while there is no core."""
    trouble: str
    """Why there is no core, as far as this client knows."""

    @property
    def node(self) -> str | None:
        """The node of a cluster on which the core runs, in words; None if there is no cluster."""
        ...

    @property
    def standby_pid(self) -> int | None:
        """The process that is to replace the core; None without one."""
        ...

    def begin(self) -> None:
        """Start a core. Raises OSError if that fails at once."""
        ...

    def finish(self, check: Check) -> Core:
        """Wait until a core serves. Raises what `check` raises, and EngineStartError if there will be none."""
        ...

    def load_progress(self) -> object:
        """Return a value that changes while a core gets on with its load; None if this process sees no such core."""
        ...

    def note_call(self, name: str, args: tuple[wire.CallArgument, ...]) -> None:
        """Note that a core has carried out a call, which the next core may have to carry out too."""
        ...

    def prepare_template(self) -> None:
        """Start a process that forks the next cores, if there is to be one and there is none."""
        ...

    def discard(self, process: CoreProcess) -> None:
        """Remove what a core that has ended leaves behind."""
        ...

    def close(self, timeout: float | None, core: Core | None) -> None:
        """Leave `core`, and end what this source has started, by force after `timeout` seconds."""
        ...


def load_progress(page: StatusPage | None) -> object:
    """Return a value that changes while the core of `page` gets on with its load; None without such a core."""
    return page.progress() if page is not None and page.state in (CoreState.STARTING, CoreState.LOADING) else None


def model_limits(config: VllmConfig) -> dict[str, object]:
    """Return the part of a `ServedModel` that is known before a core has loaded the model."""
    return {name: getattr(config.model_config, name) for name in ("dtype", "quantization", "max_model_len")}


def limit_changes(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return the names of what differs, with the values."""
    return [f"{name} {new[name]} instead of {was}" for name, was in old.items() if new[name] != was]
