"""Messages between a core and the processes of its other ranks, except for steps.

The launch goes to a rank's standard input, calls go through the ring, and everything that a rank says comes through a
pair of Unix sockets that it has inherited. So no other process can join or answer.
"""

import hashlib
import reprlib
from typing import Any, Final

import msgspec

from vllm_mp.config import VllmConfig
from vllm_mp.core.parallel.shared_memory import MemoryLayout
from vllm_mp.core_link.core_launch import KeptCache
from vllm_mp.version import __version__
from vllm_mp.wire import SCHEMA

PROTOCOL: Final = 3
"""Version of the messages between the ranks of a core."""
MAX_REPLY_BYTES: Final = 2**16


class WorkerLaunch(msgspec.Struct, kw_only=True):
    """The line that the process of a rank reads from its standard input before it does anything else."""

    config: VllmConfig
    rank: int
    parent_pid: int
    memory: int
    """Descriptor of the shared memory."""
    layout: MemoryLayout
    event: int
    """Event descriptor that the core writes to when it has written a message."""
    socket: int
    """Descriptor of the socket for what the rank says."""
    has_own_cpus: bool
    """No other rank has the CPUs of this rank, so that it may spin for a moment when it waits."""
    meeting_place: str
    """Where torch.distributed finds the ranks, as `meeting_place.open_store` reads it."""
    kept_cache: KeptCache | None = None
    """As in `CoreLaunch`; the rank inherits the descriptor of its own memory."""


class Joined(msgspec.Struct, tag="joined", kw_only=True):
    """A rank has read its configuration and chosen device, dtype and sizes as the core must have."""

    rank: int
    protocol: int
    package: str
    digest: str
    chosen: dict[str, Any] = {}
    """The options that `chosen_options` returns."""


class Ready(msgspec.Struct, tag="ready", kw_only=True):
    """A rank has loaded its share of the weights and waits for steps."""

    rank: int
    weights: str = ""
    """The digest of the checkpoint on a machine that is not the core's."""


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


FromRank = Joined | Ready | Reply | Failed


_PRIVATE: Final = {
    "model_config": (
        "model",
        "path",
        "mmproj",
        "revision",
        "download_dir",
        "tokenizer",
        "tokenizer_mode",
        "skip_tokenizer_init",
        "trust_remote_code",
        "served_model_name",
        "chat_template",
        "max_logprobs",
        "logits_processors",
        "logits_processor_folders",
        "default_sampling_params",
    ),
    "parallel_config": ("node_rank", "master_addr", "master_port", "node_key_file"),
    "device_config": ("num_threads", "cpus"),
    "lora_config": ("lora_modules",),
    "decoding_config": (),
    "multimodal_config": (),
    "observability_config": (),
    "speculative_config": (),
    "liveness_config": (),
}
"""Options, by section, that depend on the machine, or that only rank 0 and clients read; all of a section without
names."""


_CHOSEN: Final = ("device", "dtype", "max_num_batched_tokens", "async_scheduling")
"""Shared options that `core.worker.device.prepare_device` chooses for its machine unless they are given."""
_MAX_DIFFERENCES: Final = 4


def shared_options(config: VllmConfig) -> dict[str, Any]:
    """Return, by name, the options that all ranks of a core must have in common."""
    options: dict[str, Any] = {}
    for section, fields in msgspec.to_builtins(config).items():
        private = _PRIVATE.get(section)
        if private != () and fields is not None:
            options |= {name: value for name, value in fields.items() if name not in (private or ())}
    return options


def chosen_options(config: VllmConfig) -> dict[str, Any]:
    """Return, by name, the options of a completed configuration that each machine may have chosen by itself."""
    options = shared_options(config)
    return {name: options[name] for name in _CHOSEN}


def differences(theirs: dict[str, Any], own: dict[str, Any]) -> str:
    """Return a text that names the options of a rank or rank host that differ from the core's; empty if none do."""
    names = [name for name in {**own, **theirs} if theirs.get(name) != own.get(name)]
    texts = [
        f"{name}={reprlib.repr(theirs.get(name))} instead of {reprlib.repr(own.get(name))}"
        for name in names[:_MAX_DIFFERENCES]
    ]
    return ", ".join(texts + ["..."] * (len(names) > _MAX_DIFFERENCES))


def digest_of(config: VllmConfig) -> str:
    """Return a digest of what all ranks must have in common: this package, its messages, and the options."""
    facts = [PROTOCOL, __version__, SCHEMA, shared_options(config)]
    return hashlib.blake2b(msgspec.json.encode(facts), digest_size=16).hexdigest()
