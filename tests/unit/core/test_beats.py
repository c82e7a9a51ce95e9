"""A step beats at every layer, so that a long step can be told from one that hangs."""

import numpy as np
import pytest
import torch
from support.local_engine import dummy_args
from transformers import BertConfig, GPTNeoXConfig, OlmoeConfig

from vllm_mp import PoolingParams, SamplingParams
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.core.worker.model_runner import ModelRunner
from vllm_mp.core.worker.sampling.sampler import Sampler
from vllm_mp.kernels.cpu import decoder
from vllm_mp.testing.random_models import CONFIGS, SIZES

COUNT, BLOCK = 20, 4
MODELS = {
    "llama": CONFIGS["llama"],
    "qwen2-moe": CONFIGS["qwen2-moe"],
    "gpt2": CONFIGS["gpt2"],
    "encoder": BertConfig(**SIZES, architectures=["BertModel"]),
    "transformers": GPTNeoXConfig(**SIZES, architectures=["GPTNeoXForCausalLM"]),
    "transformers-experts": OlmoeConfig(**SIZES, num_experts=8, architectures=["OlmoeForCausalLM"]),
}
ARCHITECTURES = {
    "llama": ["LlamaForCausalLM"],
    "qwen2-moe": ["Qwen2MoeForCausalLM"],
    "gpt2": ["GPT2LMHeadModel"],
}


@pytest.mark.parametrize("name", MODELS)
def test_step_beats_at_every_layer(name, tmp_path, monkeypatch):
    monkeypatch.setattr(decoder, "WORK_A_CALL", 0)  # short steps of tiny models are one call
    config = MODELS[name]
    config.architectures = config.architectures or ARCHITECTURES[name]
    engine_config = dummy_args(config, tmp_path, BLOCK).create_engine_config()
    beats = []
    with one_thread():
        runner = ModelRunner(engine_config, torch.device("cpu"), torch.float32, beat=lambda: beats.append(1))
        beats.clear()
        batch = Batch(1, 64, BLOCK, [])
        pooling = PoolingParams(pooling_type="mean", normalize=False) if name == "encoder" else None
        prompt = np.arange(COUNT, dtype=np.int32)
        request = Request(0, 0, "long", pooling or SamplingParams(seed=1), prompt, COUNT, 60, (0, 0))
        batch.add(request, np.arange(1, 1 + COUNT // BLOCK, dtype=np.int32))
        pools = np.array([pooling is not None])
        runner.launch(
            ScheduledStep(np.array([0]), np.array([COUNT]), 0, ~pools, pools), batch, Sampler(batch, runner._device)
        )
    assert SIZES["num_hidden_layers"] <= len(beats) <= SIZES["num_hidden_layers"] + 1
