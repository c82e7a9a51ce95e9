"""The CPUs (logical processors) of this machine that a process may use, and its NUMA nodes."""

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vllm_mp.machine.control_group import cpu_time_limit

_NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_NODE = re.compile(r"node(\d{1,5})")


class CpuList(NamedTuple):
    """CPUs as an option names them."""

    cpus: frozenset[int]
    nodes: frozenset[int]
    """NUMA nodes, all of whose CPUs are meant too."""


def parse_cpus(text: str) -> CpuList:
    """Return the CPUs that `text` names, such as "0-15,32" or "node0". Raises ValueError if it names none."""
    cpus: set[int] = set()
    nodes: set[int] = set()
    for part in text.split(","):
        if node := _NODE.fullmatch(part.strip()):
            nodes.add(int(node[1]))
        elif (found := _RANGE.fullmatch(part.strip())) and int(found[1]) <= int(found[2] or found[1]):
            cpus.update(range(int(found[1]), int(found[2] or found[1]) + 1))
        else:
            raise ValueError(f"cpus={text!r:.100}: give CPU numbers, ranges or NUMA nodes, such as 0-15,32 or node0")
    return CpuList(frozenset(cpus), frozenset(nodes))


def bind_process(text: str) -> frozenset[int]:
    """Let this thread, and threads and memory that it makes later, use only the CPUs that `text` names; return them.

    Raises ValueError for a CPU or a NUMA node that this process may not use.
    """
    return bind_to(named_cpus(text))


def named_cpus(text: str) -> frozenset[int]:
    """Return the CPUs that `text` names, or all that this process may use if it is empty.

    Raises ValueError for a CPU or a NUMA node that this process may not use.
    """
    if not text:
        return usable_cpus()
    named, usable, nodes = parse_cpus(text), usable_cpus(), numa_nodes()
    if missing := named.nodes - nodes.keys():
        raise ValueError(f"cpus={text!r:.100}: there is no NUMA node {min(missing)}; the nodes are {_ranges(nodes)}")
    # Of a node, only the CPUs that a container leaves to this process are meant.
    chosen = named.cpus.union(*(nodes[node] & usable for node in named.nodes))
    if not chosen <= usable or not chosen:
        raise ValueError(f"cpus={text!r:.100}: this process may use the CPUs {_ranges(usable)} only")
    return chosen


def bind_to(cpus: frozenset[int]) -> frozenset[int]:
    """Let this thread, and threads and memory that it makes later, use only `cpus`; return them."""
    os.sched_setaffinity(0, cpus)
    return cpus


def cpu_share(cpus: frozenset[int], rank: int, num_ranks: int) -> frozenset[int]:
    """Return the CPUs of a rank, about as many as each other rank has; ranks lie in one NUMA node where they can.

    If there are fewer CPUs than ranks, several ranks get the same CPU.
    """
    nodes = numa_nodes()
    of_node = {cpu: node for node, members in nodes.items() for cpu in members}
    ordered = sorted(cpus, key=lambda cpu: (of_node.get(cpu, 0), cpu))
    if len(ordered) < num_ranks:
        return frozenset([ordered[rank % len(ordered)]])
    first, last = (len(ordered) * border // num_ranks for border in (rank, rank + 1))
    return frozenset(ordered[first:last])


def divide_cpus(text: str, part: int, num_parts: int) -> str:
    """Return, as `parse_cpus` reads it, a part of the CPUs that `text` names; see `cpu_share` and `named_cpus`."""
    return _ranges(cpu_share(named_cpus(text), part, num_parts))


def usable_cpus() -> frozenset[int]:
    """Return the CPUs that this thread may run on."""
    return frozenset(os.sched_getaffinity(0))


def numa_nodes() -> dict[int, frozenset[int]]:
    """Return the CPUs of each NUMA node; empty if the system does not tell."""
    nodes = {}
    for folder in _NODES.glob("node[0-9]*"):
        try:
            nodes[int(folder.name.removeprefix("node"))] = _read_cpus(folder / "cpulist")
        except (OSError, ValueError):
            continue
    return dict(sorted(nodes.items()))


def pci_numa_node(address: str) -> int | None:
    """Return the NUMA node of a PCI device, such as "0000:3b:00.0"; None if the system does not tell."""
    try:
        node = int((_PCI_DEVICES / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def default_threads(num_cores: int = 1) -> int:
    """Return the number of usable CPUs, or the CPU time that control groups (such as a container) grant if less.

    More threads than that time allows would wait for threads that the system has stopped. `num_cores` processes share
    that time.
    """
    limit = cpu_time_limit()
    return len(usable_cpus()) if limit is None else max(1, min(len(usable_cpus()), math.ceil(limit / num_cores)))


def describe(cpus: frozenset[int]) -> str:
    """Return the CPUs, and the NUMA nodes that they belong to if there are several nodes."""
    nodes = numa_nodes()
    shown = f"CPUs {_ranges(cpus)}"
    if len(nodes) > 1:
        shown += f" (NUMA nodes {_ranges(node for node, of_node in nodes.items() if of_node & cpus)} of {len(nodes)})"
    return shown


def _read_cpus(path: Path) -> frozenset[int]:
    text = path.read_text().strip()
    return parse_cpus(text).cpus if text else frozenset()


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as a list of ranges, such as "0-3,8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
