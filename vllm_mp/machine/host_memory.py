"""The memory of this machine, and of the control groups (such as a container) that this process runs in."""

from pathlib import Path
from typing import NamedTuple

from vllm_mp.machine.control_group import memory_limit


class HostMemory(NamedTuple):
    """Sizes in bytes."""

    total: int
    available: int
    """What can be allocated without swapping, within the limits of control groups."""
    group_limit: int | None
    """The limit of the control group that leaves the least; None: there is none."""


def host_memory() -> HostMemory:
    """Return the memory as the Linux kernel states it now."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(meminfo[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    group = memory_limit()
    if group is None:
        return HostMemory(total, available, None)
    return HostMemory(total, min(available, group.available), group.limit)
