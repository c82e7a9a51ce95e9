"""Models that run on the transformers backend, shared among ranks by the library's own plan."""

import pytest
from support.local_engine import LocalEngine
from support.rank_threads import local_group
from transformers import (
    CohereConfig,
    GlmConfig,
    GPTNeoXConfig,
    OlmoConfig,
    StableLmConfig,
    Starcoder2Config,
)

from vllm_mp.testing.random_models import SIZES, TOKENS, random_prompts, save_random_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

HEADS = {**SIZES, "num_attention_heads": 4}
SERVED = {
    "olmo": OlmoConfig(**HEADS, **TOKENS),
    "starcoder2": Starcoder2Config(**HEADS, **TOKENS, sliding_window=9),
    "gpt-neox": GPTNeoXConfig(**HEADS, **TOKENS, rotary_pct=0.5),
}
REFUSED = {
    "no plan": (StableLmConfig(**HEADS, **TOKENS), "transformers has no plan to split it"),
    "other plan": (GlmConfig(**HEADS, **TOKENS), "plan splits layers by colwise_gather_output, rowwise_split_input"),
    "heads": (CohereConfig(**SIZES, **TOKENS), "its 6 heads, 2 of keys and values, cannot be shared out"),
}
PROMPTS = random_prompts((30, 5, 12))


def tokens(engine):
    for slot, prompt in enumerate(PROMPTS):
        engine.add(slot, prompt, 10)
    engine.run()
    return engine.tokens


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SERVED)
def test_ranks_answer_like_one_process(name, size, tmp_path):
    save_random_model(SERVED[name], tmp_path)
    options = {"max_num_batched_tokens": 16}
    whole = LocalEngine(tmp_path, **options)
    expected = tokens(whole)
    with local_group(tmp_path, size, **options) as group:
        assert tokens(group.engine) == expected
        assert group.engine.runner.memory.num_parameters == whole.runner.memory.num_parameters
        assert group.engine.runner.memory.token_bytes() < whole.runner.memory.token_bytes()


@pytest.mark.parametrize(("config", "cause"), REFUSED.values(), ids=REFUSED)
def test_model_that_cannot_be_split_is_refused_by_name(config, cause, tmp_path):
    save_random_model(config, tmp_path)
    refusal = rf"tensor_parallel_size=4: \w+ForCausalLM cannot .*{cause}"
    with pytest.raises(ValueError, match=f"^{refusal}"), local_group(tmp_path, 4):
        pass
