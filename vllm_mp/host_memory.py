"""The memory of this machine, and of the control group (such as a container) that this process runs in."""

from pathlib import Path
from typing import NamedTuple

_GROUP = Path("/sys/fs/cgroup")


class HostMemory(NamedTuple):
    """Sizes in bytes."""

    total: int
    available: int
    """What can be allocated without swapping, within the limit of the control group."""
    group_limit: int | None
    """The limit of the control group; None: there is none."""


def host_memory() -> HostMemory:
    """Return the memory as the Linux kernel states it now."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(meminfo[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    try:
        limit, used = (_GROUP / "memory.max").read_text().strip(), (_GROUP / "memory.current").read_text()
    except OSError:
        return HostMemory(total, available, None)
    if limit == "max":
        return HostMemory(total, available, None)
    return HostMemory(total, max(0, min(available, int(limit) - int(used))), int(limit))
