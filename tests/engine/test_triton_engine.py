"""An engine on Triton kernels, run by the interpreter, gives the answers of an engine on the torch definitions."""

import asyncio
import copy
import os

import pytest
import torch
from support.float8_reference import in_float8
from support.local_engine import LocalEngine

from vllm_mp import RequestOutputKind, SamplingParams
from vllm_mp.core.worker import model_runner
from vllm_mp.core.worker.cuda_graphs import StepGraphs
from vllm_mp.core.worker.sampling import sampler
from vllm_mp.core.worker.sampling.host_copies import pack, unpack
from vllm_mp.kernels.cpu.library import TRITON, library
from vllm_mp.kernels.triton import available
from vllm_mp.machine.cpu_info import KERNELS_VARIABLE
from vllm_mp.testing.engines import answer, greedy, running_engine
from vllm_mp.testing.greedy_parity import NEAR_TIE, GreedyReference, assert_engine_is_greedy
from vllm_mp.testing.random_models import CONFIGS, random_prompts, save_random_model

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="this machine has a GPU, on which tests/gpu runs engines"
)

from support.triton_interpreter import prepare_once_for_each_launch  # noqa: E402

prepare_once_for_each_launch()  # in this process; cores do not need the tests' folder

BAD = 13
PROMPTS = random_prompts((12, 1, 21, 5))
PARAMS = [
    greedy(4, ignore_eos=True),
    SamplingParams(
        temperature=0.9, top_p=0.9, seed=1, max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    ),
    greedy(4, ignore_eos=True),
    SamplingParams(
        temperature=0.7, top_k=20, seed=2, max_tokens=4, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    ),
]


def shallow(name, num_layers):
    """Return the configuration `name` with the first layers only: the interpreter takes longest for layers."""
    config = copy.deepcopy(CONFIGS[name])
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    return config


def answers(folder):
    """Return the token ids of each answer of an engine that reads prompts in chunks."""

    async def run(engine):
        outputs = await asyncio.gather(*map(answer, [engine] * len(PROMPTS), PROMPTS, PARAMS))
        return [output.outputs[0].token_ids for output in outputs]

    options = {"max_model_len": 64, "max_num_batched_tokens": 16, "block_size": 4, "kv_cache_memory_bytes": 2**22}
    with running_engine(folder, skip_tokenizer_init=True, num_threads=1, **options) as engine:
        return asyncio.run(run(engine))


def test_answers_equal_those_of_the_torch_definitions(tmp_path, monkeypatch):
    save_random_model(shallow("qwen3-windowed", 2), tmp_path)  # a layer with a window, and one without
    monkeypatch.setenv(KERNELS_VARIABLE, TRITON)
    got = answers(tmp_path)
    monkeypatch.setenv(KERNELS_VARIABLE, "none")
    assert got == answers(tmp_path)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_answers_in_16_bits_agree_with_transformers(quantization, tmp_path, monkeypatch):
    """Decodes multiply few rows, prompts more; 8-bit weights are rounded in the reference too."""
    model = save_random_model(shallow("llama", 1), tmp_path).to(torch.float16).float()
    if quantization:
        model = in_float8(model, cache=False)
    monkeypatch.setenv(KERNELS_VARIABLE, TRITON)
    options = {"max_model_len": 64, "block_size": 4, "kv_cache_memory_bytes": 2**22, "dtype": "float16"}
    with running_engine(
        tmp_path, skip_tokenizer_init=True, num_threads=1, quantization=quantization, **options
    ) as engine:
        assert_engine_is_greedy(engine, model, random_prompts((18, 1)), 2, 0.5 if quantization else 0.1)


@pytest.fixture(params=[TRITON, "none"], ids=["triton", "torch"])
def kernels(request, monkeypatch):
    """The kernels that this process uses: Triton kernels or the torch definitions."""
    monkeypatch.setenv(KERNELS_VARIABLE, request.param)
    for choice in (available.operations, library):
        choice.cache_clear()
    yield request.param
    for choice in (available.operations, library):
        choice.cache_clear()


@pytest.mark.essential
def test_tokens_of_chunks_are_those_of_transformers(tmp_path, kernels):
    """The steps of a core, in this process."""
    reference = GreedyReference(save_random_model(shallow("llama", 1), tmp_path))
    engine = LocalEngine(tmp_path, load_format="auto", max_num_batched_tokens=12)
    prompts = random_prompts((14, 1))
    for slot, prompt in enumerate(prompts):
        engine.add(slot, prompt, max_tokens=3)
    engine.run()
    for slot, prompt in enumerate(prompts):
        assert len(engine.tokens[slot]) == 3
        assert reference.behind(prompt, engine.tokens[slot]).max() <= NEAR_TIE


def test_token_with_nan_embedding_does_not_spoil_blocks_before_it(tmp_path, kernels):
    """The prefix cache shares these blocks. Triton's attention isolates NaN by itself, so no step is computed twice."""
    config = CONFIGS["mistral-windowed"]
    model = save_random_model(config, tmp_path)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = torch.nan
    model.save_pretrained(tmp_path)

    def play(prompts):
        engine = LocalEngine(tmp_path, load_format="auto")
        called = []
        engine.runner.memory.model.register_forward_pre_hook(lambda *_: called.append(1))
        for slot, prompt in enumerate(prompts):
            engine.add(slot, prompt, max_tokens=1)
            engine.run()
        return engine.tokens, len(called)

    good = [token if token != BAD else BAD + 1 for token in PROMPTS[3]]  # in one tile with the bad token
    expected, num_steps = play([good])
    found, num_with_bad = play([[*good, BAD, 5], good])
    assert found[1] == expected[0]
    assert found[0] == []
    assert num_with_bad == num_steps + (1 if kernels == TRITON else 2)


def test_overlapping_steps_as_graphs_give_the_answers_of_steps_in_turn(tmp_path, monkeypatch, kernels):
    """Their inputs reach the device in one copy, and awaited tokens are filled in there."""
    save_random_model(shallow("llama", 1), tmp_path)

    def play(**options):
        engine = LocalEngine(tmp_path, max_num_batched_tokens=16, max_num_seqs=4, **options)
        for slot, (prompt, params) in enumerate(zip(PROMPTS, ({}, {"temperature": 0.8, "top_k": 9}) * 2, strict=True)):
            engine.add(slot, prompt, max_tokens=4, **params)
        engine.run()
        return engine.tokens

    expected = play()
    packed = []

    def together(arrays, device):
        packed.append(len(arrays))
        return unpack(pack(arrays), arrays)

    for module in (model_runner, sampler):
        monkeypatch.setattr(module, "all_to_device", together)
    graphs = {"make_capture": lambda device: lambda compute: compute} if kernels == TRITON else {}
    run, shapes = StepGraphs.run, set()

    def watch(graphs, shape, *args):
        shapes.add(shape.only_decodes)
        return run(graphs, shape, *args)

    monkeypatch.setattr(StepGraphs, "run", watch)
    assert play(async_scheduling=True, **graphs) == expected
    assert packed
    assert shapes == ({True, False} if graphs else set())
