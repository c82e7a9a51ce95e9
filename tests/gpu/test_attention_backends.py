"""Every attention backend that can be used here, FlashAttention included if it is installed, alone and in an engine."""

import asyncio

import pytest
import torch
from support.gpu_device import DEVICE, ON_DEVICE
from support.paged_batch import DECODES_RAGGED, MIXED, PREFILLS, PagedBatch
from transformers import LlamaConfig

from vllm_mp.testing.engines import answer, greedy, running_engine
from vllm_mp.testing.random_models import random_prompts, save_config

pytest.importorskip("triton")
from support.triton_sweep import at

from vllm_mp.kernels.attention_backends import Case, choose

pytestmark = ON_DEVICE

BLOCK_SIZE = 256
HEADS = [((2, 128), (2, 128))]


def case(dtype=torch.bfloat16, block_size=BLOCK_SIZE):
    return Case(torch.device(DEVICE), dtype, "auto", block_size, HEADS)


def usable_backends():
    """Return the names of the backends that can be used here."""
    names = []
    for name in ("flash_attn", "triton", "cpu", "torch"):
        try:
            choose(name, case())
        except (ValueError, RuntimeError, AssertionError):
            continue
        names.append(name)
    return names


USABLE = usable_backends()


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("rows", [DECODES_RAGGED, PREFILLS, MIXED, [(1, 700), (300, 300), (20, 520)]], ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (7, None), (20, 3.0)])
def test_each_backend_agrees_with_the_reference(name, rows, window, soft_cap):
    # Cells that no row wrote are NaN.
    batch = PagedBatch(rows, 8, 2, 128, BLOCK_SIZE)
    batch.round_to(torch.bfloat16)
    q, k_cache, v_cache = (x.to(DEVICE, torch.bfloat16) for x in (batch.q, batch.k_cache, batch.v_cache))
    # Entries past a row's blocks name the padding block, as in a core.
    table = batch.metadata.block_table.clamp(max=k_cache.shape[0] - 1)
    (metadata,) = at(DEVICE, batch.metadata._replace(block_table=table))
    got = choose(name, case()).attend(q, k_cache, v_cache, metadata, 0.1, window, soft_cap)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float().cpu(), batch.expected(0.1, window, soft_cap), atol=2e-2, rtol=2e-2)


def test_engine_computes_the_same_with_each_backend(tmp_path):
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    folder = save_config(config, tmp_path)
    prompts = random_prompts((300, 5, 40, 17))
    logprobs = {}

    async def ask(engine):
        """Return the log-probability of each prompt token after the first, in order."""
        outputs = await asyncio.gather(
            *(answer(engine, prompt, greedy(4, prompt_logprobs=0, ignore_eos=True)) for prompt in prompts)
        )
        assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
        entries = [entry for output in outputs for entry in output.prompt_logprobs[1:]]
        tokens = [token for prompt in prompts for token in prompt[1:]]
        return torch.tensor([entry[token].logprob for entry, token in zip(entries, tokens, strict=True)])

    for name in USABLE:
        with running_engine(
            folder,
            device=DEVICE,
            num_threads=1,
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            block_size=BLOCK_SIZE,
            attention_backend=name if name != "cpu" else "auto",
        ) as engine:
            assert engine.vllm_config.attention_config.backend == name
            logprobs[name] = asyncio.run(ask(engine))
    for name in USABLE:
        torch.testing.assert_close(logprobs[name], logprobs["torch" if DEVICE == "cuda" else name], atol=0.05, rtol=0)
