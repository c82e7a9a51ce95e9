"""tools/gpu_check.py, run as a user runs it, on the CPU with a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_mp.core.models import build_model
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.measuring import engine_speed, gpu_stages

ROOT = Path(__file__).resolve().parents[3]


def run_tool(out: Path, *arguments: str) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--out", str(out), "--quick", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=out.parent,
        check=False,
    )
    assert out.exists(), done.stderr
    found = json.loads(out.read_text())
    for error in found["errors"]:
        assert error["part"] in done.stderr
        assert error["error"] in done.stdout, "the table names what failed"
    return done.returncode, found


def test_tool_starts_where_neither_this_repository_nor_any_package_is_installed(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", str(ROOT / "tools" / "gpu_check.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_good_run_reports_every_figure_as_a_share_of_the_device_limits(tmp_path):
    test = "tests/gpu/test_core_death.py::test_core_killed_under_load_ends_its_streams_and_frees_its_memory"
    code, found = run_tool(tmp_path / "results.json", "--device", "cpu", "--beside", "--tests", test)
    assert found["errors"] == found["skipped"] == []
    assert code == 0
    assert (found["tests"]["passed"], found["tests"]["failed"], found["tests"]["errors"]) == (1, 0, 0)
    assert found["environment"]["torch"] == torch.__version__
    assert found["device"] == "cpu"
    assert found["date"]
    assert found["ceilings"]["copy_bytes_per_s"] > 1e8
    assert found["ceilings"]["matmul_flops_per_s"] > 1e8
    record = found["benchmarks"]["tiny"]
    assert record["start_s"] > 0
    assert [figure["batch"] for figure in record["decode"]] == [1, 4]
    assert [figure["prompt_len"] for figure in record["prefill"]] == [16, 64]
    assert record["loads"]["8 of 8-16/8-16"]["output_tokens_per_s"] > 0
    assert record["idle"] == {"steps": 50, "idle_share": None}, "on a CPU there are no events of a device"
    assert record["transformers"]["decode"].keys() == {"1", "4"}
    assert [step["sdpa_seconds"] is None for step in found["attention"]] == [False, False, True]
    for figure in found["attention"]:
        assert figure["seconds"] > 0
        assert figure["share_of_bandwidth"] > 0
    for figure in record["decode"] + record["prefill"]:
        assert min(figure["rounds"]) <= figure["tokens_per_s"] <= max(figure["rounds"])
        assert figure["share_of_bandwidth"] > 0
        assert figure["share_of_matrix_rate"] > 0


@pytest.mark.slow
def test_failed_tests_are_named_and_fail_the_run(tmp_path):
    tests = tmp_path / "test_sample.py"
    tests.write_text(
        "import pytest\n\n"
        "def test_good(): pass\n\n"
        "def test_bad(): assert 'this' == 'that'\n\n"
        "@pytest.fixture\ndef broken(): raise OSError('no such thing')\n\n"
        "def test_unable(broken): pass\n\n"
        "@pytest.mark.skip\ndef test_later(): pass\n"
    )
    only = ("--only", "tests", "attention")
    code, found = run_tool(tmp_path / "results.json", "--device", "cpu", "--tests", str(tests), *only)
    assert code == 1
    counts = {name: found["tests"][name] for name in ("passed", "failed", "errors", "skipped")}
    assert counts == {"passed": 1, "failed": 1, "errors": 1, "skipped": 1}
    by_name = {failure["test"].split("::")[-1]: failure["last_lines"] for failure in found["tests"]["failures"]}
    assert by_name.keys() == {"test_bad", "test_unable"}
    assert "AssertionError" in by_name["test_bad"][-1]
    assert "OSError" in by_name["test_unable"][-1]
    assert found["errors"] == []
    assert len(found["attention"]) == 3, "the other part ran"


def test_run_without_a_time_budget_measures_nothing_and_fails(tmp_path):
    code, found = run_tool(tmp_path / "results.json", "--device", "cpu", "--budget-s", "0")
    assert code == 1
    tests = [f"tests tests/gpu ({marks})" for marks in ("not gpu_alone", "gpu_alone")]
    assert found["skipped"] == ["ceilings", *tests, "attention", "tiny"]
    assert found["environment"]["torch"] == torch.__version__
    assert found["errors"] == []
    assert found["tests"] is None


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device_is_an_error_that_ends_the_run(tmp_path):
    code, found = run_tool(tmp_path / "results.json")
    assert code == 1
    assert [error["part"] for error in found["errors"]] == ["ceilings"]
    assert found["tests"] is None
    assert found["benchmarks"] == {}


@pytest.mark.slow
def test_every_stage_can_be_rehearsed_without_a_device(tmp_path):
    stages = ("fp8", "bf16", "small", "linear", "devices", "tune_attention", "tune_products")
    sample = tmp_path / "test_sample.py"
    sample.write_text("def test_good(): pass\n")
    code, found = run_tool(
        tmp_path / "results.json", "--device", "cpu", "--tests", str(sample), "--stage", "kernels", *stages, "device"
    )
    assert found["errors"] == found["skipped"] == []
    assert code == 0
    assert found["tests"]["passed"] == 3, "three stages have tests"
    assert all(record["transformers"] is None for record in found["benchmarks"].values()), "it was not asked for"
    assert len(found["attention"]) == 3
    assert [(product["product"], product["rows"]) for product in found["linear"]] == [("o", 1), ("o", 8)]
    assert all(product["share_of_bandwidth"] > 0 for product in found["linear"])
    ways = [f"tiny, {way}_parallel_size=2" for way in ("tensor", "pipeline", "data")]
    assert list(found["benchmarks"]) == ["tiny", *ways]
    assert all(record["decode"] for record in found["benchmarks"].values())
    assert {key.split("/")[0] for key in found["launches"]} == {"decode", "linear"}
    assert json.loads((tmp_path / "results-launches.json").read_text()) == found["launches"]
    page = tmp_path / "page.html"
    command = [
        sys.executable,
        str(ROOT / "tools" / "gpu" / "gpu_page.py"),
        str(tmp_path / "results.json"),
        "--out",
        str(page),
    ]
    subprocess.run(command, check=True, timeout=60)
    assert page.read_text().count("<svg") == 2, "a plot of the engines and one of the products"


def test_every_file_of_tests_belongs_to_a_stage():
    files = [file for name in gpu_stages.STAGES for file in gpu_stages.test_files(name)]
    assert sorted(files) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py"))


@pytest.mark.extended
def test_later_run_repeats_failed_tests_and_does_what_the_earlier_run_did_not(tmp_path):
    samples = [tmp_path / f"test_{name}.py" for name in ("bad", "good")]
    for sample in samples:
        sample.write_text(f"def {sample.stem}(): pass\n")
    failed = {"file": str(samples[0]), "test": f"{samples[0].stem}::test_bad", "last_lines": []}
    done = [f"{sample} {marks}" for sample in samples for marks in ("not gpu_alone", "gpu_alone")]
    first = {"tests": {"failures": [failed], "targets": done}, "benchmarks": {}, "linear": [{"product": "o"}]}
    (tmp_path / "first.json").write_text(json.dumps(first))
    later = ("--device", "cpu", "--tests", *map(str, samples), "--after", str(tmp_path / "first.json"))
    code, second = run_tool(tmp_path / "second.json", *later, "--stage", "kernels", "linear", "fp8")
    assert code == 0, second["errors"]
    assert (second["tests"]["passed"], second["tests"]["failed"]) == (1, 0), "only the test that failed runs again"
    assert second["linear"] == []
    assert second["attention"]


def test_steady_rate_counts_the_time_in_which_all_streams_decode():
    early = [(0.0, 1), (1.0, 1), (3.0, 1), (5.0, 1), (7.0, 1)]
    late = [(3.0, 1), (5.0, 1), (7.0, 1), (8.0, 1), (9.0, 1)]
    assert engine_speed.steady_tokens_per_s([early, late]) == pytest.approx(2 * 2 / 4.0)
    with pytest.raises(ValueError, match="never all decoded"):
        engine_speed.steady_tokens_per_s([early[:2], late])


def test_device_is_idle_between_its_events():
    def event(cat, ts, dur):
        return {"ph": "X", "cat": cat, "ts": ts, "dur": dur}

    kernels = [event("kernel", 10, 20), event("gpu_memcpy", 25, 15), event("kernel", 45, 5), event("kernel", 46, 2)]
    others = [event("cpu_op", 0, 100), {"ph": "i", "cat": "kernel", "ts": 90}]
    assert engine_speed.idle_share([*reversed(kernels), *others]) == pytest.approx(5 / 40)
    assert engine_speed.idle_share(others) is None


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Llama-3.1-8B"])
def test_decode_step_reads_every_matrix_once(name):
    arch = read_architecture(engine_speed.FULL.models[name].config)
    model = build_model(arch, torch.bfloat16, "meta")
    matrices = {id(weight): weight.numel() for weight in model.parameters() if weight.dim() == 2}
    count = sum(matrices.values()) - (0 if arch.tie_word_embeddings else arch.vocab_size * arch.hidden_size)
    model_config = SimpleNamespace(architecture=arch, dtype="bfloat16", quantization=None)
    cache_config = SimpleNamespace(cache_dtype="auto")
    engine = SimpleNamespace(model_config=model_config, vllm_config=SimpleNamespace(cache_config=cache_config))
    assert engine_speed.step_cost(engine, 1, 1, 0).memory_bytes == 2 * count
    assert engine_speed.step_cost(engine, 3, 1, 0).flops == 3 * 2 * count
    cached = engine_speed.step_cost(engine, 3, 1, 100).memory_bytes - 2 * count
    assert cached == 300 * arch.kv_bytes_per_token(2)
    model_config.quantization, cache_config.cache_dtype = "fp8", "fp8"
    head = arch.vocab_size * arch.hidden_size
    assert engine_speed.step_cost(engine, 1, 1, 0).memory_bytes == count - head + 2 * head
    assert engine_speed.step_cost(engine, 3, 1, 100).memory_bytes == count + head + 300 * arch.kv_bytes_per_token(1)
