"""A real engine with weights and KV cache in 8-bit floats."""

import pytest
from support.float8_reference import in_float8

from vllm_mp.core.torch_threads import one_thread
from vllm_mp.testing.engines import running_engine
from vllm_mp.testing.greedy_parity import assert_engine_is_greedy
from vllm_mp.testing.random_models import CONFIGS, random_prompts, save_random_model, scarce_blocks

pytestmark = pytest.mark.usefixtures("forked_cores")

NEAR_TIE = 0.2
"""How far logits may differ: the last bit of a float32 decides how a value between two 8-bit floats is rounded."""


def test_fp8_answers_equal_those_of_transformers_with_the_same_rounding(tmp_path):
    config = CONFIGS["llama"]
    with one_thread():
        reference = in_float8(save_random_model(config, tmp_path))
        options = {**scarce_blocks(config, dtype_bytes=1), "quantization": "fp8", "kv_cache_dtype": "fp8"}
        with running_engine(tmp_path, skip_tokenizer_init=True, device="cpu", num_threads=1, **options) as engine:
            # An element of the cache takes 1 byte in place of 4, so the same memory holds four times as many blocks.
            assert engine.vllm_config.cache_config.num_blocks == 45
            assert_engine_is_greedy(engine, reference, random_prompts((40, 5, 33, 1)), 12, NEAR_TIE)
