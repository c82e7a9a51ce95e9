"""Limits of control groups: the lowest of the process's own group and its parents, in both versions of the interface.

Made-up trees of files stand in for the kernel's. Where the tests may make groups, they use real groups too.
"""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from vllm_mp.machine import control_group
from vllm_mp.machine.control_group import GroupMemory, cpu_time_limit, memory_limit, oom_kills
from vllm_mp.machine.host_memory import host_memory

GIB = 2**30


class Machine:
    """A made-up /proc/self and made-up hierarchies of groups in a folder."""

    def __init__(self, folder: Path) -> None:
        self.mounts = folder / "groups of a machine"
        self.process = folder / "process"
        self.process.mkdir()
        self._mountinfo = ["22 1 0:20 / /proc rw,nosuid shared:5 - proc proc rw"]
        self._paths: list[str] = []

    def add(self, name: str, path: str, version: int, root: str = "/") -> None:
        """Mount the hierarchy `name`, in which the process is in the group `path`; `root` is what the mount shows."""
        mount = self.mounts / name
        mount.mkdir(parents=True)
        where = str(mount).replace(" ", "\\040")
        kind = "cgroup2 cgroup2 rw" if version == 2 else f"cgroup cgroup rw,{name}"
        self._mountinfo.append(f"30 22 0:26 {root} {where} rw,relatime shared:9 - {kind}")
        self._paths.append(f"0::{path}" if version == 2 else f"4:{name}:{path}")
        (self.process / "mountinfo").write_text("\n".join(self._mountinfo))
        (self.process / "cgroup").write_text("\n".join(self._paths))

    def set(self, group: str, **values: object) -> None:
        """Write files of a group, with "." in place of "__" in their names."""
        folder = self.mounts / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path)
    monkeypatch.setattr(control_group, "_PROCESS", made.process)
    return made


def test_limits_of_a_service_are_those_of_its_own_group_and_of_its_parents(machine):
    machine.add("all", "/system.slice/engine.service", 2)
    machine.set("all", cpu__max="100 100")  # the root of a machine has no such file; here it is a parent like others
    machine.set("all/system.slice", cpu__max="350000 100000", memory__max=8 * GIB, memory__current=GIB)
    machine.set("all/system.slice/engine.service", cpu__max="max 100000", memory__max="max", memory__current=GIB)
    machine.set("all/system.slice/other.service", cpu__max="10000 100000", memory__max=GIB, memory__current=0)
    assert cpu_time_limit() == 1.0
    assert memory_limit() == GroupMemory(8 * GIB, 7 * GIB)
    machine.set("all", cpu__max="max 100000")
    assert cpu_time_limit() == 3.5
    machine.set("all/system.slice/engine.service", cpu__max="50000 100000", memory__max=2 * GIB)
    assert cpu_time_limit() == 0.5
    assert memory_limit() == GroupMemory(2 * GIB, GIB)


def test_memory_that_slows_a_group_down_is_a_limit_and_file_cache_counts_as_free(machine):
    machine.add("all", "/app", 2)
    stat = f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}"
    machine.set("all/app", memory__max=8 * GIB, memory__high=4 * GIB, memory__current=3 * GIB, memory__stat=stat)
    assert memory_limit() == GroupMemory(4 * GIB, 2 * GIB)


def test_limit_that_leaves_the_least_counts_whatever_its_size(machine):
    machine.add("all", "/pod/container", 2)
    machine.set("all/pod", memory__max=10 * GIB, memory__current=9 * GIB)
    machine.set("all/pod/container", memory__max=6 * GIB, memory__current=GIB)
    assert memory_limit() == GroupMemory(10 * GIB, GIB)


def test_version_1_has_hierarchies_of_its_own_for_cpu_and_memory(machine):
    machine.add("cpu,cpuacct", "/docker/1", 1)
    machine.add("memory", "/docker/1", 1)
    machine.set("cpu,cpuacct/docker", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    machine.set("cpu,cpuacct/docker/1", cpu__cfs_quota_us=150_000, cpu__cfs_period_us=100_000)
    machine.set("memory/docker", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5 * GIB)
    stat = f"inactive_file 5\ntotal_inactive_file {GIB}"
    machine.set("memory/docker/1", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=3 * GIB, memory__stat=stat)
    machine.set("memory/docker/1", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3")
    assert cpu_time_limit() == 1.5
    assert memory_limit() == GroupMemory(4 * GIB, 2 * GIB)
    assert oom_kills() == 3


@pytest.mark.parametrize(("path", "root"), [("/docker/1", "/docker/1"), ("/", "/"), ("/../../other", "/../..")])
def test_container_that_sees_only_its_own_group_finds_it_at_the_root_of_the_mount(machine, path, root):
    machine.add("all", path, 2, root)
    machine.set("all", cpu__max="200000 100000", memory__max=GIB, memory__current=0, memory__events="oom 1\noom_kill 1")
    assert cpu_time_limit() == 2.0
    assert memory_limit() == GroupMemory(GIB, GIB)
    assert oom_kills() == 1


@pytest.mark.parametrize("version", [1, 2])
def test_files_that_are_missing_or_hold_nonsense_are_no_limit(machine, version):
    assert (cpu_time_limit(), memory_limit(), oom_kills()) == (None, None, None)
    machine.add("memory", "/a", version)
    assert (cpu_time_limit(), memory_limit(), oom_kills()) == (None, None, None)
    machine.set("memory/a", cpu__max="many", memory__max="max", memory__limit_in_bytes="x", memory__events="oom_kill x")
    assert (cpu_time_limit(), memory_limit(), oom_kills()) == (None, None, None)


def test_available_memory_of_the_machine_is_no_more_than_the_group_leaves(machine):
    whole = host_memory()
    assert whole.group_limit is None
    machine.add("all", "/app", 2)
    machine.set("all/app", memory__max=2**20, memory__current=2**19)
    assert host_memory() == (whole.total, 2**19, 2**20)


def make_group(hierarchy: str) -> Path | None:
    """Return the folder of a new group inside a new parent; None if this process may not make groups there."""
    for mount in (Path("/sys/fs/cgroup") / hierarchy, Path("/sys/fs/cgroup")):
        folder = mount / f"vmp-{uuid.uuid4().hex[:8]}" / "inner"
        try:
            folder.mkdir(parents=True)
        except OSError:
            continue
        if (folder / "cgroup.procs").exists():
            return folder
    return None


@pytest.mark.parametrize(
    ("hierarchy", "files", "expression", "expected"),
    [
        ("cpu", {"cpu.cfs_quota_us": 70_000, "cpu.max": "70000 100000"}, "cpu_time_limit()", "0.7"),
        ("memory", {"memory.limit_in_bytes": 2**29, "memory.max": 2**29}, "memory_limit().limit", str(2**29)),
    ],
)
def test_limits_of_real_groups_hold_for_processes_of_their_inner_groups(hierarchy, files, expression, expected):
    group = make_group(hierarchy)
    if group is None:
        pytest.skip("this user may not make control groups here")
    try:
        settable = [group.parent / name for name in files if (group.parent / name).exists()]
        if not settable:
            pytest.skip(f"the controller {hierarchy} is not available here")
        for file in settable:
            file.write_text(str(files[file.name]))
        script = (
            "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()));"
            f"from vllm_mp.machine.control_group import *; print({expression})"
        )
        command = [sys.executable, "-c", script, str(group / "cgroup.procs")]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == expected
    finally:
        for folder in (group, group.parent):
            os.rmdir(folder)
