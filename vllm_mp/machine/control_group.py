"""The control groups that this process is in, such as a container's or a service's, and the limits that they set.

A process is in one group of each hierarchy: there is one for all controllers (version 2), or one for each (version 1).
The limits of a group's parents hold for it too. Formats: `man 7 cgroups`, `man 5 proc_pid_mountinfo` and the Linux
kernel's admin guides for both versions.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PROCESS = Path("/proc/self")


class GroupMemory(NamedTuple):
    """The group whose limit of memory leaves the least. Sizes are in bytes."""

    limit: int
    available: int
    """What the limit leaves; memory that the kernel takes back from its file cache before it enforces the limit counts
    as free."""


def cpu_time_limit() -> float | None:
    """Return the lowest limit of CPU time, in seconds of CPU time a second; None if there is none."""
    limits = [
        *(_cpu_max(folder) for folder in _folders("")),
        *(_cfs_quota(folder) for folder in _folders("cpu")),
    ]
    return min((limit for limit in limits if limit is not None), default=None)


def memory_limit() -> GroupMemory | None:
    """Return the limit of memory that leaves the least; None if there is none.

    `memory.high` is a limit too: the kernel slows down a group that exceeds it until the group stands still.
    """
    found = []
    for folder in _folders(""):
        limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
        found.append(_group_memory(folder, limits, "memory.current", "inactive_file"))
    for folder in _folders("memory"):
        limits = [_number(folder / "memory.limit_in_bytes")]
        found.append(_group_memory(folder, limits, "memory.usage_in_bytes", "total_inactive_file"))
    return min((group for group in found if group is not None), key=lambda group: group.available, default=None)


def oom_kills() -> int | None:
    """Return how many processes of the group the kernel has killed for lack of memory; None if it does not tell."""
    for file in (
        *(folder / "memory.events" for folder in _folders("")),
        *(folder / "memory.oom_control" for folder in _folders("memory")),
    ):
        if (count := _entries(file).get("oom_kill")) is not None:
            return count
    return None


def _cpu_max(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _cfs_quota(folder: Path) -> float | None:
    quota, period = (_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return None if quota is None or quota < 0 or not period else quota / period


def _group_memory(folder: Path, limits: list[int | None], usage_file: str, cache_entry: str) -> GroupMemory | None:
    """Return the lowest of `limits` and what it leaves; None if the group has no limit below the size of an address."""
    limit = min((limit for limit in limits if limit is not None and limit < 2**60), default=None)
    usage = _number(folder / usage_file)
    if limit is None or usage is None:
        return None
    in_cache = _entries(folder / "memory.stat").get(cache_entry, 0)
    return GroupMemory(limit, max(0, limit - max(0, usage - in_cache)))


def _number(file: Path) -> int | None:
    """Return the number in a file; None for "max" and for a file that does not exist or holds no number."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _entries(file: Path) -> dict[str, int]:
    """Return the lines "NAME NUMBER" of a file; empty if it cannot be read."""
    try:
        pairs = (line.split() for line in file.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
    except OSError:
        return {}


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folder of this process's group and those of its parents in a hierarchy, as far as they are mounted.

    `controller` names a hierarchy of version 1; empty: the one of version 2.
    """
    path = _group_path(controller)
    for root, mount in _mounts(controller):
        # In a container, the mount may show only the container's own group as its root, or the path may be one of
        # another namespace. Then the root of the mount is the nearest group that can be seen.
        inside = "" if path is None or not path.is_relative_to(root) else path.relative_to(root)
        folder = mount / inside
        if ".." in Path(inside).parts or not folder.is_dir():
            folder = mount
        while True:
            yield folder
            if folder == mount:
                break
            folder = folder.parent
        return


def _group_path(controller: str) -> Path | None:
    """Return the path of this process's group in a hierarchy; None if the process is in no such group."""
    try:
        lines = (_PROCESS / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return Path(path)
    return None


def _mounts(controller: str) -> Iterator[tuple[Path, Path]]:
    """Yield (group at the root of the mount, folder where it is mounted) of a hierarchy."""
    try:
        lines = (_PROCESS / "mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        controllers = options.split()[-1].split(",")
        is_wanted = kind == "cgroup" and controller in controllers if controller else kind == "cgroup2"
        if is_wanted:
            root, mount = before.split()[3:5]
            yield Path(_unescaped(root)), Path(_unescaped(mount))


def _unescaped(path: str) -> str:
    """Return a path in which mountinfo has written spaces and some other characters as octal numbers."""
    return os.fsdecode(path.encode("utf-8", "surrogateescape").decode("unicode_escape").encode("latin-1"))
