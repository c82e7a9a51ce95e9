"""An entry of the model cache is made once and is complete, even if processes race for it or are killed."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mp.model_store.cache import build_once
from vllm_mp.model_store.progress import Progress

BUILDER = """
import sys
from pathlib import Path
from vllm_mp.model_store.cache import build_once
from vllm_mp.model_store.progress import Progress

def say(text):
    print(text, flush=True)

def build(workspace, lock):
    model = workspace / "model"
    model.mkdir()
    (model / "first").touch()
    say("half")
    sys.stdin.readline()
    (model / "second").touch()
    return model

build_once(Path(sys.argv[1]), build, Progress(say))
say("done")
"""
"""A program that makes the entry argv[1] in two steps and waits for a line on stdin between the steps."""


def start_builder(folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", BUILDER, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def build_quietly(workspace: Path, lock: int) -> Path:
    assert list(workspace.iterdir()) == []
    (workspace / "model").mkdir()
    (workspace / "model" / "whole").touch()
    return workspace / "model"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_killed_build_leaves_no_entry(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "entry"
    with start_builder(folder) as builder:
        assert builder.stdout.readline() == "half\n"
        builder.kill()
        builder.wait()
        assert not folder.exists()
        assert names(folder.parent) == [".entry.lock", ".entry.partial"]
    assert build_once(folder, build_quietly, Progress()) == folder
    assert names(folder) == ["whole"]
    assert names(folder.parent) == [".entry.lock", "entry"]


def test_workspace_of_a_killed_build_is_removed_by_the_next_build_of_any_entry(tmp_path: Path) -> None:
    with start_builder(tmp_path / "killed") as killed, start_builder(tmp_path / "running") as running:
        assert killed.stdout.readline() == running.stdout.readline() == "half\n"
        killed.kill()
        killed.wait()
        build_once(tmp_path / "entry", build_quietly, Progress())
        partial = [name for name in names(tmp_path) if name.endswith(".partial")]
        running.communicate("\n")
    assert partial == [".running.partial"]


def test_second_process_waits_for_the_first_and_uses_its_result(tmp_path: Path) -> None:
    folder = tmp_path / "entry"
    with start_builder(folder) as first:
        assert first.stdout.readline() == "half\n"
        with start_builder(folder) as second:
            assert second.stdout.readline() == "waiting for another process to prepare entry\n"
            assert not folder.exists()
            first.communicate("\n")
            assert second.communicate()[0] == "done\n"
    assert names(folder) == ["first", "second"]


def test_child_of_an_ended_build_keeps_the_lock(tmp_path: Path) -> None:
    folder = tmp_path / "entry"
    orphan: list[subprocess.Popen[bytes]] = []

    def build(workspace: Path, lock: int) -> Path:
        orphan.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, pass_fds=(lock,)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(folder, build, Progress())
    with start_builder(folder) as second, orphan[0]:
        assert second.stdout.readline() == "waiting for another process to prepare entry\n"
        orphan[0].communicate(b"\n")
        assert second.stdout.readline() == "half\n"
        second.communicate("\n")
    assert names(folder) == ["first", "second"]


def test_full_disk_names_the_variable_and_leaves_nothing(tmp_path: Path) -> None:
    def build(workspace: Path, lock: int) -> Path:
        (workspace / "half").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"no space left to prepare entry.*VLLM_MP_CACHE") as error:
        build_once(tmp_path / "entry", build, Progress())
    assert error.value.errno == errno.ENOSPC
    assert names(tmp_path) == [".entry.lock"]


def test_full_disk_is_told_once_if_an_entry_is_made_from_another(tmp_path: Path) -> None:
    def fetch(workspace: Path, lock: int) -> Path:
        raise OSError(errno.ENOSPC, "2 MB are free")

    def build(workspace: Path, lock: int) -> Path:
        return build_once(tmp_path / "source" / "wheel", fetch, Progress())

    with pytest.raises(OSError, match=r"^\[Errno 28\] no space left to prepare wheel: 2 MB are free. Free") as error:
        build_once(tmp_path / "entry", build, Progress())
    assert str(error.value).count("Free some space") == 1


def test_cache_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot write to the model cache.*VLLM_MP_CACHE"):
        build_once(tmp_path / "file" / "entry", build_quietly, Progress())
