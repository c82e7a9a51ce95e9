"""The comparison with other engines, `tools/bench compare`: its figures, its table, and peers that fail."""

import importlib.util
import json
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from vllm_mp.cli.bench.load_generator import LoadRequest, Timeline, uniform_load
from vllm_mp.core.models import build_model
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.measuring import comparison, gguf_peers, peers
from vllm_mp.testing.measuring.roofline import Ceilings
from vllm_mp.testing.random_models import SIZES

TOOLS = Path(__file__).resolve().parents[2] / "tools"
CONFIG = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).to_dict()


@pytest.fixture(scope="module")
def bench():
    """The program `tools/bench` as a module, imported as if it were run."""
    return load_bench()


def mixed_gap_name():
    """Return the name of a workload whose figures are times."""
    return peers.MIXED_GAP_MS


def load_bench():
    loader = SourceFileLoader("bench_compare", str(TOOLS / "bench"))
    spec = importlib.util.spec_from_loader("bench_compare", loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_weights_that_a_step_reads_are_all_matrices_of_the_model(bench):
    size = bench.ModelSize.of(CONFIG)
    model = build_model(read_architecture(CONFIG), torch.float32, "cpu")
    matrices = sum(
        weight.numel() for name, weight in model.named_parameters() if weight.dim() == 2 and "embed" not in name
    )
    assert size.layer_weights + size.head_weights == matrices


def test_step_takes_as_long_as_the_slower_of_reading_and_computing(bench):
    size = bench.ModelSize.of(CONFIG)
    weights = size.layer_weights + size.head_weights
    lone = size.decode_step(1, 0)
    assert lone == (2 * weights, 2 * weights)
    assert lone.seconds(Ceilings(bytes=weights, flops=weights * 100)) == 2
    assert lone.seconds(Ceilings(bytes=weights * 100, flops=weights)) == 2
    # 3 layers have keys and values of 2 heads of 8 with 2 bytes each; 6 heads multiply both with 8 numbers.
    assert size.decode_step(5, 10).bytes - 2 * weights == 5 * 10 * 3 * 2 * 2 * 8 * 2
    assert size.decode_step(5, 10).flops - 5 * 2 * weights == 5 * 10 * 3 * 6 * 8 * 2 * 2
    assert size.prefill(1).flops == size.decode_step(1, 1).flops
    assert bench.ModelSize.of(CONFIG, 1).decode_step(1, 0).bytes == weights


def test_ratios_compare_the_first_engine_with_each_other_engine(bench):
    rows = {
        "decode, batch 1": {"ours": [10.0, 30.0, 20.0], "theirs": [5.0, 10.0, 40.0], "third": [20.0]},
        mixed_gap_name(): {"ours": [50.0], "theirs": [100.0]},
    }
    report = bench.Report(["ours", "theirs", "third"], rows, [], {}, {"third": "no mixed load: it has no scheduler"})
    assert report.ratio("decode, batch 1", "theirs") == 2
    assert report.ratio(mixed_gap_name(), "theirs") == 2
    assert report.ratio(mixed_gap_name(), "third") is None
    header, decode, gap, remark = report.table().splitlines()
    assert header.split()[1:] == ["ours", "theirs", "third"]
    assert "20 (10-30)" in decode
    assert "10 (5-40)  2.00 x" in decode
    assert "1.00 x" in decode
    assert gap.split()[-1] == "-"
    assert remark == "third: no mixed load: it has no scheduler"


def test_unknown_engine_is_refused_with_the_known_names(bench, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["bench", "compare", "--engine", "other", "--peers-dir", str(tmp_path)])
    assert bench.main() == 2
    assert (
        "unknown engine: other; choose from vllm_mp, vllm_mp-int8, vllm_mp-4bit, vllm_mp-4bit-varying"
        in capsys.readouterr().err
    )


def test_a_gguf_file_is_compared_in_place_and_must_exist(bench, tmp_path, monkeypatch, capsys):
    file = tmp_path / "small.Q4_0.gguf"
    file.write_bytes(b"")
    engines = bench._engines(tmp_path, file)
    names = {name: engine.name for name, [engine] in engines.items()}
    assert names == {
        "vllm_mp": "vllm_mp small.Q4_0",
        "llama.cpp": "llama.cpp small.Q4_0",
        "ik_llama": "ik_llama.cpp small.Q4_0",
        "openvino": "OpenVINO small.Q4_0",
    }
    monkeypatch.setattr("sys.argv", ["bench", "compare", "--gguf", str(tmp_path / "missing.gguf")])
    assert bench.main() == 2
    assert "missing.gguf does not exist" in capsys.readouterr().err


def test_mixed_load_is_measured_from_its_start_to_its_last_token():
    requests = [LoadRequest([1] * 10, 3), LoadRequest([1] * 20, 2, arrival=1.0)]
    timelines = [Timeline(0.0, [0.5, 0.6, 0.8]), Timeline(1.0, [4.0, 5.0])]
    gap = pytest.approx(984)  # interpolated between gaps of 0.1, 0.2 and 1 s
    assert peers.mixed_figures(requests, timelines) == {peers.MIXED_RATE: 35 / 5, mixed_gap_name(): gap}


def test_load_is_the_same_for_every_engine_and_within_its_bounds():
    load = uniform_load(97, 50, (32, 64), (5, 9), 8.0, seed=3)
    assert load == uniform_load(97, 50, (32, 64), (5, 9), 8.0, seed=3)
    assert {len(request.prompt) for request in load} <= set(range(32, 65))
    assert {request.output_len for request in load} == set(range(5, 10))
    arrivals = [request.arrival for request in load]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)
    assert 2 < arrivals[-1] < 20
    assert {request.arrival for request in uniform_load(97, 5, (1, 1), (1, 1), None, 0)} == {0.0}


