"""The file of a model's image parts gives configuration and image processor, or is refused by field and value."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.image_gguf import F16, write_mmproj
from support.tiny_gguf import rewrite_tensors, write_tiny_gguf
from transformers import PreTrainedModel

from vllm_mp.model_store.gguf_file.mmproj import checkpoint_names, is_mmproj, read_mmproj
from vllm_mp.model_store.gguf_file.reader import read_gguf
from vllm_mp.testing.image_models import make_image_model

TEXT = {"model_type": "llama", "hidden_size": 48, "tie_word_embeddings": False, "dtype": "float32"}
OWN_TEXTS = {"gemma3": "gemma3_text", "qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_vl_text"}


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {name: make_image_model(name) for name in ("smolvlm", "llava", "gemma3", "qwen2_vl", "qwen2_5_vl")}


def read(path: Path, model: PreTrainedModel, text: dict[str, Any] | None = None, **options: Any) -> Any:
    write_mmproj(path, model, **options)
    if text is None:
        text = {**TEXT, "model_type": OWN_TEXTS.get(model.config.model_type, "llama")}
    return read_mmproj(read_gguf(path), text, Path("text.gguf"))


def test_configuration_and_image_processor_are_those_of_idefics3(
    tmp_path: Path, models: dict[str, PreTrainedModel]
) -> None:
    found = read(tmp_path / "a.gguf", models["smolvlm"])
    assert found.config == {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "text_config": TEXT,
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
            "layer_norm_eps": pytest.approx(1e-6),
            "hidden_act": "gelu_pytorch_tanh",
        },
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    assert found.processor == {
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            "image_mean": [0.5] * 3,
            "image_std": [0.25] * 3,
        },
        "processor_config.json": {"image_seq_len": 4},
    }
    older = read(tmp_path / "b.gguf", models["smolvlm"], changes={"clip.vision.preproc_image_size": None})
    assert older.processor["preprocessor_config.json"]["size"] == {"longest_edge": 4 * 32}


def test_configuration_and_image_processor_are_those_of_llava(
    tmp_path: Path, models: dict[str, PreTrainedModel]
) -> None:
    # The first files do not state their projector.
    changes = {"clip.projector_type": None, "clip.vision.feature_layer": [1]}
    found = read(tmp_path / "a.gguf", models["llava"], changes=changes)
    assert found.config["architectures"] == ["LlavaForConditionalGeneration"]
    assert (found.config["vision_feature_layer"], found.config["vision_feature_select_strategy"]) == (1, "default")
    assert found.config["vision_config"]["num_hidden_layers"] == 1  # as the output of the other one is not used
    assert found.config["vision_config"]["hidden_act"] == "quick_gelu"
    assert found.processor["preprocessor_config.json"]["crop_size"] == {"height": 30, "width": 30}
    assert found.processor["processor_config.json"]["patch_size"] == 10


def test_configuration_and_image_processor_are_those_of_gemma3(
    tmp_path: Path, models: dict[str, PreTrainedModel]
) -> None:
    found = read(tmp_path / "a.gguf", models["gemma3"])
    assert found.config["architectures"] == ["Gemma3ForConditionalGeneration"]
    assert (found.config["mm_tokens_per_image"], found.config["vision_config"]["patch_size"]) == (16, 4)
    assert found.processor["preprocessor_config.json"]["size"] == {"height": 32, "width": 32}
    assert found.processor["processor_config.json"] == {"image_seq_length": 16}
    usual = read(tmp_path / "b.gguf", models["gemma3"], changes={"clip.vision.projector.scale_factor": None})
    assert usual.config["mm_tokens_per_image"] == 4  # a quarter of the 8 patches of a side


def test_configuration_and_image_processor_are_those_of_qwen(
    tmp_path: Path, models: dict[str, PreTrainedModel]
) -> None:
    old = read(tmp_path / "a.gguf", models["qwen2_vl"])
    assert old.config["vision_config"]["mlp_ratio"] == 2  # which a file states by its tensors alone
    assert old.config["text_config"]["model_type"] == "qwen2_vl_text"
    processor = old.processor["preprocessor_config.json"]
    assert (processor["min_pixels"], processor["max_pixels"], processor["patch_size"]) == (64, 4096, 4)
    changes = {f"clip.vision.image_{bound}_pixels": None for bound in ("min", "max")}
    new = read(tmp_path / "b.gguf", models["qwen2_5_vl"], changes=changes)
    assert new.config["architectures"] == ["Qwen2_5_VLForConditionalGeneration"]
    assert new.config["text_config"]["model_type"] == "qwen2_5_vl_text"
    found = new.config["vision_config"]
    assert (found["fullatt_block_indexes"], found["window_size"], found["intermediate_size"]) == ([1], 16, 64)
    processor = new.processor["preprocessor_config.json"]
    assert (processor["min_pixels"], processor["max_pixels"]) == (3136, 12_845_056)  # of the published checkpoints


def test_file_is_found_by_its_name_or_its_header(tmp_path: Path, models: dict[str, PreTrainedModel]) -> None:
    write_mmproj(tmp_path / "vision.gguf", models["llava"])
    write_tiny_gguf(tmp_path / "text.gguf")
    (tmp_path / "damaged.gguf").touch()
    (tmp_path / "SmolVLM-mmproj-f16.gguf").touch()
    found = {path.name: is_mmproj(path) for path in tmp_path.iterdir()}
    assert found == {"vision.gguf": True, "text.gguf": False, "damaged.gguf": False, "SmolVLM-mmproj-f16.gguf": True}


REFUSED = {
    "another projector": (
        "smolvlm",
        {"clip.projector_type": "pixtral"},
        r"clip\.projector_type is 'pixtral': served are 'idefics3' \(Idefics3 and SmolVLM\) and .*\(Qwen2\.5-VL\); "
        r"name the file of the text part alone to serve texts without images",
    ),
    "no projector": ("smolvlm", {"clip.projector_type": None}, r"clip\.vision\.projector_type is None"),
    "projector of a part": (
        "smolvlm",
        {"clip.projector_type": None, "clip.vision.projector_type": "qwen2.5o"},
        r"clip\.vision\.projector_type is 'qwen2\.5o'",
    ),
    "sounds only": ("smolvlm", {"clip.has_vision_encoder": False}, r"clip\.has_vision_encoder is False: it must be"),
    "another activation": ("smolvlm", {"clip.use_gelu": False}, r"clip\.use_gelu is False: .* use GELU"),
    "silu": ("llava", {"clip.use_silu": True}, r"clip\.use_silu is True"),
    "no heads": ("llava", {"clip.vision.attention.head_count": None}, r"head_count is None: it must be an integer"),
    "heads that do not divide": ("llava", {"clip.vision.attention.head_count": 5}, r"head_count is 5: it must divide"),
    "too few layers": ("smolvlm", {"clip.vision.block_count": 1}, r"block_count is 1: the tensors have 2"),
    "another tile": ("smolvlm", {"clip.vision.image_size": 64}, r"image_size is 64: the tensors have 16, it means 64"),
    "another patch": ("llava", {"clip.vision.patch_size": 15}, r"patch_embd\.weight is \[32, 3, 10, 10\]: its shape"),
    "another width": ("llava", {"clip.vision.embedding_length": 64}, r"embedding_length is 64: the tensors have 32"),
    "another inner size": ("llava", {"clip.vision.feed_forward_length": 65}, r"feed_forward_length is 65: ffn_up and"),
    "inner size of the width": ("llava", {"clip.vision.feed_forward_length": 32}, r"must not be embedding_length"),
    "scale that does not divide": (
        "smolvlm",
        {"clip.vision.projector.scale_factor": 3},
        r"scale_factor is 3: it must divide the 4 patches",
    ),
    "another scale": ("smolvlm", {"clip.vision.projector.scale_factor": 4}, r"scale_factor is 4: the tensors have 128"),
    "LLaVA 1.6": (
        "llava",
        {"clip.vision.image_grid_pinpoints": [336, 672]},
        r"image_grid_pinpoints is \[336, 672\]: files of LLaVA 1\.6 have it, and only LLaVA 1\.5 is served",
    ),
    "several layers": ("llava", {"clip.vision.feature_layer": [0, 1]}, r"feature_layer is \[0, 1\]: it must have one"),
    "layer that is not there": ("llava", {"clip.vision.feature_layer": [2]}, r"it must be from 1 to 1, the layers"),
    "pooling that does not divide": (
        "gemma3",
        {"clip.vision.projector.scale_factor": 3},
        r"scale_factor is 3: it must divide the 8 patches",
    ),
    "another merger": ("qwen2_vl", {"clip.vision.spatial_merge_size": 3}, r"the tensors have 128, it means 288"),
    "too many layers": ("qwen2_5_vl", {"clip.vision.block_count": 4}, r"block_count is 4: the tensors have 3"),
    "two colours": ("smolvlm", {"clip.vision.image_mean": [0.5, 0.5]}, r"image_mean is \[0\.5, 0\.5\]: it must have a"),
    "no deviation": ("smolvlm", {"clip.vision.image_std": [0.0, 1.0, 1.0]}, r"image_std is .* numbers above 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_metadata_that_is_not_served_or_does_not_fit_is_refused_by_field_and_value(
    case: str, tmp_path: Path, models: dict[str, PreTrainedModel]
) -> None:
    name, changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path / "a.gguf", models[name], changes=changes)
    assert str(tmp_path / "a.gguf") in str(error.value)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, models: dict[str, PreTrainedModel]) -> None:
    with pytest.raises(
        ValueError, match=r"its projector makes embeddings of 48 elements, and those of text\.gguf have 64: .*name the"
    ):
        read(tmp_path / "a.gguf", models["smolvlm"], {**TEXT, "hidden_size": 64})
    with pytest.raises(ValueError, match=r"text\.gguf: general\.architecture is that of 'gemma2': with b\.gguf, "):
        read(tmp_path / "b.gguf", models["llava"], {**TEXT, "model_type": "gemma2"})
    with pytest.raises(ValueError, match=r"'llama': with d\.gguf, the text part must be one of gemma3_text"):
        read(tmp_path / "d.gguf", models["gemma3"], TEXT)
    with pytest.raises(ValueError, match=r"general\.architecture is 'llama': a file with a vision tower .* has 'clip'"):
        read(tmp_path / "c.gguf", models["llava"], architecture="llama")


def test_tensors_that_are_not_served_are_named(tmp_path: Path, models: dict[str, PreTrainedModel]) -> None:
    kind = gguf.GGMLQuantizationType.Q4_0
    with pytest.raises(ValueError, match=r"attn_\w+\.weight is of the type Q4_0: of image parts, F32, F16, BF16, Q8_0"):
        read(tmp_path / "a.gguf", models["smolvlm"], kind=kind)
    write_mmproj(tmp_path / "b.gguf", models["llava"])

    def with_newline(tensor: Any) -> Any:
        yield tensor
        if tensor[0] == "v.class_embd":
            yield "model.image_newline", np.ones(32, np.float32), gguf.GGMLQuantizationType.F32

    rewrite_tensors(tmp_path / "b.gguf", tmp_path / "c.gguf", with_newline)
    with pytest.raises(ValueError, match=re.escape("model.image_newline is a tensor that the image parts of LLaVA")):
        read_mmproj(read_gguf(tmp_path / "c.gguf"), TEXT, Path("text.gguf"))


def test_matrices_with_each_others_names_are_told_by_their_shapes(
    tmp_path: Path, models: dict[str, PreTrainedModel]
) -> None:
    for name, tower in (("llava", "vision_tower.vision_model"), ("smolvlm", "vision_model")):
        write_mmproj(tmp_path / f"{name}.gguf", models[name], kind=F16)
        file = read_gguf(tmp_path / f"{name}.gguf")
        shapes = {own: file.tensors[stored].shape for stored, own in checkpoint_names(file).items()}
        assert shapes[f"{tower}.encoder.layers.0.mlp.fc1.weight"] == (64, 32)
        assert shapes[f"{tower}.encoder.layers.0.mlp.fc2.bias"] == (32,)
