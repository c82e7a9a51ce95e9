"""AWQ and GPTQ checkpoints: matrices are read as the formats define them, and damaged ones are refused by name."""

import itertools
import json

import pytest
import torch
from support.quantized_checkpoints import INPUTS, OUTPUTS, quantized, save_in_four_bits
from transformers import LlamaConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from vllm_mp.core.models import build_model
from vllm_mp.core.models.loader import load_weights
from vllm_mp.core.weights.block_matrix import BlockMatrix
from vllm_mp.core.weights.four_bit_checkpoint import unpacked
from vllm_mp.kernels.block_weight import BlockWeight
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.model_config.quantization import FourBits
from vllm_mp.testing.random_models import save_random_model


def loaded(folder):
    """Return the model in `folder`."""
    model = build_model(read_architecture(json.loads((folder / "config.json").read_text())), torch.float32, "cpu")
    load_weights(model, folder, "auto", 0)
    return model


def read(tensors, four_bits):
    return dict(unpacked([(f"a.b.{kind}", tensor) for kind, tensor in tensors.items()], four_bits))


LAYOUTS = [
    *(FourBits("awq", size) for size in (32, 64, 128, 0)),
    *(FourBits("gptq", size, False, offset) for size, offset in itertools.product((32, 128, 0), (0, 1))),
]


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("four_bits", LAYOUTS, ids=str)
def test_matrix_is_what_the_integers_stand_for(four_bits, is_symmetric):
    tensors, stands_for = quantized(four_bits, is_symmetric)
    weight = read(tensors, four_bits)["a.b.weight"]
    assert weight.type.name == ("Q4_0" if is_symmetric else "Q4_1")
    error = (weight.dequantized() - stands_for).abs()
    # A minimum is rounded to 11 bits; its magnitude is at most 16 scales.
    assert error.max() <= (0 if is_symmetric else 16 * float(tensors["scales"].max()) / 2**11)
    assert error.norm() <= 1e-3 * stands_for.norm()


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_groups_of_any_inputs_are_kept_within_8_bits(is_symmetric):
    four_bits = FourBits("gptq", 64, True, 1)
    tensors, stands_for = quantized(four_bits, is_symmetric)
    weight = read(tensors, four_bits)["a.b.weight"]
    assert weight.type.name == "Q8_0"
    assert (weight.dequantized() - stands_for).norm() < 0.006 * stands_for.norm()
    in_order, _ = quantized(FourBits("gptq", 64, False, 1), is_symmetric)
    assert read(in_order, four_bits)["a.b.weight"].type.name.startswith("Q4")


def test_other_tensors_and_the_order_of_files_do_not_matter():
    four_bits = FourBits("gptq", 32, False, 1)
    tensors, _ = quantized(four_bits)
    bias = torch.randn(OUTPUTS)
    found = read({"scales": tensors["scales"], "bias": bias, **dict(reversed(tensors.items()))}, four_bits)
    assert found.keys() == {"a.b.bias", "a.b.weight"}
    assert found["a.b.bias"] is bias
    assert isinstance(found["a.b.weight"], BlockWeight)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"qzeros": None}, r"missing a\.b\.qzeros"),
        ({"qweight": torch.zeros(INPUTS // 8, OUTPUTS)}, r"a\.b\.qweight has dtype torch\.float32, not torch\.int32"),
        ({"qweight": torch.zeros(48, dtype=torch.int32)}, r"a\.b\.qweight has shape \[48\], not two dimensions"),
        ({"qweight": torch.zeros(5, OUTPUTS, dtype=torch.int32)}, r"a\.b\.qweight has 40 inputs.* groups of 32"),
        ({"qzeros": torch.zeros(8, 4, dtype=torch.int32)}, r"a\.b\.qzeros has shape \[8, 4\], not \[8, 3\]"),
        ({"scales": torch.zeros(4, OUTPUTS).half()}, r"a\.b\.scales has shape \[4, 24\], not \[8, 24\]"),
        ({"scales": torch.full((8, OUTPUTS), torch.inf).half()}, r"a\.b\.scales has values that are not finite"),
        ({"g_idx": torch.full((INPUTS,), 8, dtype=torch.int32)}, r"a\.b\.g_idx names a group outside of the 8"),
        ({"g_idx": torch.zeros(9, dtype=torch.int32)}, r"a\.b\.g_idx has shape \[9\], not \[256\]"),
    ],
    ids=str,
)
def test_damaged_matrix_is_refused_by_the_name_of_its_tensor(changed, message):
    four_bits = FourBits("gptq", 32, True, 1)
    tensors, _ = quantized(four_bits)
    given = {kind: tensor for kind, tensor in (tensors | changed).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        read(given, four_bits)


SIZES = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
EXPERTS = {"num_key_value_heads": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize(
    "config",
    [
        MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=3),
        Qwen2MoeConfig(**SIZES, **EXPERTS, num_experts=3, num_experts_per_tok=2, shared_expert_intermediate_size=64),
        Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=3, num_experts_per_tok=2, head_dim=32),
    ],
    ids=lambda config: config.model_type,
)
def test_experts_of_a_mixture_are_read_one_by_one(config, method, tmp_path):
    save_random_model(config, tmp_path)
    expected = save_in_four_bits(tmp_path, FourBits(method, 32, zero_offset=int(method == "gptq")))
    model = loaded(tmp_path)
    mixture = model.decoder.layers[0].mlp
    for expert in range(3):
        parts = [*mixture.gate_up[expert].parts, *mixture.down[expert].parts]
        for name, part in zip(("gate", "up", "down"), parts, strict=True):
            wanted = expected[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"]
            assert part.type.name == "Q4_1"
            assert (part.dequantized() - wanted).norm() < 1e-3 * wanted.norm()
    assert isinstance(mixture.router.weight, torch.Tensor)
    model.pack(None, torch.float32)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_model_in_a_folder_is_read_and_leaves_what_is_not_quantized(method, tmp_path):
    save_random_model(LlamaConfig(**SIZES), tmp_path)
    expected = save_in_four_bits(tmp_path, FourBits(method, 32, zero_offset=int(method == "gptq")))
    model = loaded(tmp_path)
    assert torch.equal(model.embed_tokens, expected["model.embed_tokens.weight"].float())
    attention = model.decoder.layers[0].attention
    assert [part.type.name for part in attention.qkv_proj.blocks.parts] == ["Q4_1", "Q4_1", "Q8_0"]
    for path, matrix in model.named_modules():
        if isinstance(matrix, BlockMatrix):
            assert all(part.dequantized().isfinite().all() for part in matrix.parts), path
    wanted = expected["model.layers.0.mlp.down_proj.weight"]
    down = model.decoder.layers[0].mlp.down_proj.blocks.parts[0].dequantized()
    assert (down - wanted).norm() < 1e-3 * wanted.norm()
