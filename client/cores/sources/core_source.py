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

Check = Callable[[], None]
"""Called repeatedly while a core starts; raises when the wait must end."""


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
        return self.welcome.model if self.page is None else self.page.model

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


def served_model(digest: wire.ModelDigest, config: VllmConfig) -> dict[str, object]:
    """Return, by name, all that a successor must have in common with the core, so that streams can continue there."""
    digests = {"weights": digest.weights, "config.json": digest.config, "tokenizer": digest.tokenizer}
    return digests | model_limits(config)


def model_limits(config: VllmConfig) -> dict[str, object]:
    """Return the part of `served_model` that is known before a core has loaded the model."""
    return {name: getattr(config.model_config, name) for name in ("dtype", "quantization", "max_model_len")}


def described_model(core: Core) -> dict[str, str]:
    """Return `served_model` of `core`, as text."""
    return {name: str(value) for name, value in served_model(core.welcome.model, core.config).items()}


def model_changes(core: Core, digest: wire.ModelDigest, config: VllmConfig) -> list[str]:
    """Return, as `differences` does, how another core, with `digest` and `config`, differs from `core`.

    Empty if one of them has no weights, because the files may change in a sleep at level 2. The tokenizer may
    differ, by an edited chat template for example: the client goes on with the one that it has.
    """
    if wire.NO_DIGEST in (core.digest, digest):
        return []
    digest = msgspec.structs.replace(digest, tokenizer=core.digest.tokenizer)
    return differences(served_model(core.digest, core.config), served_model(digest, config))


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return the names of what differs, with values where they mean something."""
    return [
        f"other {name}" if name in ("weights", "config.json", "tokenizer") else f"{name} {new[name]} instead of {was}"
        for name, was in old.items()
        if new[name] != was
    ]
