"""Find what an engine has not released: requests and blocks in the core; processes, folders and descriptors here."""

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from vllm_mp import AsyncLLM
from vllm_mp.testing.engines import eventually, is_empty

_EMPTY_WITHIN_S = 10.0


async def held_by_core(engine: AsyncLLM) -> list[str]:
    """Return what the core of an engine without requests still holds; an empty list if all is well."""
    try:
        await eventually(lambda: is_empty(engine), _EMPTY_WITHIN_S)
    except AssertionError:
        status = await engine.core_status()
        return [f"the core is not empty after {_EMPTY_WITHIN_S:g} s: {status}"]
    num_unfinished = await engine.get_num_unfinished_requests()
    return [f"{num_unfinished} requests have not ended"] if num_unfinished else []


class Holdings(NamedTuple):
    """System resources that this process holds."""

    descriptors: dict[str, str]
    """What each open file descriptor refers to, by number."""
    children: set[int]
    folders: set[str]
    """Runtime folders of engines."""

    @classmethod
    def now(cls) -> "Holdings":
        """Return the resources that this process holds now."""
        gc.collect()  # exceptions that were raised keep their frames, and so the resources, alive
        return cls(
            _descriptors(),
            {child.pid for child in psutil.Process().children(recursive=True)},
            {str(path) for path in Path(tempfile.gettempdir()).glob("vllm_mp-*")},
        )


def _descriptors() -> dict[str, str]:
    descriptors = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            descriptors[number] = os.readlink(f"/proc/self/fd/{number}")
    return descriptors


def _describe(pid: int) -> str:
    """Return the number, the state, the name and the arguments of a process; a zombie has no arguments."""
    try:
        return str(psutil.Process(pid).as_dict(["pid", "status", "name", "cmdline"]))
    except psutil.NoSuchProcess:
        return f"{pid}, which has ended since"


@contextlib.contextmanager
def nothing_left_behind(problems: list[str]) -> Iterator[None]:
    """Add to `problems` what the block leaves behind: descriptors, processes, runtime folders.

    No other process may use the folder for temporary files in the meantime.
    """
    before = Holdings.now()
    yield
    after = Holdings.now()
    if (count := len(after.descriptors) - len(before.descriptors)) > 0:
        new = [after.descriptors[number] for number in after.descriptors.keys() - before.descriptors.keys()]
        problems.append(f"{count} file descriptors are left open, among {new}")
    if children := after.children - before.children:
        problems.append(f"processes are left: {'; '.join(map(_describe, sorted(children)))}")
    if folders := after.folders - before.folders:
        problems.append(f"folders {sorted(folders)} are left")


def private_mib(pid: int | None = None) -> float:
    """Return the resident memory in MiB that a process, by default this one, shares with no other.

    What it has touched of the KV cache, which outlives the core, is not in it.
    """
    info = psutil.Process(pid).memory_info()
    return float(info.rss - info.shared) / 2**20
