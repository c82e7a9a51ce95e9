"""Files that are written in folders that other users may write, where a name may be a trap."""

import hashlib
import os
import types
from pathlib import Path

import pytest

from vllm_mp.cli.bench.flags import write_json
from vllm_mp.cli.chat import prompt_line
from vllm_mp.core.worker.profiler import Profiler
from vllm_mp.machine import file_owner
from vllm_mp.machine.file_owner import open_own_file, write_output
from vllm_mp.model_store.gguf import _content_sha256
from vllm_mp.model_store.progress import Progress


@pytest.fixture
def precious(tmp_path):
    """A file of this user, to which a link in a folder of all users leads."""
    file = tmp_path / "precious"
    file.write_text("precious")
    yield file
    assert file.read_text() == "precious"


@pytest.fixture
def trap(tmp_path, precious):
    """A function that puts a link to the precious file into a folder that all users may write."""

    def lay(*names):
        path = tmp_path.joinpath("public", *names)
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (path.parent, tmp_path / "public"):
            folder.chmod(0o1777)
        path.symlink_to(precious)
        return path

    return lay


@pytest.mark.parametrize(
    "write", [open_own_file, lambda path: write_output(path, "x"), lambda path: write_json(path, {})]
)
def test_link_in_a_folder_of_all_users_is_not_followed(trap, write):
    with pytest.raises(ValueError, match="is a symbolic link, which is not followed; remove it"):
        write(trap("report.json"))


def test_file_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("of another user")
    monkeypatch.setattr(file_owner, "trusted_owners", lambda: frozenset({os.geteuid() + 1}))
    with pytest.raises(ValueError, match="who is not trusted"):
        write_output(tmp_path / "file", "x")
    assert (tmp_path / "file").read_text() == "of another user"


def test_output_replaces_the_file_also_through_a_link_in_a_folder_of_the_user(tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for text in ("a long text", "short"):
        write_output(tmp_path / "link", text)
        assert (tmp_path / "file").read_text() == text
    (tmp_path / "public").mkdir()
    (tmp_path / "public").chmod(0o1777)
    for text in ("a long text", "short"):
        write_output(tmp_path / "public" / "file", text)
        assert (tmp_path / "public" / "file").read_text() == text


def test_history_of_the_chat_is_not_kept_in_a_trap(trap, tmp_path, monkeypatch):
    trap("vllm_mp", "chat_history")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "public"))
    assert prompt_line._history_file() is None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "own"))
    assert prompt_line._history_file() == tmp_path / "own/vllm_mp/chat_history"


def test_digest_of_a_model_is_not_kept_in_a_trap(trap, tmp_path):
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF")
    trap("digests", hashlib.sha256(b"identity").hexdigest())
    digest = _content_sha256(source, "identity", tmp_path / "public", Progress())
    assert digest == hashlib.sha256(b"GGUF").hexdigest()


def test_trace_takes_the_place_of_a_trap(trap, tmp_path):
    path = trap("core-1-0.trace.json.gz")
    recorded = types.SimpleNamespace(export_chrome_trace=lambda name: Path(name).write_text("trace"))
    Profiler._write(recorded, path)
    assert path.read_text() == "trace"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
