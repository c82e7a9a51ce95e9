"""Steps give the same results when they are padded to the shape of a graph and computed from its buffers.

A CPU has no graphs, so each replay calls the captured computation again: on the same buffers, and without the lengths
that a captured kernel could not read either. `tests/gpu` tests real graphs.
"""

import contextlib
import logging
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.local_engine import LocalEngine

from vllm_mp.core.collectives.group import RankGroup
from vllm_mp.core.worker import cuda_graphs
from vllm_mp.core.worker.cuda_graphs import StepGraphs, StepShape, batch_sizes, step_shapes
from vllm_mp.core.worker.memory import model_memory
from vllm_mp.core.worker.step_inputs import step_inputs
from vllm_mp.kernels import ops, reference
from vllm_mp.kernels.attention_backends import AttentionBackend
from vllm_mp.testing.random_models import CONFIGS, random_prompts, save_random_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


MODELS = ("llama", "qwen3", "mistral-windowed", "gpt2")
PROMPTS = random_prompts((9, 3, 30, 1, 12, 5, 26, 2, 17, 8, 4, 11, 6, 21))
SHARED = random_prompts((16,))[0]
PENALTY = {"presence_penalty": 0.5}


def stand_in(device):
    """Return a `Capture` for the CPU, whose replays call the computation again."""

    def capture(compute):
        compute()  # as the capture in CUDA graphs does first
        return compute

    return capture


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in made.items():
        save_random_model(CONFIGS[name], folder)
    return made


def decodes(*sizes):
    return [StepShape(size, size, True) for size in sizes]


@pytest.fixture
def replays(monkeypatch):
    """Return a list that gets (number of tokens, shape of the graph) of each replay."""
    seen, run = [], StepGraphs.run

    def watch(graphs, shape, input_ids, *args):
        hidden = run(graphs, shape, input_ids, *args)
        if hidden is not None:
            seen.append((len(input_ids), shape))
        return hidden

    monkeypatch.setattr(StepGraphs, "run", watch)
    return seen


def outputs(folder, **options):
    """Return tokens and log-probabilities of requests that begin and end at different steps."""
    engine = LocalEngine(folder, **options)
    for slot, prompt in enumerate(PROMPTS):
        sampled = {"temperature": 1.0, "top_p": 0.9} if slot % 3 == 0 else {}
        engine.add(slot, prompt, max_tokens=4 + 5 * slot % 29, **sampled)
        for _ in range(slot % 4):
            engine.step()
    engine.run()
    assert engine.pool.num_free == engine.pool.num_blocks
    return engine.tokens, engine.logprobs


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_the_same_to_the_bit_with_and_without_graphs(folders, replays, name):
    expected = outputs(folders[name])
    assert not replays
    for overlaps in (False, True):
        assert outputs(folders[name], make_capture=stand_in, async_scheduling=overlaps) == expected
    of_decodes = {(count, shape.num_tokens) for count, shape in replays if shape.only_decodes}
    assert {size for _, size in of_decodes} == {1, 2, 4, 8, 12}
    assert {1, 3, 5, 7, 9} <= {count for count, _ in of_decodes}, "also numbers of rows between two graph sizes"
    with_prefills = {(count, shape.num_tokens) for count, shape in replays if not shape.only_decodes}
    assert {size for _, size in with_prefills} == {16, 32, 40}
    assert any(count < size for count, size in with_prefills)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_embeddings_are_computed_without_graphs_until_the_prompt_ends(folders, replays, name):
    """The last token of a prompt may be a chunk of its own, which looks like a decode."""

    def play(with_embeds, **options):
        engine = LocalEngine(folders[name], max_num_batched_tokens=4, max_num_seqs=4, **options)
        table = engine.runner.memory.model.embed_input_ids(torch.arange(97)).clone()
        for slot, prompt in enumerate((PROMPTS[0], PROMPTS[3], PROMPTS[7])):
            embeds = table[prompt] if with_embeds else None
            engine.add(slot, prompt, max_tokens=5, embeds=embeds)
            engine.run()
        return engine.tokens, engine.logprobs

    expected = play(with_embeds=False)
    assert play(with_embeds=True) == expected
    assert not replays
    for overlaps in (False, True):
        assert play(with_embeds=True, make_capture=stand_in, async_scheduling=overlaps) == expected
    assert replays


