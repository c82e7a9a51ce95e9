"""Captured steps equal launched steps, and graphs take no more memory than was kept for them."""

import pytest
import torch
from support.gpu_device import DEVICE, ON_DEVICE
from support.local_engine import LocalEngine

from vllm_mp.core.torch_threads import one_thread
from vllm_mp.core.worker import model_runner
from vllm_mp.core.worker.cuda_graphs import StepGraphs, cuda_capture, step_shapes
from vllm_mp.core.worker.memory.model_memory import ModelMemory
from vllm_mp.core.worker.memory.plan import free_cuda_memory
from vllm_mp.kernels.cpu.library import library
from vllm_mp.kernels.triton import available as triton
from vllm_mp.testing.engines import running_engine
from vllm_mp.testing.greedy_parity import assert_engine_is_greedy
from vllm_mp.testing.random_models import CONFIGS, NATIVE, WHOLE_PROMPTS, random_prompts, save_random_model

pytestmark = [
    *ON_DEVICE,
    pytest.mark.skipif(
        DEVICE == "cuda" and torch.cuda.is_available() and triton.operations("cuda") is None,
        reason="Triton, whose kernels can be captured, is not installed",
    ),
    pytest.mark.skipif(
        DEVICE == "cpu" and library() is None,
        reason="torch's attention, which is used without the C++ kernels, reads lengths on the host",
    ),
]

PROMPTS = random_prompts((9, 3, 30, 1, 12, 5, 26, 2, 17, 8, 4, 11, 6, 21))


def make_capture(device):
    """Capture into graphs; on a CPU, where the tests only prove themselves, into calls."""
    if DEVICE == "cuda":
        return cuda_capture(device)

    def capture(compute):
        compute()
        return compute

    return capture


def running(folder, **options):
    return LocalEngine(folder, device=DEVICE, load_format="auto", **options)


@pytest.fixture(scope="module", autouse=True)
def _no_tf32():
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        torch.set_float32_matmul_precision("highest")
        yield


@pytest.fixture(scope="module", params=NATIVE)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_random_model(CONFIGS[request.param], folder)
    return folder


@pytest.mark.gpu_alone
@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replays_equal_launches_to_the_bit(folder, dtype, overlaps, monkeypatch):
    rows, counts = [], []
    run = StepGraphs.run

    def watch(graphs, shape, input_ids, *args):
        counts.append(len(input_ids))
        return run(graphs, shape, input_ids, *args)

    def comparing(device):
        capture = make_capture(device)

        def both(compute):
            replay = capture(compute)

            def compare():
                captured = replay().clone()
                own, launched = captured[: counts[-1]], compute()[: counts[-1]]  # what padding gets is arbitrary
                assert torch.equal(own.isnan(), launched.isnan())
                assert torch.equal(own.nan_to_num(), launched.nan_to_num())
                rows.append(len(captured))
                return captured

            return compare

        return both

    monkeypatch.setattr(StepGraphs, "run", watch)
    engine = running(folder, make_capture=comparing, dtype=dtype, async_scheduling=overlaps)
    for slot, prompt in enumerate(PROMPTS):
        engine.add(slot, prompt, max_tokens=4 + 5 * slot % 29)
        for _ in range(slot % 4):
            engine.step()
    engine.run()
    # On a GPU, the host reads which experts of a mixture a step needs, so these models are not captured.
    is_captured = DEVICE == "cpu" or engine.config.model_config.architecture.experts is None
    assert set(rows) == ({1, 2, 4, 8, 12, 16, 32, 40} if is_captured else set())
    if not is_captured:
        torch.cuda.empty_cache()  # which fails where torch's allocator believes that a capture still runs


def test_overlapping_steps_give_the_same_tokens(folder):
    def play(**options):
        engine = running(folder, **options)
        for slot, prompt in enumerate(PROMPTS):
            sampled = {"temperature": 1.0, "top_k": 20} if slot % 2 else {}
            engine.add(slot, prompt, max_tokens=24, **sampled)
        engine.run()
        return engine.tokens

    assert play(make_capture=make_capture, async_scheduling=True) == play(make_capture=make_capture)


def test_launching_a_step_does_not_wait_for_the_step_before(folder):
    """While the device is busy, the host finishes the next launch before the device finishes the last step."""
    if DEVICE == "cpu":
        pytest.skip("a CPU computes within the launch")
    engine = running(folder, make_capture=make_capture, async_scheduling=True)
    if engine.config.model_config.architecture.experts is not None:
        pytest.skip("the host reads which experts of a mixture a step needs, so its launch waits")
    for slot in range(4):
        engine.add(slot, PROMPTS[slot], max_tokens=30, temperature=1.0, seed=slot, top_k=0, num_logprobs=-1)
    while (step := engine.step()).num_decodes < 4:
        pass
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    step = engine.scheduler.schedule()
    computing = engine.runner.launch(step, engine.batch, engine.sampler)
    computing.sample()
    assert not computing._copies._event.query(), "the launch waited for the step before it"
    computing.wait()


def test_answers_with_graphs_agree_with_transformers(tmp_path):
    for name in ("llama", "qwen3"):
        folder = tmp_path / name
        reference = save_random_model(CONFIGS[name], folder)
        with running_engine(
            folder, skip_tokenizer_init=True, device=DEVICE, num_threads=1, async_scheduling=True, **WHOLE_PROMPTS
        ) as engine:
            assert_engine_is_greedy(engine, reference, PROMPTS, 24)


@pytest.mark.gpu_alone
@pytest.mark.parametrize(("enforce_eager", "captures_late"), [(False, False), (False, True), (True, True)])
def test_graphs_fit_the_memory_kept_for_them_and_enforce_eager_makes_none(
    tmp_path, monkeypatch, enforce_eager, captures_late
):
    if DEVICE == "cpu":
        pytest.skip("only a GPU has memory of graphs")
    kept = []
    cache_blocks = model_runner.cache_blocks

    def watch(config, device, token_bytes, graph_bytes):
        kept.append(graph_bytes)
        return cache_blocks(config, device, token_bytes, graph_bytes)

    monkeypatch.setattr(model_runner, "cache_blocks", watch)
    save_random_model(CONFIGS["llama"], tmp_path)
    taken = []
    make = ModelMemory._try_capture

    def measure(memory, *shapes):
        before = free_cuda_memory(memory._device)
        graphs = make(memory, *shapes)
        while memory.late_captures is not None and memory.late_captures.num_left:
            memory.late_captures.capture_next()
        taken.append(before - free_cuda_memory(memory._device))
        return graphs

    monkeypatch.setattr(ModelMemory, "_try_capture", measure)
    options = {"enforce_eager": enforce_eager, "captures_late": captures_late}
    engine = running(tmp_path, **options, max_num_seqs=64, max_num_batched_tokens=256)
    graphs = engine.runner.memory.graphs
    assert (None if graphs is None else graphs.num_graphs) == (
        None if enforce_eager else len(step_shapes(engine.config))
    )
    assert taken[-1] <= kept[0] + 64 * 2**20, "graphs took more memory than was kept, beyond the tolerance"
