"""A core process as its parent sees it: its start, and its end, which the system may not let come."""

import errno
import logging
import os
import signal
import subprocess
import types
from pathlib import Path

import pytest
from support.descriptors import no_free_descriptor

from vllm_mp.client.cores.sources import process
from vllm_mp.client.cores.sources.process import CoreProcess
from vllm_mp.core_link.status_page import StatusPage


class Stuck:
    """A process in a system call that the kernel does not interrupt."""

    pid = 4711
    stdin = property(lambda self: self)

    def __init__(self, *arguments, **options):
        self.waited = []
        self.signals = []

    def poll(self):
        return None

    def wait(self, timeout=None):
        assert timeout is not None, "this would wait for ever"
        self.waited.append(timeout)
        raise subprocess.TimeoutExpired("core", timeout)

    def kill(self):
        self.signals.append("kill")

    def terminate(self):
        self.signals.append("term")

    def close(self):
        pass


@pytest.fixture
def core_process(monkeypatch, socket_folder):
    monkeypatch.setattr(process.subprocess, "Popen", Stuck)
    monkeypatch.setattr(process, "_exit_descriptor", lambda _: -1)
    return CoreProcess(socket_folder, 1)


@pytest.mark.parametrize("is_own", [True, False])
def test_page_of_a_core_that_dies_at_its_turn_is_removed_but_not_that_of_the_next_standby(core_process, is_own):
    core_process._has_page = True  # it was told that its turn has come
    page = core_process._waiting_path
    StatusPage.create(str(page), 1)
    core_process.pid = os.getpid() if is_own else 1
    core_process.remove_files()
    assert page.exists() != is_own


def test_page_that_a_former_core_has_left_at_the_same_path_is_not_taken_for_the_page_of_the_core(core_process):
    core_process._has_page = True
    page = StatusPage.create(str(core_process._status_path), 1)
    assert core_process.status_page() is None, "the core has not created its page yet"
    core_process.pid = page.read().pid
    assert core_process.status_page() is not None


def test_shortage_of_file_descriptors_ends_no_removal_of_files(core_process, caplog):
    core_process._has_page = True
    StatusPage.create(str(core_process._status_path), 1)
    with no_free_descriptor():
        core_process.remove_files()
    assert not core_process._status_path.exists()
    assert "Too many open files" in caplog.text


def test_core_gets_a_lower_priority():
    with subprocess.Popen(["sleep", "60"]) as stand_in:
        core = types.SimpleNamespace(pid=stand_in.pid)
        before = os.getpriority(os.PRIO_PROCESS, stand_in.pid)
        CoreProcess.lower_priority(core, 3)
        assert os.getpriority(os.PRIO_PROCESS, stand_in.pid) == min(19, before + 3)
        stand_in.kill()
    CoreProcess.lower_priority(core, 3)  # it has ended


def test_core_that_its_device_keeps_from_ending_is_given_up(core_process, caplog):
    with caplog.at_level(logging.WARNING):
        core_process.kill()
        core_process.stop()
        core_process.stop(60)
    assert core_process._popen.signals == ["kill", "term", "kill", "term", "kill"]
    assert sum(core_process._popen.waited) == process._KILL_TIMEOUT_S
    assert [record.getMessage() for record in caplog.records] == [
        "the core process 4711 was killed 20 s ago and still exists, with its device memory; if the next core "
        "finds no memory, restart the device or the machine"
    ]


def test_core_that_a_signal_has_stopped_is_killed_at_once(core_process):
    core_process.pid = os.posix_spawnp("sleep", ["sleep", "60"], os.environ)
    try:
        os.kill(core_process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, core_process.pid, os.WSTOPPED)
        core_process.stop(60)
    finally:
        os.kill(core_process.pid, signal.SIGKILL)
        os.waitpid(core_process.pid, 0)
    assert core_process._popen.signals == ["term", "kill"]
    assert core_process._popen.waited == [process._STOPPED_POLL_S, process._KILL_TIMEOUT_S]


def test_end_is_described_with_the_last_lines_of_the_log(core_process):
    core_process.log_path.write_text(
        "first\ntorch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    )
    core_process.kill()
    assert not core_process.was_killed
    description = core_process.describe_end()
    assert description.startswith("the core process 4711 ended with SIGKILL, but the system still holds it; ")
    assert description.endswith("illegal memory access was encountered")


def test_end_is_described_with_a_log_in_memory_if_the_disk_is_full(monkeypatch, socket_folder):
    def allocate(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(process.os, "posix_fallocate", allocate)
    core = CoreProcess(socket_folder, 1)
    try:
        core._popen.communicate(b"no launch line\n", timeout=60)
        description = core.describe_end()
        assert "its last log lines:\n" in description
        assert description.splitlines()[-1].startswith("msgspec.DecodeError")
        assert len(description) < 5000
    finally:
        core.kill()
        core.stop()


def test_end_without_a_log_on_a_full_disk_says_so(core_process, monkeypatch):
    core_process.log_path.write_bytes(b"")
    core_process.kill()
    assert core_process.describe_end().endswith("; its log is empty")
    full = types.SimpleNamespace(f_bavail=0)
    monkeypatch.setattr(process.os, "statvfs", lambda folder: full)
    assert "its log is empty, and no space is left in" in core_process.describe_end()


def test_core_has_a_working_folder_also_if_that_of_its_client_was_removed(monkeypatch, tmp_path, socket_folder):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    core = CoreProcess(socket_folder, 1)
    try:
        assert Path(f"/proc/{core.pid}/cwd").readlink() == socket_folder
    finally:
        core.kill()
        core.stop()
