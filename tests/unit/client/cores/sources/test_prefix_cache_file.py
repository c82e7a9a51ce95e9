"""Which prefix cache files are used, and that a file that cannot be used costs the cache alone."""

import asyncio
import fcntl
import os
import signal
import stat
import subprocess

import pytest

from vllm_mp import AsyncEngineArgs
from vllm_mp.client.cores.sources import prefix_cache_file as module
from vllm_mp.client.cores.sources.kept_cache_files import KeptCacheFiles
from vllm_mp.client.cores.sources.prefix_cache_file import PrefixCacheFile
from vllm_mp.core.scheduler.cache.prefix_writer import run_when_idle
from vllm_mp.core_link.core_launch import Predecessor
from vllm_mp.testing.engines import eventually


@pytest.fixture
def opened(default_model, monkeypatch):
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.02)
    made = []
    memory = os.memfd_create("test")

    def open_file(path, inherited=None, **options):
        config = AsyncEngineArgs(str(default_model), prefix_cache_file=str(path), **options).create_engine_config()
        made.append(PrefixCacheFile(config, memory, inherited))
        return made[-1]

    yield open_file
    for file in made:
        file.close()
    os.close(memory)


def test_file_is_made_for_its_user_alone(opened, tmp_path):
    assert opened(tmp_path / "file").descriptor is not None
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_group_loses_the_file_that_a_volume_has_given_to_it(opened, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o660)
    assert opened(tmp_path / "file").descriptor is not None
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_child_that_the_app_has_forked_does_not_keep_the_lock(opened, tmp_path):
    first = opened(tmp_path / "file")
    copy = os.dup(first.descriptor)
    first.close()
    assert opened(tmp_path / "file").descriptor is not None
    os.close(copy)


def test_writer_has_the_lowest_priority_where_the_class_of_its_scheduling_must_not_be_set(monkeypatch):
    def refuse(*_):
        raise PermissionError

    given = []
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(os, "setpriority", lambda *arguments: given.append(arguments))
    run_when_idle()
    assert given == [(os.PRIO_PROCESS, 0, 19)]


def make_readable(path):
    path.touch()
    path.chmod(0o644)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path.mkdir(), "Is a directory"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("another"), "symbolic link"),
        (make_readable, "chmod 600"),
    ],
    ids=["folder", "pipe", "link", "readable"],
)
def test_unsuitable_file_is_not_used_and_the_log_says_why(opened, tmp_path, caplog, make, why):
    make(tmp_path / "file")
    assert opened(tmp_path / "file").descriptor is None
    assert "goes on without prefix_cache_file=" in caplog.text
    assert why in caplog.text


def test_file_of_another_user_is_not_used(opened, tmp_path, caplog, monkeypatch):
    (tmp_path / "file").touch(0o600)
    monkeypatch.setattr("vllm_mp.machine.file_owner.trusted_owners", lambda: frozenset({12345}))
    assert opened(tmp_path / "file").descriptor is None
    assert "belongs to user" in caplog.text


def test_file_in_a_folder_that_does_not_exist_is_not_used(opened, tmp_path, caplog):
    assert opened(tmp_path / "none" / "file").descriptor is None
    assert "No such file" in caplog.text


def test_second_engine_goes_without_a_file_until_the_first_has_ended(opened, tmp_path, caplog):
    first = opened(tmp_path / "file")
    assert opened(tmp_path / "file").descriptor is None
    assert "another engine uses it; give each engine a file of its own" in caplog.text
    first.close()
    assert opened(tmp_path / "file").descriptor is not None


def test_engine_that_goes_on_with_the_file_of_another_keeps_the_lock(opened, tmp_path):
    first = opened(tmp_path / "file")
    first.keep_writing()
    writer = first._writer
    second = opened(tmp_path / "file", inherited=os.dup(first.descriptor))
    first.close(goes_on=True)
    assert writer.returncode == -signal.SIGKILL
    assert opened(tmp_path / "file").descriptor is None
    second.close()
    assert opened(tmp_path / "file").descriptor is not None


def test_each_of_several_cores_has_a_file_of_its_own(opened, tmp_path):
    assert opened(tmp_path / "file", data_parallel_size=2).descriptor is not None
    assert (tmp_path / "file.0").exists()


def test_writer_runs_on_idle_processors_ends_with_the_file_and_is_replaced_if_it_is_killed(opened, tmp_path):
    file = opened(tmp_path / "file")
    file.keep_writing()
    first = file._writer

    async def runs_when_idle():
        return os.sched_getscheduler(first.pid) == os.SCHED_IDLE

    asyncio.run(eventually(runs_when_idle))
    file.keep_writing()
    assert file._writer is first
    first.kill()
    first.wait()
    file.keep_writing()
    second = file._writer
    assert second.poll() is None
    file.close()
    assert second.returncode == 0


def test_lock_lasts_until_the_writer_of_a_killed_engine_has_ended(opened, tmp_path):
    """The descriptor of the writer stands for the file when the engine's own is gone."""
    file = opened(tmp_path / "file")
    file.keep_writing()
    os.close(file.descriptor)
    file.descriptor = None
    with (tmp_path / "file").open("rb") as another:
        with pytest.raises(BlockingIOError):
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.close()
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_failure_to_start_the_writer_costs_the_cache_alone(opened, tmp_path, monkeypatch, caplog):
    def fail(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", fail)
    opened(tmp_path / "file").keep_writing()
    assert "nothing is written" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_prefix_caching": False}, "needs the prefix cache, but enable_prefix_caching=False"),
        ({"device": "cuda"}, "is served on CPUs only, but device='cuda'"),
        ({"tensor_parallel_size": 3}, "needs a core with one rank, but tensor_parallel_size=3"),
        ({"pipeline_parallel_size": 2}, "needs a core with one rank, but pipeline_parallel_size=2"),
        ({"prefix_cache_file": ""}, "prefix_cache_file='' is no path"),
    ],
)
def test_options_that_contradict_the_file_are_refused(default_model, options, message):
    arguments = AsyncEngineArgs(str(default_model), **{"prefix_cache_file": "file", **options})
    with pytest.raises(ValueError, match=message):
        arguments.create_engine_config()


def death(kind, is_from_outside):
    return Predecessor(incarnation=1, cause="it died", kind=kind, is_from_outside=is_from_outside, in_step=[])


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
@pytest.mark.parametrize("is_from_outside", [True, False])
def test_header_of_memory_that_is_not_trusted_is_removed(default_model, tmp_path, mode, is_from_outside):
    options = {"prefix_cache_file": str(tmp_path / "file"), "recover_kv_cache": mode}
    files = KeptCacheFiles(AsyncEngineArgs(str(default_model), **options).create_engine_config())
    try:
        [memory] = files.descriptors
        os.pwrite(memory, b"header", 0)
        files.note_end(death("signal", is_from_outside))
        assert (os.pread(memory, 6, 0) == b"header") == (is_from_outside or mode == "always")
        cache = files.for_successor_of(death("signal", is_from_outside))
        assert cache.adopts == (mode != "never" and (is_from_outside or mode == "always"))
        assert cache.prefix_file == files.inherited[-1]
        assert files.for_successor_of(death("hang", False)).prefix_file is None
    finally:
        files.close()
