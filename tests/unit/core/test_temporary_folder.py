"""The folder of temporary files where no file can be written."""

import tempfile

import pytest

from vllm_mp.core.temporary_folder import settle_temporary_folder


@pytest.mark.parametrize("folder", ["/full", None])
def test_folder_is_known_on_a_full_disk(monkeypatch, folder):
    def find_none():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", find_none)
    monkeypatch.delenv("TMPDIR", raising=False)
    if folder is not None:
        monkeypatch.setenv("TMPDIR", folder)
    settle_temporary_folder()
    assert tempfile.gettempdir() == (folder or "/tmp")
