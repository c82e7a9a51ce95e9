"""The private folder of a parent of cores: it is there while its owner lives, and goes when the next one is made."""

import os
import signal
import subprocess
import sys
import tempfile

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


@pytest.fixture(autouse=True)
def _root(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_folder_of_a_killed_owner_is_removed_and_others_are_not(tmp_path):
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        owned = tmp_path / owner.stdout.readline().strip()
        without_owner = make_folder()
        assert {*tmp_path.iterdir()} == {owned, without_owner}
        owner.send_signal(signal.SIGKILL)
    mine = make_folder()
    assert {*tmp_path.iterdir()} == {mine, without_owner}


def test_folder_is_kept_until_its_descriptor_is_closed(tmp_path):
    mine = make_folder()
    descriptor = own_folder(mine)
    other = make_folder()
    assert mine.exists()
    os.close(descriptor)
    third = make_folder()
    assert {*tmp_path.iterdir()} == {other, third}


def test_folder_that_cannot_be_locked_is_used_without(tmp_path):
    assert own_folder(tmp_path / "missing") is None
