"""Models whose weights are in block types compute what the same weights in float32 compute."""

import msgspec
import pytest
import torch
from support.paged_batch import PagedBatch
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from vllm_mp.core.lora.targets import projections
from vllm_mp.core.models import build_model
from vllm_mp.core.models.loader import load_weights
from vllm_mp.core.weights.block_matrix import BlockMatrix, count_block_weights
from vllm_mp.core.weights.checkpoint import count_parameters
from vllm_mp.core.weights.dummy import fill_with_dummy_weights
from vllm_mp.kernels import ops
from vllm_mp.kernels.cpu.library import library
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.random_models import random_prompts, save_random_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "gemma2": Gemma2Config(**SIZES, head_dim=16),
    "phi3": Phi3Config(**SIZES, pad_token_id=0),
    # A token whose rows are rounded may choose another expert, unless it chooses all.
    "qwen2-moe": Qwen2MoeConfig(
        **SIZES, num_experts=3, num_experts_per_tok=3, moe_intermediate_size=96, shared_expert_intermediate_size=32
    ),
    "gpt2": GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=128),
}
PROMPTS = random_prompts((9, 3, 30))


def in_blocks(arch):
    return msgspec.structs.replace(arch, blocks="int4")


def load_adapter(model, arch):
    """Load a random adapter into the slot that `logits` uses."""
    generator = torch.Generator().manual_seed(0)
    for projection, stack in zip(projections(arch), model.make_adapter_stacks(1, 4), strict=True):
        a = torch.randn(4, projection.inputs, generator=generator) / 8
        parts = [torch.randn(size, 4, generator=generator) / 8 for size in projection.outputs]
        stack.load(0, [ops.Factors(a, b) for b in parts])


def logits(model, arch, has_adapter=False):
    batch = PagedBatch([(len(prompt), len(prompt)) for prompt in PROMPTS], arch.num_heads, arch.num_kv_heads, 16, 8)
    caches = [(torch.zeros_like(batch.k_cache), torch.zeros_like(batch.v_cache)) for _ in range(arch.num_layers)]
    positions = torch.cat([torch.arange(len(prompt)) for prompt in PROMPTS])
    ids = torch.tensor([token for prompt in PROMPTS for token in prompt])
    slots = torch.zeros(len(ids), dtype=torch.int32) if has_adapter else None
    with torch.inference_mode():
        return model.compute_logits(model(ids, positions, caches, batch.metadata._replace(adapter_slots=slots)))


@pytest.mark.parametrize("is_compiled", [True, False], ids=["cpu", "torch"])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_4_bits_made_at_load_compute_what_they_stand_for(name, is_compiled, tmp_path, monkeypatch):
    if is_compiled and library() is None:
        pytest.skip("the kernels are not built")
    if not is_compiled:
        monkeypatch.setattr(ops, "library", lambda: None)
    arch = read_architecture(save_random_model(CONFIGS[name], tmp_path).config.to_dict())
    plain, blocks = build_model(arch, torch.float32, "cpu"), build_model(in_blocks(arch), torch.float32, "cpu")
    for model in (plain, blocks):
        load_weights(model, tmp_path, "auto", 0)
    assert count_parameters(plain) == count_parameters(blocks) + count_block_weights(blocks)
    originals = logits(plain, arch)
    # Give the plain model the weights that the blocks stand for.
    modules = dict(plain.named_modules())
    for path, matrix in blocks.named_modules():
        if isinstance(matrix, BlockMatrix):
            restored = torch.cat([part.dequantized() for part in matrix.parts])
            owner, _, attribute = path.rpartition(".")
            if attribute.isdigit():  # the number of an expert
                owner, _, stacked = owner.rpartition(".")
                place = getattr(modules[owner], stacked)[int(attribute)]
            else:
                place = getattr(modules[owner], "weight" if attribute == "blocks" else attribute)
            assert 0 < (place - restored).norm() < 0.1 * place.norm()
            with torch.no_grad():
                place.copy_(restored)
    expected = logits(plain, arch)
    blocks.pack(None, torch.float32)
    assert {
        path for path, matrix in blocks.named_modules() if isinstance(matrix, BlockMatrix) and matrix.is_loaded
    } <= {
        "embed_tokens",
        "wte",
    }
    got = logits(blocks, arch)
    error = (got - expected).norm() / expected.norm()
    assert error < (0.05 if is_compiled else 1e-5)  # the kernels round rows to 8 bits
    assert (got - originals).norm() > error * originals.norm()
    for model in (plain, blocks):
        load_adapter(model, arch)
    adapted, expected_adapted = (logits(model, arch, has_adapter=True) for model in (blocks, plain))
    assert (expected_adapted - expected).norm() > 0.1 * expected.norm()
    assert (adapted - expected_adapted).norm() < (0.05 if is_compiled else 1e-5) * expected_adapted.norm()


def test_encoder_has_weights_of_4_bits_too(tmp_path):
    config = BertConfig(**{key: size for key, size in SIZES.items() if key != "num_key_value_heads"})
    BertModel(config).save_pretrained(tmp_path)
    arch = in_blocks(read_architecture({**config.to_dict(), "architectures": ["BertModel"]}))
    model = build_model(arch, torch.float32, "cpu")
    load_weights(model, tmp_path, "auto", 0)
    assert count_block_weights(model) == 2 * (4 * 64 * 64 + 2 * 64 * 256)


def test_dummy_weights_fill_blocks():
    arch = in_blocks(read_architecture({**CONFIGS["llama"].to_dict(), "architectures": ["LlamaForCausalLM"]}))
    model = build_model(arch, torch.float32, "cpu")
    fill_with_dummy_weights(model, 0)
    matrices = [module for module in model.modules() if isinstance(module, BlockMatrix)]
    for part in (part for matrix in matrices for part in matrix.parts):
        assert part.dequantized().std().item() == pytest.approx(0.02, rel=0.2)


def test_embeddings_and_head_keep_more_bits_than_projections():
    arch = in_blocks(read_architecture({**CONFIGS["llama"].to_dict(), "architectures": ["LlamaForCausalLM"]}))
    model = build_model(arch, torch.float32, "cpu")
    fill_with_dummy_weights(model, 0)
    assert model.lm_head.weight is model.embed_tokens
    assert [part.type.name for part in model.embed_tokens.parts] == ["Q8_0"]
    mlp = model.decoder.layers[0].mlp
    assert [part.type.name for part in mlp.gate_up_proj.blocks.parts] == ["Q4_1", "Q4_1"]
    assert [part.type.name for part in mlp.down_proj.blocks.parts] == ["Q4_K"]


def test_size_that_blocks_cannot_hold_is_refused_by_number():
    config = LlamaConfig(**{**SIZES, "hidden_size": 48, "head_dim": 12})
    arch = in_blocks(read_architecture({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ValueError, match="a multiple of 32 inputs, not 48"):
        build_model(arch, torch.float32, "cpu")
