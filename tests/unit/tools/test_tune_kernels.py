"""tools/gpu/tune_kernels.py, run in Triton's interpreter, and the effect of its file on the kernels."""

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton")

from vllm_mp.kernels.triton import launch
from vllm_mp.kernels.triton.dependent_launch import prefetched_bytes

TOOL = Path(__file__).resolve().parents[3] / "tools" / "gpu" / "tune_kernels.py"


@pytest.mark.slow
def test_tool_saves_options_of_every_kernel_that_serves_a_model(tmp_path):
    out = tmp_path / "tuned.json"
    command = [sys.executable, str(TOOL), "--device", "cpu", "--quick", "--out", str(out)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    products = {f"linear/{bits}/64x256" for bits in (8, 16)}
    kept = {key for key in launch._HOPPER if "/32/" in key or key.startswith("linear/")}
    assert set(found) == products | set(launch._HOPPER) - kept
    for key, options in found.items():
        if key in products:
            assert options["MAX_ROWS"] in (0, 1), "only one row is timed beside torch's product"
            assert set(options) <= {*launch._HOPPER[key.removesuffix("/64x256")], "OUTPUT_TILE", "PARTS", "num_stages"}
        else:
            assert set(options) <= set(launch._HOPPER[key])


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    return importlib.import_module("tune_kernels")


def test_candidates_that_cannot_be_faster_are_not_timed(tool, hopper, capsys):
    tried = [{"num_warps": warps} for warps in (1, 2, 4, 8, 16)]
    found = [("a", "2 spills"), ("b", ""), ("b", ""), ("", "CompilationError: no"), ("c", "")]
    pool = Mock(map=lambda compiled, options: found)
    kept = tool.worth_timing("merge", tried, launch._HOPPER, torch.device("cuda", 0), pool)
    assert list(kept) == [tried[0], tried[1], tried[4]], "the options before are timed in any case"
    errors = capsys.readouterr().err
    assert "merge: {'num_warps': 4} dropped: same code as another candidate" in errors
    assert "merge: {'num_warps': 8} dropped: CompilationError: no" in errors


def test_entry_that_does_not_exist_is_named(tool, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune_kernels.py", "--device", "cpu", "--only", "merge", "decode/8/12"])
    with pytest.raises(SystemExit):
        tool.main()
    assert "--only: no such entry: decode/8/12" in capsys.readouterr().err


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(launch, "tuned_file", lambda capability: tmp_path / "sm_{}{}.json".format(*capability))
    launch._table.cache_clear()
    yield tmp_path / "sm_90.json"
    launch._table.cache_clear()


def test_measured_options_replace_the_built_in_options(hopper):
    device = torch.device("cuda", 0)
    assert launch.table(device) == launch._HOPPER
    launch._table.cache_clear()
    hopper.write_text(json.dumps({"merge": {"num_warps": 2}}))
    assert launch.options("merge", device) == {"num_warps": 2}
    assert launch.options("sample", device) == launch._HOPPER["sample"]
    assert launch._HOPPER["merge"] != {"num_warps": 2}


@pytest.mark.parametrize(
    ("num_programs", "context", "expected"),
    [(8, 60, 1), (8, 1000, 16), (8, 100_000, 33), (1, 2**20, 64), (2048, 1000, 1), (2048, 32_768, 1)],
)
def test_decode_is_split_so_that_the_gpu_is_busy(hopper, monkeypatch, num_programs, context, expected):
    monkeypatch.setattr(launch, "_num_processors", lambda *_: 132)
    assert launch.num_splits(num_programs, context, torch.device("cuda", 0)) == expected


@pytest.mark.parametrize(
    ("rows", "splits", "context", "expected"),
    [(1, 33, 2**17, 64), (1, 33, 1000, 33), (128, 1, 2048, 1), (128, 1, 2049, 2), (512, 1, 2**17, 32)],
)
def test_long_context_has_more_parts_within_bounds_on_their_number(hopper, rows, splits, context, expected):
    assert launch.num_slots(rows, splits, context, torch.device("cuda", 0)) == expected


def test_graph_of_steps_with_prefills_has_no_more_programs_than_keep_the_gpu_busy(hopper, monkeypatch):
    monkeypatch.setattr(launch, "_num_processors", lambda *_: 132)
    for kernel, most in (("PREFILL", 264), ("DECODE", 1056), ("MERGE", 1320)):
        assert launch.num_looping(kernel, 16_384, torch.device("cuda", 0)) == most
        assert launch.num_looping(kernel, 40, torch.device("cuda", 0)) == 40


@pytest.mark.parametrize("weights", ["16", "8", "blocks"])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096)]
)
def test_busiest_processor_reads_little_more_than_its_share_of_a_product(hopper, monkeypatch, weights, outputs, inputs):
    monkeypatch.setattr(launch, "_num_processors", lambda *_: 132)
    options = launch.linear_options(outputs, inputs, weights, torch.device("cuda", 0))
    assert options["PARTS"] == 1, "the kernel that adds parts would take longer than they save"
    assert -(-outputs // options["OUTPUT_TILE"] // 132) * 132 * options["OUTPUT_TILE"] <= 1.05 * outputs


def test_kernels_start_before_others_end_only_where_the_gpu_can(hopper):
    assert prefetched_bytes(torch.device("cpu")) == 0, "the interpreter has no such launches"
    for capability in ((8, 0), (8, 6), (8, 9)):
        assert launch.reasoned(capability)["dependent_launch"] == {"PREFETCH": 0}
    assert launch.reasoned((9, 0))["dependent_launch"]["PREFETCH"] > 0


def test_few_outputs_of_many_inputs_are_cut_into_parts(hopper, monkeypatch):
    monkeypatch.setattr(launch, "_num_processors", lambda *_: 132)
    options = launch.linear_options(1024, 14_336, "16", torch.device("cuda", 0))
    assert options["PARTS"] * -(-1024 // options["OUTPUT_TILE"]) in range(100, 133)


def test_measured_options_of_a_shape_replace_the_computed_ones(hopper, monkeypatch):
    monkeypatch.setattr(launch, "_num_processors", lambda *_: 132)
    measured = {"MAX_ROWS": 4, "OUTPUT_TILE": 64, "PARTS": 2, "SLICES": 8, "SLICE_INPUTS": 64, "num_stages": 3}
    hopper.write_text(json.dumps({"linear/16/4096x4096": measured}))
    assert launch.linear_options(4096, 4096, "16", torch.device("cuda", 0)) == measured
    assert launch.linear_options(4096, 4096, "8", torch.device("cuda", 0))["MAX_ROWS"] == 16


@pytest.mark.parametrize("capability", launch.SHARED_BYTES)
@pytest.mark.parametrize("weights", ["16", "8", "blocks"])
def test_no_product_of_few_rows_asks_for_more_shared_memory_than_there_is(hopper, monkeypatch, capability, weights):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(launch, "_num_processors", lambda *_: 132 if capability == (9, 0) else 82)
    device, limit = torch.device("cuda", 0), launch.SHARED_BYTES[capability]
    all_outputs, all_inputs = (8, 40, 64, 576, 1024, 4096, 6144, 28_672, 151_936), (64, 128, 4096, 53_248)
    for outputs, inputs in itertools.product(all_outputs, all_inputs):
        options = launch.linear_options(outputs, inputs, weights, device)
        assert 0 < launch.shared_bytes_of_linear(options, weights) <= limit
        for tile, stages in itertools.product((16, 32, 64, 128), range(1, 12)):
            measured = launch.fitting({**options, "OUTPUT_TILE": tile, "num_stages": stages}, weights, limit)
            assert launch.shared_bytes_of_linear(measured, weights) <= limit
            assert 1 <= measured["num_stages"] <= stages


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("linear/16/4096x4096", {"OUTPUT_TILE": 256, "SLICES": 4, "SLICE_INPUTS": 128, "num_stages": 6}),
        ("prefill/16/256", {"ROWS": 64, "KEYS": 128, "num_warps": 4, "num_stages": 4}),
        ("decode/8/128", {"KEYS": 256, "num_warps": 4, "num_stages": 5}),
        ("fp8/128", {"ROWS": 128, "OUTPUT_TILE": 256, "num_warps": 8, "num_stages": 6}),
        ("lora_shrink/64", {"ROWS": 128, "INPUT_TILE": 256, "num_warps": 8, "num_stages": 6}),
    ],
)
def test_measured_options_that_cannot_fit_are_refused_by_name(hopper, key, options):
    hopper.write_text(json.dumps({key: options}))
    with pytest.raises(
        ValueError, match=rf"sm_90\.json: '{key}' takes [\d,]+ bytes of shared memory, .* has 232,448; "
    ):
        launch.table(torch.device("cuda", 0))


@pytest.mark.parametrize("capability", launch.SHARED_BYTES)
def test_every_entry_of_the_tables_leaves_room_for_what_the_compiler_adds(capability):
    for key, options in launch.reasoned(capability).items():
        assert launch.least_shared_bytes(key, options) <= 0.75 * launch.SHARED_BYTES[capability], key
