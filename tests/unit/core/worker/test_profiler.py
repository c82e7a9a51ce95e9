"""The profiler writes traces of a core's steps, and stops recording after a maximum number of steps."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from vllm_mp.core.worker import profiler
from vllm_mp.core.worker.profiler import Profiler

PROFILE_IN_A_NEW_CORE = """
from vllm_mp.core.core_imports import import_core
import_core()
import torch
from vllm_mp.core.worker.profiler import Profiler
core_profiler = Profiler(torch.device("cpu"))
core_profiler.start()
print("folder:", core_profiler.stop())
"""


def make_steps(core_profiler: Profiler, count: int) -> None:
    for _ in range(count):
        torch.relu(torch.zeros(3))
        core_profiler.count_step()


def names_in(trace: Path) -> list[str]:
    return [event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "not" / "there"))
    return tmp_path / "not" / "there"


def test_each_start_and_stop_writes_a_trace_of_the_steps_between(folder):
    core_profiler = Profiler(torch.device("cpu"))
    make_steps(core_profiler, 2)
    for count in (3, 5):
        core_profiler.start()
        make_steps(core_profiler, count)
        assert core_profiler.stop() == str(folder)
        make_steps(core_profiler, 2)
    first, second = sorted(folder.iterdir())
    assert names_in(first).count("aten::relu") == 3
    assert names_in(second).count("aten::relu") == 5


def test_profiler_starts_in_a_process_that_has_imported_only_what_a_core_imports(folder):
    found = subprocess.run([sys.executable, "-c", PROFILE_IN_A_NEW_CORE], capture_output=True, text=True, check=False)
    assert f"folder: {folder}" in found.stdout, found.stderr


def test_recording_stops_after_the_maximum_number_of_steps(folder, monkeypatch, caplog):
    monkeypatch.setattr(profiler, "MAX_STEPS", 4)
    core_profiler = Profiler(torch.device("cpu"))
    core_profiler.start()
    make_steps(core_profiler, 9)
    assert "stop_profile writes them" in caplog.text
    core_profiler.stop()
    (trace,) = folder.iterdir()
    assert names_in(trace).count("aten::relu") == 4


def test_second_start_and_stop_without_start_are_refused_and_change_nothing(folder):
    core_profiler = Profiler(torch.device("cpu"))
    with pytest.raises(ValueError, match="not on; call start_profile"):
        core_profiler.stop()
    core_profiler.start()
    with pytest.raises(ValueError, match="on already; call stop_profile"):
        core_profiler.start()
    make_steps(core_profiler, 1)
    core_profiler.stop()
    assert len(list(folder.iterdir())) == 1


def test_discarded_recording_is_not_written_and_the_profiler_can_start_again(folder):
    core_profiler = Profiler(torch.device("cpu"))
    core_profiler.discard()
    core_profiler.start()
    core_profiler.discard()
    core_profiler.start()
    core_profiler.stop()
    assert len(list(folder.iterdir())) == 1


def test_profiler_that_cannot_start_stays_off(monkeypatch, folder):
    core_profiler = Profiler(torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(profiler.profile, "start", mock.Mock(side_effect=RuntimeError("no device")))
        with pytest.raises(RuntimeError, match="no device"):
            core_profiler.start()
    core_profiler.start()
    core_profiler.stop()


def test_error_names_the_folder_when_a_trace_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "file"))
    core_profiler = Profiler(torch.device("cpu"))
    for _ in range(2):
        core_profiler.start()
        with pytest.raises(ValueError, match=r"cannot be written.*file.*VLLM_TORCH_PROFILER_DIR"):
            core_profiler.stop()