def test_step_writes_only_its_own_cells_and_the_padding_block(folders, monkeypatch):
    """When batches shrink, the buffers keep stale cells of the larger batches."""
    engine = LocalEngine(folders["llama"], make_capture=stand_in)
    run, padded = StepGraphs.run, []

    def contents():
        return [cache.flatten(0, 1).clone() for pair in engine.runner.memory.kv_caches for cache in pair]

    def watch(graphs, shape, input_ids, positions, metadata, latest):
        before = contents()
        hidden = run(graphs, shape, input_ids, positions, metadata, latest)
        for old, new in zip(before, contents(), strict=True):
            written = (old.view(torch.int32) != new.view(torch.int32)).flatten(1).any(1).nonzero().flatten().tolist()
            assert set(written) - {0} <= set(metadata.cell_mapping.tolist())
        count = len(metadata.seq_lens)
        assert not graphs._buffers.seq_lens[count : shape.num_rows].any(), "padding has no context to read"
        if shape.num_rows > count:
            padded.append(shape.only_decodes)
        return hidden

    monkeypatch.setattr(StepGraphs, "run", watch)
    for slot, prompt in enumerate(PROMPTS[:7]):
        engine.add(slot, prompt, max_tokens=3 * slot + 2)
    engine.run()
    assert set(padded) == {True, False}


def test_shared_blocks_are_read_alike_with_and_without_graphs(folders):
    def play(**options):
        engine = LocalEngine(folders["llama"], **options)
        for slot in range(6):
            engine.add(slot, [*SHARED, slot], max_tokens=10)
        engine.run()
        return engine.tokens

    assert play(make_capture=stand_in, async_scheduling=True) == play()


def test_logits_processors_apply_to_the_output_of_a_graph(folders):
    def play(**options):
        engine = LocalEngine(folders["qwen3"], **options)
        for slot, prompt in enumerate(PROMPTS[:5]):
            engine.add(slot, prompt, max_tokens=12, **(PENALTY if slot % 2 else {"logit_bias": {3: 2.0}}))
        engine.run()
        return engine.tokens

    assert play(make_capture=stand_in, async_scheduling=True) == play()


def test_only_steps_that_fit_run_as_a_graph(folders, replays):
    engine = LocalEngine(folders["llama"], make_capture=stand_in)
    engine.runner.memory.graphs.capture(decodes(2), stand_in(None), lambda: None)
    for slot, prompt in enumerate(([5, 6, 7], [8, 9, 10], [11, 12, 13])):
        engine.add(slot, prompt, max_tokens=3 + 3 * slot)
    step = engine.step()
    assert step.num_decodes == 0
    assert not replays, "no graph has prefills"
    while len(engine.step().rows) == 3:
        assert not replays, "three rows do not fit"
    engine.run()
    assert {count for count, _ in replays} == {1, 2}


def test_step_runs_without_a_graph_when_its_block_table_is_wider_than_the_buffer(folders, replays):
    expected = LocalEngine(folders["llama"])
    engine = LocalEngine(folders["llama"], make_capture=stand_in)
    engine.runner.memory.graphs._max_blocks = 4
    engine.runner.memory.graphs.capture(decodes(4, 2, 1), stand_in(None), lambda: None)
    for player in (expected, engine):
        for slot in range(3):
            player.add(slot, PROMPTS[slot][:6], max_tokens=30)
        player.run()
    assert engine.tokens == expected.tokens
    assert replays
    assert len(replays) < 15, "contexts of more than 16 tokens run without a graph"


def test_largest_graph_is_captured_first_and_each_capture_beats(folders):
    sizes, beats = [], []

    def capture(compute):
        sizes.append(len(compute()))
        assert len(beats) >= len(sizes)
        return compute

    LocalEngine(folders["gpt2"], make_capture=lambda device: capture, beat=lambda: beats.append(1))
    assert sizes == [12, 8, 4, 2, 1, 40, 32, 16]


def test_captured_graphs_serve_all_sizes_when_the_time_is_up(folders, replays, monkeypatch, caplog):
    expected = outputs(folders["llama"])
    monkeypatch.setattr(cuda_graphs, "_CAPTURE_TIME_S", -1.0)
    with caplog.at_level(logging.WARNING):
        assert outputs(folders["llama"], make_capture=stand_in) == expected
    assert {shape for _, shape in replays} == set(decodes(12))
    assert "no graphs for steps of 8 rows or fewer" in caplog.text
    assert "no graphs for steps of 40 tokens with prefills or fewer" in caplog.text


