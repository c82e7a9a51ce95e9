"""The file of a status page on a full disk."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from vllm_mp.core_link.status_page import CoreState, StatusPage
from vllm_mp.machine.page_file import make_page_file, page_path

WRITER = """
import errno, os, sys
from vllm_mp.core_link.status_page import CoreState, StatusPage
allocate = os.posix_fallocate
def on_full_disk(descriptor, offset, size):
    if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:"):
        return allocate(descriptor, offset, size)
    raise OSError(errno.ENOSPC, "No space left on device")
os.posix_fallocate = on_full_disk
page = StatusPage.create(sys.argv[1], 7)
page.enter(CoreState.LOADING, 0.5)
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def full_disk(monkeypatch):
    """Let no file on a disk have space; return the errors of further allocations, which fail with the first of them."""
    allocate, errors = os.posix_fallocate, []

    def allocate_in_memory(descriptor, offset, size):
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:"):
            raise OSError(errno.ENOSPC, "No space left on device")
        if errors:
            raise errors[0]
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate_in_memory)
    return errors


def test_page_is_read_by_its_path_on_a_full_disk_until_its_writer_dies(tmp_path):
    path = tmp_path / "core-7.status"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout.readline() == "written\n"
        page = StatusPage.open(path)
        status = page.read()
        assert (status.incarnation, status.pid, status.state) == (7, writer.pid, CoreState.LOADING)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert page.read().incarnation == 7, "the memory outlives its writer"
        assert StatusPage.open(path) is None
    finally:
        writer.kill()
        writer.communicate()


def test_page_in_memory_replaces_the_page_of_the_predecessor(tmp_path, full_disk):
    path = tmp_path / "core.sock.status"
    path.write_bytes(b"of the predecessor")
    for incarnation in (2, 3):
        page = StatusPage.create(str(path), incarnation)
        assert StatusPage.open(path).read().incarnation == page.read().incarnation == incarnation
    assert path.stat().st_mode & 0o777 == 0o600


def test_page_without_disk_and_memory_is_refused_with_the_cause(tmp_path, full_disk):
    full_disk.append(OSError(errno.ENOMEM, "Cannot allocate memory"))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=r"cannot make the status page .*page: Cannot allocate memory; free space"):
        make_page_file(str(tmp_path / "page"), 4096)
    assert len(os.listdir("/proc/self/fd")) == before


def test_page_in_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file or directory"):
        make_page_file(str(tmp_path / "none" / "page"), 4096)


def test_name_of_a_mapping_leads_to_the_path(tmp_path, full_disk):
    path = tmp_path / "core-1.status"
    page = StatusPage.create(str(path), 1)
    assert page.read().incarnation == 1
    with open("/proc/self/maps") as maps:
        names = [line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count("/")]
    assert str(path) in map(page_path, names)
    assert page_path(f"{path} (deleted)") == page_path(str(path)) == str(path)
