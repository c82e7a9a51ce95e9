"""The comparison with other engines: what it computes from what they did, and what it says of it."""

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from vllm_mp.cli.load import LoadRequest, Timeline, uniform_load
from vllm_mp.core.models import build_model
from vllm_mp.model_config.architecture import Architecture
from vllm_mp.testing.random_models import SIZES

TOOLS = Path(__file__).resolve().parents[2] / "tools"
CONFIG = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).to_dict()


@pytest.fixture(scope="module")
def bench():
    loader = SourceFileLoader("bench_compare", str(TOOLS / "bench"))
    spec = importlib.util.spec_from_loader("bench_compare", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_weights_that_a_step_reads_are_those_of_the_model(bench):
    size = bench.ModelSize.of(CONFIG)
    model = build_model(Architecture.from_hf_config(CONFIG), torch.float32, "cpu")
    matrices = sum(one.numel() for name, one in model.named_parameters() if one.dim() == 2 and "embed" not in name)
    assert size.layer_weights + size.head_weights == matrices


def test_a_step_takes_as_long_as_reading_or_computing_whichever_is_more(bench):
    size = bench.ModelSize.of(CONFIG)
    weights = size.layer_weights + size.head_weights
    lone = size.decode_step(1, 0)
    assert lone == (2 * weights, 2 * weights)
    assert lone.seconds(bench.Ceilings(bytes=weights, flops=weights * 100)) == 2
    assert lone.seconds(bench.Ceilings(bytes=weights * 100, flops=weights)) == 2
    # Keys and values of 2 heads of 8 in 3 layers, 2 bytes each; 6 heads that multiply both with 8 numbers.
    assert size.decode_step(5, 10).bytes - 2 * weights == 5 * 10 * 3 * 2 * 2 * 8 * 2
    assert size.decode_step(5, 10).flops - 5 * 2 * weights == 5 * 10 * 3 * 6 * 8 * 2 * 2
    assert size.prefill(1).flops == size.decode_step(1, 1).flops
    assert bench.ModelSize.of(CONFIG, 1).decode_step(1, 0).bytes == weights


def test_ratios_say_how_many_times_as_good_the_first_engine_is(bench):
    rows = {
        "decode, batch 1": {"ours": [10.0, 30.0, 20.0], "theirs": [5.0, 10.0, 40.0], "third": [20.0]},
        bench.MIXED_GAP_MS: {"ours": [50.0], "theirs": [100.0]},
    }
    report = bench.Report(["ours", "theirs", "third"], rows, [])
    assert report.ratio("decode, batch 1", "theirs") == 2
    assert report.ratio(bench.MIXED_GAP_MS, "theirs") == 2
    assert report.ratio(bench.MIXED_GAP_MS, "third") is None
    header, decode, gap = report.table().splitlines()
    assert header.split()[1:] == ["ours", "theirs", "third"]
    assert "20 (10-30)" in decode
    assert "10 (5-40)  2.00 x" in decode
    assert "1.00 x" in decode
    assert gap.split()[-1] == "-"


def test_an_engine_that_is_not_known_is_told_those_that_are(bench, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["bench", "compare", "--engine", "nobody", "--peers-dir", str(tmp_path)])
    assert bench.main() == 2
    assert "nobody: give some of vllm_mp, vllm_mp-int8, llama.cpp" in capsys.readouterr().err


def test_a_mixed_load_is_measured_from_its_start_to_its_last_token(bench):
    from shared.peers import MIXED_RATE, mixed_figures

    requests = [LoadRequest([1] * 10, 3), LoadRequest([1] * 20, 2, arrival=1.0)]
    timelines = [Timeline(0.0, [0.5, 0.6, 0.8]), Timeline(1.0, [4.0, 5.0])]
    assert mixed_figures(requests, timelines) == {MIXED_RATE: 35 / 5, bench.MIXED_GAP_MS: pytest.approx(1000)}


def test_a_load_is_the_same_for_every_engine_and_within_its_bounds():
    load = uniform_load(97, 50, (32, 64), (5, 9), 8.0, seed=3)
    assert load == uniform_load(97, 50, (32, 64), (5, 9), 8.0, seed=3)
    assert {len(one.prompt) for one in load} <= set(range(32, 65))
    assert {one.output_len for one in load} == set(range(5, 10))
    arrivals = [one.arrival for one in load]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)
    assert 2 < arrivals[-1] < 20
    assert {one.arrival for one in uniform_load(97, 5, (1, 1), (1, 1), None, 0)} == {0.0}


@pytest.mark.slow
def test_this_engine_is_measured_through_its_own_client(bench):
    mixed = uniform_load(bench.VOCAB_SIZE, 4, (8, 16), (4, 8), 50.0, seed=0)
    figures = bench.ours().measure(bench.Workloads([1, 2], [32], mixed))
    assert list(figures) == [
        *(bench.decode_name(1), bench.decode_name(2), bench.prefill_name(32)),
        *("mixed load, tokens in and out", bench.MIXED_GAP_MS),
    ]
    assert all(value > 0 for value in figures.values())
