"""What starts a core process: the line on its standard input, and its environment."""

import os

import msgspec

from vllm_mp.config import VllmConfig


def core_environment() -> dict[str, str]:
    """The environment of a core process: this one's, with large tensors in huge pages and threads that spin briefly.

    In huge pages the walks through the page tables are spared that every 4 KiB of weights and cache would take. Set
    THP_MEM_ALLOC_ENABLE=0 against it.

    By default OpenMP's threads spin for milliseconds before they sleep, and whatever else runs on the same cores, the
    client for one, then makes a step take many times as long. Just long enough to bridge the gap between two layers
    costs next to nothing on a quiet machine, where with less a thread sleeps, and is woken, in each layer. Set
    OMP_WAIT_POLICY=passive where cores are shared, and GOMP_SPINCOUNT to choose yourself.
    """
    usual = {"THP_MEM_ALLOC_ENABLE": "1"}
    if "OMP_WAIT_POLICY" not in os.environ:
        usual["GOMP_SPINCOUNT"] = "50000"
    return usual | os.environ


class CoreLaunch(msgspec.Struct, kw_only=True):
    """What a core process reads from its standard input before it does anything."""

    config: VllmConfig
    address: str
    """Where to listen: ipc://PATH or tcp://HOST:PORT."""
    incarnation: int
    status_path: str | None
    """Where the status page is made; None: nowhere that others see."""
    supervised: bool
    """True: the core belongs to the process that started it, and leaves when that one does."""
    runtime_dir: str | None = None
    """Removed by a supervised core whose parent has died."""
    parent_pid: int = 0
    key_file: str | None = None
    """CURVE certificate for tcp."""
