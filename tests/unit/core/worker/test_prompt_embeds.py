"""Models of transformers compute the same from their own embeddings as from token ids, or are refused."""

import pytest
import torch
from support.local_engine import LocalEngine
from transformers import PhiConfig

from vllm_mp.core.models.transformers import probe as transformers_probe
from vllm_mp.testing.random_models import SIZES, random_prompts, save_random_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")


PHI = PhiConfig(
    **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    num_attention_heads=6,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=0,
)
PROMPTS = random_prompts((9, 30, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phi")
    save_random_model(PHI, folder)
    return folder


def test_embeddings_give_the_tokens_of_their_ids(folder):
    def play(with_embeds):
        engine = LocalEngine(folder, max_num_batched_tokens=16, enable_prompt_embeds=True)
        table = engine.runner.memory.model.embed_input_ids(torch.arange(SIZES["vocab_size"])).clone()
        for slot, prompt in enumerate(PROMPTS):
            engine.add(slot, prompt, max_tokens=6, embeds=table[prompt] if with_embeds and slot != 1 else None)
        engine.run()
        return engine.tokens

    assert play(with_embeds=True) == play(with_embeds=False)


def test_model_that_computes_something_else_from_embeddings_is_refused_if_it_would_get_any(folder, monkeypatch):
    table = transformers_probe.embed_input_ids
    monkeypatch.setattr(transformers_probe, "embed_input_ids", lambda *inputs: 2 * table(*inputs))
    with pytest.raises(ValueError, match=r"something else from embeddings.*leave enable_prompt_embeds out"):
        LocalEngine(folder, enable_prompt_embeds=True)
    LocalEngine(folder)