def test_figures_of_llama_cpps_benchmarks_are_those_of_their_json():
    decode = (
        "main: warming up\n"
        '{"n_kv_max": 16384, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, '
        '"n_gpu_layers": -1, "n_threads": 2, "n_threads_batch": 2, '
        '"pp": 128, "tg": 64, "pl": 4, "n_kv": 768, "t_pp": 0.290000, '
        '"speed_pp": 1765.517241, "t_tg": 0.828479, "speed_tg": 309.000000, "t": 1.118479, "speed": 686.647026}\n'
    )
    assert gguf_peers.parse_batched_bench(decode) == {peers.decode_name(4): 309.0}
    prefill = [{"n_prompt": 128, "n_gen": 0, "avg_ts": 5.0, "samples_ts": [1.0, 2.0, 12.0]}]
    assert gguf_peers.parse_llama_bench(json.dumps(prefill)) == {peers.prefill_name(128): 2.0}


def test_lookup_decoding_is_read_from_its_log_and_a_log_without_figures_is_refused():
    log = (
        "encoded   96 tokens in    0.214 seconds, speed:  448.598 t/s\n"
        "decoded  121 tokens in    0.402 seconds, speed:  300.995 t/s\n\n"
        "n_draft      = 8\nn_predict    = 121\nn_drafted    = 112\nt_draft_flat = 0.10 ms\nn_accept     = 97\n"
    )
    assert gguf_peers.parse_lookup(log) == (300.995, 112, 97)
    with pytest.raises(RuntimeError, match="its log ends with 'error: failed to load model'"):
        gguf_peers.parse_lookup("error: failed to load model")


def test_ik_llama_is_read_from_the_last_line_of_its_program():
    printed = (
        "llama_init_from_model: graph splits = 1\n"
        '{"decode": {"1": [23.39, 25.01, 20.2], "2": [29.27]}, "prefill": {"16": [68.88]}}\n'
    )
    assert gguf_peers.parse_rounds(printed) == {
        peers.decode_name(1): 23.39,
        peers.decode_name(2): 29.27,
        peers.prefill_name(16): 68.88,
    }


class StandInProgram(peers.TimedEngine):
    """An engine whose program writes the timelines of a recorded run: every load takes a second for each token."""

    def _task(self):
        return {"file": "small.gguf"}

    def _run_loads(self, loads):
        return [
            [Timeline(request.arrival, [1.0 + i for i in range(request.output_len)]) for request in load.requests]
            for load in loads
        ]


