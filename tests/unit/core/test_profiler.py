"""The profiler over a core's steps: what it writes, and that nothing makes it note without end."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from vllm_mp.core.worker import profiler
from vllm_mp.core.worker.profiler import Profiler


def steps(noted: Profiler, count: int) -> None:
    for _ in range(count):
        torch.relu(torch.zeros(3))
        noted.count_step()


def names_in(trace: Path) -> list[str]:
    return [event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "not" / "there"))
    return tmp_path / "not" / "there"


def test_each_start_and_stop_writes_a_trace_of_the_steps_between(folder):
    noted = Profiler(torch.device("cpu"))
    steps(noted, 2)
    for count in (3, 5):
        noted.start()
        steps(noted, count)
        assert noted.stop() == str(folder)
        steps(noted, 2)
    first, second = sorted(folder.iterdir())
    assert names_in(first).count("aten::relu") == 3
    assert names_in(second).count("aten::relu") == 5


def test_a_profiler_that_is_forgotten_stops_noting(folder, monkeypatch, caplog):
    monkeypatch.setattr(profiler, "MAX_STEPS", 4)
    noted = Profiler(torch.device("cpu"))
    noted.start()
    steps(noted, 9)
    assert "stop_profile writes them" in caplog.text
    noted.stop()
    (trace,) = folder.iterdir()
    assert names_in(trace).count("aten::relu") == 4


def test_calls_out_of_turn_are_refused_and_change_nothing(folder):
    noted = Profiler(torch.device("cpu"))
    with pytest.raises(ValueError, match="not on; call start_profile"):
        noted.stop()
    noted.start()
    with pytest.raises(ValueError, match="on already; call stop_profile"):
        noted.start()
    steps(noted, 1)
    noted.stop()
    assert len(list(folder.iterdir())) == 1


def test_a_trace_that_cannot_be_written_says_where(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "file"))
    noted = Profiler(torch.device("cpu"))
    for _ in range(2):
        noted.start()
        with pytest.raises(ValueError, match=r"cannot be written.*file.*VLLM_TORCH_PROFILER_DIR"):
            noted.stop()