def test_model_that_cannot_be_captured_runs_without_graphs_and_warns_once(folders, replays, monkeypatch, caplog):
    def refuse(compute):
        raise RuntimeError("operation not permitted when stream is capturing")

    expected = outputs(folders["llama"])
    with caplog.at_level(logging.WARNING):
        assert outputs(folders["llama"], make_capture=lambda device: refuse) == expected
    assert not replays
    assert [record.getMessage() for record in caplog.records if record.name.startswith("vllm_mp")] == [
        "steps are not captured: steps of 12 rows: operation not permitted when stream is capturing"
    ]


def test_steps_of_decodes_are_captured_when_those_with_prefills_cannot(folders, replays, caplog):
    def capture(compute):
        if len(compute()) == 32:
            raise RuntimeError("operation not permitted when stream is capturing")
        return compute

    expected = outputs(folders["llama"])
    with caplog.at_level(logging.WARNING):
        assert outputs(folders["llama"], make_capture=lambda device: capture) == expected
    assert {shape.only_decodes for _, shape in replays} == {True}
    assert "steps with prefills are not captured: steps of 32 tokens with prefills: operation not" in caplog.text


class OtherRank(RankGroup):
    """Another rank that votes as `votes` say, from the first capture on, and then to go on."""

    def __init__(self, votes):
        self.votes = list(votes)

    def minimum(self, value):
        return min(value, self.votes.pop(0) if self.votes else cuda_graphs._GOES_ON)


def captured_beside(votes, folder):
    graphs = LocalEngine(folder, make_capture=stand_in).runner.memory.graphs
    shapes = [*decodes(4, 2), StepShape(16, 4, False), StepShape(8, 4, False)]
    graphs.capture(shapes, stand_in(None), lambda: None, OtherRank(votes))
    return [shape for shape in shapes if shape in graphs._replays]


@pytest.mark.parametrize(
    ("votes", "expected"),
    [
        ((), [(4, True), (2, True), (16, False), (8, False)]),
        ((2, 1), [(4, True), (16, False), (8, False)]),
        ((2, 2, 2, 2, 1), [(4, True), (2, True), (16, False)]),
        ((2, 2, 2, 2, 0), [(4, True), (2, True)]),
        ((2, 2, 2, 2, 2, 0), [(4, True), (2, True)]),
    ],
)
def test_all_ranks_capture_the_same_shapes(folders, votes, expected):
    found = captured_beside(votes, folders["llama"])
    assert [(shape.num_tokens, shape.only_decodes) for shape in found] == expected


def test_no_rank_uses_graphs_when_another_cannot_capture_decodes(folders):
    with pytest.raises(cuda_graphs.CaptureError, match="another rank"):
        captured_beside((2, 2, 0), folders["llama"])


def test_rank_that_cannot_capture_tells_the_others(folders):
    group = OtherRank(())
    group.minimum = Mock(wraps=group.minimum)
    graphs = LocalEngine(folders["llama"], make_capture=stand_in).runner.memory.graphs
    with pytest.raises(cuda_graphs.CaptureError, match="steps of 2 rows: refused"):
        graphs.capture(decodes(2), Mock(side_effect=RuntimeError("refused")), lambda: None, group)
    assert [call.args for call in group.minimum.call_args_list] == [(cuda_graphs._GOES_ON,), (cuda_graphs._FAILED,)]


