"""Whether the kernel has killed for want of memory."""

from pathlib import Path

_FILES = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
"""This container's count, or else the machine's."""


def count_oom_kills() -> int:
    """Processes that the kernel has killed because memory ran out; 0 where it does not say."""
    for file in _FILES:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
