"""Configurations of models of texts and images."""

import msgspec
import pytest
from transformers import AutoConfig, SiglipVisionConfig

from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.model_config.images import read_image_config
from vllm_mp.testing.random_models import CONFIGS

NAMES = {
    "idefics3": "Idefics3ForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
}


def fields(family, text="llama", **changes):
    vision = {"image_size": 32, "patch_size": 8}
    return {
        "architectures": [NAMES[family]],
        "model_type": family,
        "text_config": CONFIGS[text].to_dict(),
        "vision_config": vision,
    } | changes


@pytest.mark.parametrize("text", ["llama", "llama-tied", "mistral-windowed", "qwen2", "qwen3"])
@pytest.mark.parametrize("family", NAMES)
def test_text_part_is_read_as_a_model_of_its_own(family, text):
    own = CONFIGS[text].to_dict() | {"architectures": None}
    read = read_architecture(fields(family, text))
    is_tied = CONFIGS[text].tie_word_embeddings and family == "llava"
    assert read == msgspec.structs.replace(read_architecture(own), name=NAMES[family], tie_word_embeddings=is_tied)
    assert read_architecture(fields(family, text, tie_word_embeddings=True)).tie_word_embeddings


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_text_part_may_leave_out_the_sizes_of_its_class(kind):
    own = AutoConfig.for_model(kind)
    read = read_architecture(fields("llava") | {"text_config": {"model_type": kind}})
    assert (read.vocab_size, read.hidden_size, read.intermediate_size) == (
        own.vocab_size,
        own.hidden_size,
        own.intermediate_size,
    )
    assert (read.num_layers, read.num_heads, read.num_kv_heads) == (
        own.num_hidden_layers,
        own.num_attention_heads,
        own.num_key_value_heads,
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]}, "rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 1], "rope_theta": 500.0}},
    ],
    ids=["older files", "newer files"],
)
@pytest.mark.parametrize("is_flat", [True, False])
def test_rotary_sections_of_qwen_are_read_wherever_files_have_them(is_flat, rope):
    text = CONFIGS["qwen2"].to_dict() | {"rope_parameters": None, "head_dim": 8} | rope
    names = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    read = read_architecture(text | names if is_flat else names | {"text_config": text})
    assert (read.rope.type, read.rope.theta, read.rope.sections) == ("default", 500.0, (1, 2, 1))
    assert read.has_rope_positions
    with pytest.raises(ValueError, match=r"'mrope_section' is \[4, 2, 1\]; it must be 3 numbers .* head_dim: 4"):
        read_architecture(
            names | {"text_config": text | {"rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 1]}}}
        )


def test_size_of_an_image_follows_from_its_patches():
    assert read_image_config(fields("idefics3")).tile_tokens == 4
    assert read_image_config(fields("smolvlm", scale_factor=1)).tile_tokens == 16
    assert read_image_config(fields("llava")).tile_tokens == 16
    assert read_image_config(fields("llava", vision_feature_select_strategy="full")).tile_tokens == 17
    assert read_image_config({"model_type": "llava"}).tile_tokens == 576
    assert read_image_config({"model_type": "llava", "image_token_index": 7}).token_id == 7
    assert read_image_config(CONFIGS["llama"].to_dict()) is None


GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": CONFIGS["gemma3"].to_dict(),
    "vision_config": {"image_size": 896, "patch_size": 14},
}


def test_images_of_gemma_3_are_read_if_there_is_a_vision_tower():
    images = read_image_config(GEMMA3)
    assert (images.tile_tokens, images.token_id, images.placeholder_id, images.end_id) == (256, 262144, 255999, 256000)
    assert images.attends_both_ways
    assert read_image_config(GEMMA3 | {"mm_tokens_per_image": 4096, "boi_token_index": 7}).placeholder_id == 7
    assert read_image_config({**GEMMA3, "vision_config": None}) is None
    assert read_image_config(GEMMA3 | {"vision_config": SiglipVisionConfig().to_dict()}) is None


@pytest.mark.parametrize("num_tokens", [255, 900])
def test_embeddings_of_gemma_3_that_patches_cannot_be_pooled_to_are_named(num_tokens):
    with pytest.raises(ValueError, match=rf"'mm_tokens_per_image' is {num_tokens}; .*the 64 patches"):
        read_architecture(GEMMA3 | {"mm_tokens_per_image": num_tokens})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"text_config": {"model_type": "opt"}}, "'text_config.model_type' is 'opt'; supported are llama"),
        ({"text_config": [1]}, "'text_config' is"),
        ({"vision_config": [1]}, "'vision_config' is"),
        ({"vision_config": {"image_size": 8, "patch_size": 16}}, "'patch_size' is 16"),
        ({"scale_factor": 3}, "'scale_factor' is 3; it must divide the 4 patches"),
        ({"image_token_id": "x"}, "'image_token_id' is 'x'"),
    ],
)
def test_contradictions_are_named(changes, error):
    with pytest.raises(ValueError, match=error):
        read_architecture(fields("smolvlm", **changes))