def test_timelines_of_a_peers_program_give_its_figures():
    engine = StandInProgram("OpenVINO Q4_1", Path(sys.executable), "run_openvino_load.py")
    assert engine._program.exists()
    assert engine.measure(peers.Workloads([1, 4], [128], [], [2])) == {
        peers.decode_name(1): 1.0,
        peers.decode_name(4): 4.0,
        peers.drawn_name(2): 2.0,
        peers.prefill_name(128): 128.0,
    }


MACHINE = comparison.Machine("Example 9000", 2, ["AVX-512", "AVX2"], 23.5, "avx512")


def record_of(rows, **fields):
    names = sorted({name for figures in rows.values() for name in figures})
    report = comparison.Report(
        names, rows, [Ceilings(15e9, 2e11), Ceilings(17e9, 4e11)], {}, fields.get("unmeasured", {})
    )
    return comparison.Record(MACHINE, "bfloat16", "2026-11-28", "0123456789abcdef", report, [])


def test_table_is_headed_by_the_machine_its_memory_and_its_rates():
    assert MACHINE.head(Ceilings(15.25e9, 2.6e12), "bfloat16") == [
        "Example 9000, 2 cores (AVX-512, AVX2), 24 GiB; this engine's kernels: avx512",
        "reads of 15.2 GB/s, products of 2.60 TFLOP/s (bfloat16)",
    ]
    assert len(MACHINE.head(None, "bfloat16")) == 1
    this = comparison.Machine.this()
    assert this.kernels in comparison.KERNEL_BUILDS
    assert this.cores > 0
    assert this.memory_gib > 0


def test_page_compares_engines_with_the_same_weights_and_says_why_cells_are_empty():
    rows = {
        "decode, batch 1": {"vllm_mp Q4_1": [30.0, 10.0], "OpenVINO Q4_1": [5.0], "llama.cpp BF16": [7.0]},
        peers.MIXED_RATE: {"vllm_mp Q4_1": [90.0]},
    }
    record = record_of(rows, unmeasured={"OpenVINO Q4_1": "no mixed load: example"})
    page = record.page("cpu_avx512.svg").splitlines()
    assert page[0] == "# Figures: beside other engines on a CPU with AVX-512"
    assert "| memory | 24 GiB, reads of 16.0 GB/s |" in page
    assert "| products of matrices | 0.30 TFLOP/s (torch, bfloat16) |" in page
    begin = page.index("## Weights in Q4_1")
    assert page[begin + 2 : begin + 6] == [
        "| | vllm_mp Q4_1 | OpenVINO Q4_1 | ratio |",
        "| --- | --- | --- | --- |",
        "| decode, batch 1 | 20 (10-30) | 5 (5-5) | 4.00 |",
        f"| {peers.MIXED_RATE} | 90 (90-90) | - |  |",
    ]
    begin = page.index("## Weights in bfloat16")
    assert page[begin + 2 : begin + 5] == ["| | llama.cpp BF16 |", "| --- | --- |", "| decode, batch 1 | 7 (7-7) |"]
    assert "- OpenVINO Q4_1: no mixed load: example" in page
    assert record.rounds == 2


def test_rounds_are_added_to_figures_of_the_same_machine_only(monkeypatch, tmp_path):
    file = tmp_path / "cpu_avx512.json"
    assert comparison.continued(file, ["ours"], {}) is None
    record_of({"decode, batch 1": {"ours": [1.0]}}).write(file)
    assert comparison.Record.read(file) == record_of({"decode, batch 1": {"ours": [1.0]}})
    monkeypatch.setattr(comparison.Machine, "this", lambda: MACHINE)
    kept = comparison.continued(file, ["ours", "theirs"], {"theirs": "no mixed load"})
    assert kept.report.names == ["ours", "theirs"]
    assert kept.report.rows == {"decode, batch 1": {"ours": [1.0]}}
    monkeypatch.setattr(comparison.Machine, "this", lambda: MACHINE._replace(processor="Other"))
    with pytest.raises(ValueError, match="is of another machine"):
        comparison.continued(file, ["ours"], {})
    file.write_text("{}")
    with pytest.raises(ValueError, match="is not a file of `tools/bench compare`"):
        comparison.Record.read(file)


