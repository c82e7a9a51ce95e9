"""The private folder of a parent of cores: it is there while its owner lives, and goes when the next one is made."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vllm_mp.client.cores.sources.runtime_folder import make_folder, own_folder

OWNER = """if True:
    import signal
    from vllm_mp.client.cores.sources.runtime_folder import make_folder, own_folder
    folder = make_folder()
    assert own_folder(folder) is not None
    (folder / "core-1.sock").touch()
    print(folder, flush=True)
    signal.pause()"""


@pytest.fixture
def root(monkeypatch):
    """The folder of temporary files, whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_folder_of_a_killed_owner_is_removed_and_others_are_not(root):
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        try:
            owned = Path(owner.stdout.readline().strip())
            without_owner = make_folder()
            assert {*root.iterdir()} == {owned, without_owner}
        finally:
            owner.kill()
    mine = make_folder()
    assert {*root.iterdir()} == {mine, without_owner}


def test_folder_is_kept_until_its_descriptor_is_closed(root):
    mine = make_folder()
    descriptor = own_folder(mine)
    other = make_folder()
    assert mine.exists()
    os.close(descriptor)
    third = make_folder()
    assert {*root.iterdir()} == {other, third}


def test_folder_that_cannot_be_locked_is_used_without(tmp_path):
    assert own_folder(tmp_path / "missing") is None
