"""One model on several devices gives the answers of one device, also after a rank has died."""

import asyncio
import os
import signal

import pytest
import torch
from support.gpu_device import DEVICE, ON_DEVICE
from transformers import LlamaConfig

from vllm_mp import AsyncLLM
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.testing.engines import running_engine
from vllm_mp.testing.greedy_parity import GreedyReference, assert_engine_is_greedy, assert_greedy, generate_all
from vllm_mp.testing.random_models import PROMPT_LENGTHS, random_prompts, save_random_model

NUM_DEVICES = torch.cuda.device_count() if DEVICE == "cuda" else 2

pytestmark = [
    *ON_DEVICE,
    pytest.mark.skipif(NUM_DEVICES < 2, reason="this machine has fewer than two CUDA devices"),
]

NUM_RANKS = 2 ** (min(NUM_DEVICES, 8).bit_length() - 1)
"""As many as there are devices, and as divide the heads."""
NUM_TOKENS = 24
PROMPTS = random_prompts(PROMPT_LENGTHS)
CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=NUM_DEVICES,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """The folder of a model, and the same model of transformers."""
    folder = tmp_path_factory.mktemp("shared-model")
    with pytest.MonkeyPatch.context() as patch, one_thread():
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        yield folder, save_random_model(CONFIG, folder)


def running(folder, **options):
    return running_engine(
        folder, skip_tokenizer_init=True, device=DEVICE, num_threads=1, max_model_len=128, max_num_seqs=16, **options
    )


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": NUM_RANKS},
        {"pipeline_parallel_size": NUM_DEVICES},
        {"data_parallel_size": NUM_DEVICES},
    ],
    ids=lambda options: next(iter(options)),
)
def test_answers_are_greedy_on_all_devices(random_model, options):
    folder, model = random_model
    with running(folder, **options) as engine:
        assert_engine_is_greedy(engine, model, PROMPTS, NUM_TOKENS)


def test_answers_stay_greedy_after_a_rank_has_died(random_model):
    folder, model = random_model

    async def ranks(engine: AsyncLLM) -> list[int]:
        return (await engine.core_status())["rank_pids"]

    with running(folder, tensor_parallel_size=NUM_RANKS) as engine:
        before = asyncio.run(ranks(engine))
        assert len(before) == NUM_RANKS
        os.kill(before[-1], signal.SIGKILL)
        for output in generate_all(engine, PROMPTS, NUM_TOKENS):
            assert_greedy(GreedyReference(model), output)
        assert not set(before) & set(asyncio.run(ranks(engine)))
