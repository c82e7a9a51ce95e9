"""A whole engine on Triton's kernels, in the interpreter, answers as one on the torch definitions does."""

import asyncio
import os

import pytest
from harness import answer, greedy, running_engine
from random_models import CONFIGS, random_prompts, save_random_model

from vllm_mp import RequestOutputKind, SamplingParams
from vllm_mp.kernels.cpu.library import TRITON, VARIABLE

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu runs engines on the GPU that is here"
)

PROMPTS = random_prompts((12, 1, 21, 5))
PARAMS = [
    greedy(8, ignore_eos=True),
    SamplingParams(
        temperature=0.9, top_p=0.9, seed=1, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    ),
    greedy(8, ignore_eos=True),
    SamplingParams(
        temperature=0.7, top_k=20, seed=2, max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    ),
]


def answers(folder):
    """The token ids of each answer, with prompts read in chunks."""

    async def run(engine):
        outputs = await asyncio.gather(*map(answer, [engine] * len(PROMPTS), PROMPTS, PARAMS))
        return [output.outputs[0].token_ids for output in outputs]

    options = {"max_model_len": 64, "max_num_batched_tokens": 16, "block_size": 4, "kv_cache_memory_bytes": 2**22}
    with running_engine(folder, skip_tokenizer_init=True, num_threads=1, **options) as engine:
        return asyncio.run(run(engine))


def test_answers_are_those_of_the_torch_definitions(tmp_path, monkeypatch):
    save_random_model(CONFIGS["qwen3-windowed"], tmp_path)
    monkeypatch.setenv(VARIABLE, TRITON)
    got = answers(tmp_path)
    monkeypatch.setenv(VARIABLE, "none")
    assert got == answers(tmp_path)