@pytest.fixture
def sync_modes(monkeypatch):
    """Stand in for a CUDA device; return the list of how it treats waits of the host, of which the last counts."""
    modes = [0]
    for name in ("synchronize", "graph_pool_handle", "Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_start_fails_when_the_device_fails_during_capture(folders, sync_modes):
    torch.cuda.synchronize.side_effect = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(cuda_graphs.DeviceError, match="illegal memory access"):
        LocalEngine(folders["llama"], make_capture=cuda_graphs.cuda_capture)


def test_model_that_waits_for_the_device_is_refused_before_its_capture_begins(sync_modes):
    def compute():
        if sync_modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        cuda_graphs.cuda_capture(torch.device("cpu"))(compute)
    torch.cuda.CUDAGraph.assert_not_called()
    assert sync_modes == [0, "error", 0], "later work may wait again"


def test_attention_that_reads_lengths_on_the_host_is_not_captured(folders, monkeypatch, caplog):
    chosen = AttentionBackend("torch", reference.paged_attention)
    monkeypatch.setattr(model_memory, "choose_attention", lambda *_: chosen)
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(folders["gpt2"], make_capture=stand_in)
    assert "which a graph cannot" in caplog.text
    engine.add(0, [5, 6, 7], max_tokens=5)
    engine.run()
    assert len(engine.tokens[0]) == 5


def test_no_graph_is_captured_on_a_cpu(folders):
    runner = LocalEngine(folders["llama"]).runner
    assert not runner.memory.attention.captures
    assert runner.memory.graphs is None


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 20, 100, 256, 300, 512, 5000])
@pytest.mark.parametrize("most", [512, 1024])
def test_graph_sizes_cover_all_numbers_of_rows_with_little_padding(max_num_seqs, most):
    config = Mock()
    config.scheduler_config.max_num_seqs, config.model_config.max_cudagraph_capture_size = max_num_seqs, most
    sizes = batch_sizes(config)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_num_seqs, most)
    assert len(sizes) <= (51 if most == 512 else 67)
    for count in range(1, sizes[-1] + 1):
        padding = next(size for size in sizes if size >= count) - count
        assert padding < max(8, count / 16 + 1)
        assert padding <= count


@pytest.mark.parametrize(("most", "budget", "seqs"), [(512, 2048, 256), (512, 300, 8), (100, 2048, 1), (1, 40, 4)])
def test_graph_shapes_with_prefills_cover_short_steps_with_little_padding(most, budget, seqs):
    config = Mock()
    config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens = seqs, budget
    config.model_config.max_cudagraph_capture_size = most
    shapes = [shape for shape in step_shapes(config) if not shape.only_decodes]
    sizes = [shape.num_tokens for shape in shapes]
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[0] == min(most, budget)
    assert len(sizes) <= 10
    for shape in shapes:
        assert shape.num_rows == min(shape.num_tokens, seqs), "so that tokens alone decide which shape fits"
    for count in range(1, sizes[0] + 1):
        assert min(size for size in sizes if size >= count) - count < max(16, min(64, count))


def test_hidden_states_are_the_same_to_the_bit_at_every_padding(folders):
    engine = LocalEngine(folders["llama"], make_capture=stand_in)
    for slot in range(3):
        engine.add(slot, PROMPTS[slot], max_tokens=20)
    for _ in range(4):
        engine.step()
    step = engine.scheduler.schedule()
    graphs, found = engine.runner.memory.graphs, []
    with torch.inference_mode():
        runner = engine.runner
        inputs = step_inputs(step, engine.batch, engine.batch.block_size, runner._all_to_device)
        for size in (3, 4, 8, 12):
            for shape in (*decodes(size), StepShape(size + 2, size, False)):
                graphs.capture([shape], stand_in(None), lambda: None)
                found.append(graphs.run(shape, *inputs, runner._latest).clone())
    assert np.array_equal(
        found[0].numpy(), engine.runner.memory.model(*inputs[:2], engine.runner.memory.kv_caches, inputs[2])
    )
    assert all(torch.equal(hidden, found[0]) for hidden in found)


def test_profile_estimates_the_memory_of_graphs_from_two_of_each_kind_and_runs_the_largest_draw(folders, monkeypatch):
    engine = LocalEngine(folders["qwen3"], make_capture=stand_in)
    free = iter((1000, 900, 900, 770))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(model_memory, "free_cuda_memory", lambda _: next(free))
    drawn = Mock(wraps=ops.sample)
    monkeypatch.setattr(ops, "sample", drawn)
    assert len(step_shapes(engine.runner._config)) == 5 + 3
    assert engine.runner._profile() == 100 + 6 * 15
    ((logits, params), _) = drawn.call_args
    assert logits.shape == (len(engine.batch.sampling), CONFIGS["qwen3"].vocab_size), "all rows draw at once"
    assert params.filters == ops.SAMPLING_FILTERS, "with every filter"


def test_profile_runs_as_many_tokens_as_a_step_can_have(folders, monkeypatch):
    engine = LocalEngine(folders["qwen3"], max_model_len=64, max_num_batched_tokens=150, max_num_seqs=8)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(model_memory, "free_cuda_memory", lambda _: 0)
    forward = Mock(wraps=engine.runner._forward)
    monkeypatch.setattr(engine.runner, "_forward", forward)
    engine.runner._profile()
    assert [len(call.args[0]) for call in forward.call_args_list] == [150, 3, 16, 50]
