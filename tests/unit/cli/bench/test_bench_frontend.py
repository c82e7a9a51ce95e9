"""`vllm-mp bench frontend` runs, finds every text complete, and reports all its figures."""

import json
import subprocess
import sys

import pytest

from vllm_mp.client.outputs import output_path


@pytest.mark.extended
@pytest.mark.parametrize(
    "flags", [pytest.param((), id="usual"), pytest.param(("--python",), id="python", marks=pytest.mark.slow)]
)
def test_bench_frontend_measures_complete_streams(default_model, tmp_path, flags):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "vllm_mp.cli", "bench", "frontend", "--streams", "8", "--tokens", "40"]
    command += ["--rounds", "1", "--requests", "5", "--breakdown", "--json", str(report), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(report.read_text())
    assert figures["compiled"] == (output_path.COMPILED is not None and not flags)
    assert [(case["consumers"], case["kind"]) for case in figures["cases"]] == [
        ("group", "delta"),
        ("group", "cumulative"),
        ("each", "delta"),
        ("each", "cumulative"),
    ]
    for case in figures["cases"]:
        assert case["lowest"] <= case["tokens_per_cpu_s"] <= case["highest"]
        assert case["tokens_per_output"] == 1
    assert 0 < figures["first_output_us"]["p50"] <= figures["first_output_us"]["p99"]
    assert {"decoding the message", "taking tokens in", "making outputs", "text"} <= figures["breakdown"][0].keys()


@pytest.mark.extended
def test_bench_frontend_measures_lag_and_memory_of_streams_with_log_probabilities(default_model, tmp_path):
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "vllm_mp.cli", "bench", "frontend", "--streams", "8", "--rate", "800"]
    command += ["--logprobs", "3", "--seconds", "1", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(report.read_text())["lag with streams, ms"]
    assert (row["streams"], row["rate"], row["logprobs"]) == (8, 800, 3)
    assert 0 <= row["p50"] <= row["p99"] <= row["max"]
    assert row["tokens_per_output"] >= 1
    assert 0 < row["before_mb"] <= row["peak_mb"]
