"""The address that the parent of shared cores holds."""

import errno
import os
import shutil
import socket
from unittest.mock import Mock

import pytest

from vllm_mp import EngineArgs
from vllm_mp.client.cores.sources import held_address
from vllm_mp.client.cores.sources.held_address import HeldAddress
from vllm_mp.client.cores.sources.launcher import CoreLauncher


def test_address_in_a_runtime_folder_that_was_removed_is_restored_for_the_next_core(default_model, monkeypatch):
    launcher = CoreLauncher(EngineArgs(model=str(default_model)).create_engine_config())
    try:
        address = launcher.share(None, None)
        process = Mock(address=f"{address}.core")
        monkeypatch.setattr(launcher, "_start", lambda standby: process)
        shutil.rmtree(launcher.folder)
        launcher.begin()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address.removeprefix("ipc://"))
    finally:
        launcher.close(None, None)


@pytest.mark.parametrize("trap", ["symbolic link", "dangling link", "hard link", "fifo"])
def test_lock_file_that_another_user_may_have_prepared_is_refused_and_changes_no_file(tmp_path, trap):
    victim, lock = tmp_path / "victim", tmp_path / "core.sock.lock"
    victim.write_text("precious")
    if trap == "fifo":
        os.mkfifo(lock)
    elif trap == "hard link":
        lock.hardlink_to(victim)
    else:
        lock.symlink_to(victim if trap == "symbolic link" else tmp_path / "missing")
    with pytest.raises(
        ValueError, match=r"core.sock.lock (is a symbolic link|has 2 names|is not a regular file).*remove it"
    ):
        HeldAddress(f"ipc://{tmp_path / 'core.sock'}")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "missing").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_full_disk_costs_the_address_only_the_pid_in_its_lock_file(tmp_path, monkeypatch):
    def write(descriptor, data, offset):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(held_address.os, "pwrite", write)
    held = HeldAddress(f"ipc://{tmp_path}/core.sock")
    try:
        assert (tmp_path / "core.sock.lock").read_bytes() == b""
        with pytest.raises(ValueError, match="is already served by process unknown"):
            HeldAddress(f"ipc://{tmp_path}/core.sock")
    finally:
        held.close()


def test_lock_file_of_another_user_is_refused(tmp_path):
    lock = tmp_path / "core.sock.lock"
    lock.touch()
    os.chown(lock, 65_534, -1)
    with pytest.raises(ValueError, match="belongs to user nobody, who is not trusted; use another path"):
        HeldAddress(f"ipc://{tmp_path / 'core.sock'}")
