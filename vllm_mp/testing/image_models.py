"""Small models of texts and images with random weights, made and saved by transformers, and random images for them."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from vllm_mp.model_config.images import ImageConfig
from vllm_mp.requests.images import IMAGE_DIGEST_BYTES, ImageArray, ProcessedImage

IMAGE_TOKEN: Final = 90
_TEXT: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_CLIP: Final = {
    **_VISION,
    "model_type": "clip_vision_model",
    "projection_dim": 16,
    "image_size": 30,
    "patch_size": 10,
}
_OF_QWEN: Final[dict[str, Any]] = {
    "use_sliding_window": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 2, 1]},
}
_PATCHES: Final[dict[str, Any]] = {"depth": 3, "num_heads": 4, "patch_size": 4, "in_channels": 3}
_SIGLIP: Final = {**_VISION, "model_type": "siglip_vision_model", "patch_size": 4, "vision_use_head": False}
_GEMMA3: Final = {
    **_TEXT,
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 8,
    "sliding_window": 7,  # shorter than the 16 tokens of an image
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
IMAGE_MODELS: Final = ("idefics3", "smolvlm", "llava", "llava-full", "qwen2_vl", "qwen2_5_vl", "gemma3")


def make_image_model(name: str, token_id: int = IMAGE_TOKEN, **text: Any) -> PreTrainedModel:
    """Return a model named in `IMAGE_MODELS`, whose image token is `token_id`; `text` changes its text part.

    The tokens around an image of Gemma 3 are the two that follow `token_id`.
    """
    torch.manual_seed(0)
    if name.startswith("qwen"):
        return _make_qwen(name, token_id, {**_TEXT, "model_type": f"{name}_text", **_OF_QWEN, **text})
    if name == "gemma3":
        model = Gemma3ForConditionalGeneration(
            Gemma3Config(
                text_config={**_GEMMA3, **text},
                vision_config=_SIGLIP,
                mm_tokens_per_image=16,
                image_token_index=token_id,
                boi_token_index=token_id + 1,
                eoi_token_index=token_id + 2,
            )
        )
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)  # else zeros
        return model
    fields = {"text_config": {**_TEXT, **text}}
    if name == "idefics3":
        return Idefics3ForConditionalGeneration(
            Idefics3Config(**fields, vision_config=_VISION, image_token_id=token_id, scale_factor=2)
        )
    if name == "smolvlm":
        return SmolVLMForConditionalGeneration(
            SmolVLMConfig(**fields, vision_config=_VISION, image_token_id=token_id, scale_factor=2)
        )
    select: Any = "full" if name == "llava-full" else "default"
    config = LlavaConfig(
        **fields, vision_config=_CLIP, image_token_index=token_id, vision_feature_select_strategy=select
    )
    return LlavaForConditionalGeneration(config)


def _make_qwen(name: str, token_id: int, text: dict[str, Any]) -> PreTrainedModel:
    ids = {"image_token_id": token_id, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    size = text["hidden_size"]
    if name == "qwen2_vl":
        vision = {**_PATCHES, "embed_dim": 32, "mlp_ratio": 2, "hidden_size": size}
        return Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))
    vision = {
        **_PATCHES,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": size,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))


def save_image_model(name: str, folder: Path, token_id: int = IMAGE_TOKEN, **text: Any) -> PreTrainedModel:
    """Save what `make_image_model` returns in `folder`, and return it, ready to compute."""
    model = make_image_model(name, token_id, **text).eval()
    model.save_pretrained(folder)
    return model


def image_arrays(config: ImageConfig, num_tiles: int, seed: int) -> tuple[ProcessedImage, dict[str, Tensor]]:
    """Return a random image of some tiles, as clients send it and as transformers' model takes it.

    Where an image is a grid of patches, it has 4 rows and 2 * `num_tiles` columns of squares that are merged.
    """
    generator = np.random.default_rng(seed)
    if config.merge_size:
        rows, columns = 4 * config.merge_size, 2 * num_tiles * config.merge_size
        patches = generator.standard_normal((rows * columns, 3, 1, config.patch_size**2), np.float32)
        grid = np.array([[1, rows, columns]])
        sent = _sent({"pixel_values": patches.reshape(len(patches), -1), "image_grid_thw": grid})
        tensors = {
            "pixel_values": torch.from_numpy(patches).expand(-1, -1, 2, -1).flatten(1),
            "image_grid_thw": torch.from_numpy(grid),
        }
        return ProcessedImage(seed.to_bytes(IMAGE_DIGEST_BYTES, "little"), sent), tensors
    size = config.tile_size
    shape = (1, num_tiles, 3, size, size) if config.has_masks else (num_tiles, 3, size, size)
    arrays: dict[str, npt.NDArray[Any]] = {"pixel_values": generator.standard_normal(shape, np.float32)}
    if config.has_masks:
        mask = np.ones((1, num_tiles, size, size), np.int64)
        mask[:, -1, :, size // 2 :] = 0  # the right half of the last tile is padding
        arrays["pixel_attention_mask"] = mask
    digest = seed.to_bytes(IMAGE_DIGEST_BYTES, "little")
    return ProcessedImage(digest, _sent(arrays)), {name: torch.from_numpy(each) for name, each in arrays.items()}


def _sent(arrays: dict[str, npt.NDArray[Any]]) -> list[ImageArray]:
    return [ImageArray.of(name, each) for name, each in arrays.items()]