def test_pages_in_the_documentation_are_those_of_their_figures():
    files = sorted((TOOLS.parent / "docs/figures").glob("cpu_a*.json"))
    assert files
    for file in files:
        record = comparison.Record.read(file)
        assert file.stem == f"cpu_{record.machine.kernels}"
        assert file.with_suffix(".md").read_text() == record.page(f"{file.stem}.svg")
        assert file.with_suffix(".svg").exists()


@pytest.mark.slow
def test_this_engine_is_measured_through_its_own_client(bench):
    mixed = uniform_load(bench.VOCAB_SIZE, 4, (8, 16), (4, 8), 50.0, seed=0)
    figures = bench.ours().measure(bench.Workloads([1, 2], [32], mixed, [2]))
    assert list(figures) == [
        *(bench.decode_name(1), bench.decode_name(2), peers.drawn_name(2), bench.prefill_name(32)),
        *("mixed load, tokens in and out", mixed_gap_name()),
    ]
    assert all(value > 0 for value in figures.values())


class StandInPeer:
    """An engine that is measured at once, or runs a program that crashes in the round `crashes_in`."""

    unmeasured = ""

    def __init__(self, name, value=1.0, crashes_in=None, observe=lambda: None):
        self.name = name
        self._value = value
        self._crashes_in = crashes_in
        self._observe = observe
        self._round = 0

    def prepare(self):
        pass

    def measure(self, workloads):
        self._round += 1
        self._observe()
        if self._round == self._crashes_in:
            crash = "import os, signal, sys; print('no such instruction', file=sys.stderr, flush=True); "
            peers.run([sys.executable, "-c", crash + "os.kill(os.getpid(), signal.SIGILL)"])
        return {"decode, batch 1": self._value}


@pytest.fixture
def compare(bench, monkeypatch, tmp_path):
    """Run `tools/bench compare` with stand-in peers and cheap ceilings; return its exit code and its JSON."""

    def run(*compared, rounds=2):
        monkeypatch.setattr(bench, "_engines", lambda *_: {peer.name: [peer] for peer in compared})
        monkeypatch.setattr(bench, "measure_ceilings", lambda: Ceilings(1e9, 1e9))
        out = tmp_path / "out.json"
        monkeypatch.setattr("sys.argv", ["bench", "compare", "--rounds", str(rounds), "--json", str(out)])
        return bench.main(), json.loads(out.read_text())

    return run


def test_peer_that_crashes_is_reported_and_the_others_are_measured(compare, capsys):
    given = StandInPeer("good", 2.0), StandInPeer("crashing", crashes_in=1), StandInPeer("late", crashes_in=2)
    code, found = compare(*given, StandInPeer("last", 4.0))
    assert code == 0
    assert found["figures"] == {"decode, batch 1": {"good": [2.0, 2.0], "late": [1.0], "last": [4.0, 4.0]}}
    error = f"no such instruction ({Path(sys.executable).name} ended with SIGILL)"
    assert found["failed"] == {"crashing": f"round 1: {error}", "late": f"round 2: {error}"}
    printed = capsys.readouterr().out.splitlines()
    assert " ".join(printed[3].split()) == "decode, batch 1 2 (2-2) failed 1 (1-1) 2.00 x 4 (4-4) 0.50 x"
    assert printed[4:6] == [f"crashing failed in round 1: {error}", f"late failed in round 2: {error}"]


def test_figures_are_on_disk_after_each_engine(compare, tmp_path):
    found = []
    out = tmp_path / "out.json"

    def record_figures():
        found.append(json.loads(out.read_text())["figures"] if out.exists() else None)

    compare(StandInPeer("good", 3.0, observe=record_figures), StandInPeer("other", observe=record_figures), rounds=1)
    assert found == [None, {"decode, batch 1": {"good": [3.0]}}]


def test_exit_code_is_1_if_every_peer_failed(compare):
    code, found = compare(StandInPeer("a", crashes_in=1), StandInPeer("b", crashes_in=2))
    assert code == 1
    assert found["failed"].keys() == {"a", "b"}
    assert found["figures"] == {"decode, batch 1": {"b": [1.0]}}
