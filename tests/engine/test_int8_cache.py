"""A real engine with a KV cache in 8 bits."""

import pytest
import torch
from support.int8_cache_reference import with_int8_cache

from vllm_mp.core.torch_threads import one_thread
from vllm_mp.kernels import int8_cache
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.engines import running_engine
from vllm_mp.testing.greedy_parity import assert_engine_is_greedy
from vllm_mp.testing.random_models import CONFIGS, few_blocks, random_prompts, save_random_model

pytestmark = pytest.mark.usefixtures("forked_cores")

NEAR_TIE = 0.02
"""How far logits may differ: the last bit of a float32 decides to which of two integers an element is rounded."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("llama", {}, marks=pytest.mark.essential),
        ("gpt2", {}),
        ("mistral-windowed", {}),
        pytest.param("llama", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["llama", "gpt2", "window", "two-ranks"],
)
def test_answers_equal_those_of_transformers_with_the_same_rounding(tmp_path, name, options):
    config = CONFIGS[name]
    with one_thread():
        reference = with_int8_cache(save_random_model(config, tmp_path))
        shapes = int8_cache.stored_shapes(read_architecture(config.to_dict()).kv_shapes, torch.int8)
        token_bytes = sum(heads * dim for layer in shapes for heads, dim in layer)
        options = {**few_blocks(token_bytes), "kv_cache_dtype": "int8", **options}
        with running_engine(tmp_path, skip_tokenizer_init=True, device="cpu", num_threads=1, **options) as engine:
            if "tensor_parallel_size" not in options:
                assert engine.vllm_config.cache_config.num_blocks == 45, "a cell has the integers and a scale"
            assert_engine_is_greedy(engine, reference, random_prompts((40, 5, 33, 1)), 12, NEAR_TIE)


def test_cache_has_almost_four_times_the_blocks_of_a_cache_in_float32(small_model):
    num_blocks = []
    for cache_dtype in ("auto", "int8"):
        options = {"kv_cache_dtype": cache_dtype, "kv_cache_memory_bytes": 2**24, "max_num_seqs": 256}
        with running_engine(small_model, **options) as engine:
            num_blocks.append(engine.vllm_config.cache_config.num_blocks)
            head_dim = engine.model_config.architecture.head_dim
    # A head of a token has as many bytes as elements, and 4 bytes for its scale.
    assert num_blocks[1] == pytest.approx(num_blocks[0] * 4 * head_dim / (head_dim + 4), abs=4)
