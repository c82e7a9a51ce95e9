"""The image processor of a model: its settings, and the text that stands for an image in a prompt."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from vllm_mp.client.images.messages import ImageResult, ProcessorSettings
from vllm_mp.model_config.images import ImageConfig
from vllm_mp.model_config.json_file import read_json
from vllm_mp.model_store.tokenizer_files import PROCESSOR_FILES
from vllm_mp.requests.images import MAX_IMAGE_BYTES

_PROCESSORS: Final = {
    "idefics3": ("Idefics3ImageProcessor", "SmolVLMImageProcessor"),
    "smolvlm": ("SmolVLMImageProcessor", "Idefics3ImageProcessor"),
    "llava": ("CLIPImageProcessor", "LlavaImageProcessor", "SiglipImageProcessor"),
    "qwen2_vl": ("Qwen2VLImageProcessor",),
    "qwen2_5_vl": ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor"),
    "gemma3": ("Gemma3ImageProcessor",),
}
"""The image processors that a model of each family may have; the first is that of a folder which names none."""
_PIXEL_LIMITS: Final = ("min_pixels", "max_pixels", "size")
_SIZES: Final = (*_PIXEL_LIMITS, "crop_size")
_DEFAULT_SIZE: Final = {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}
"""Least and most pixels of an image of Qwen2-VL if the folder does not say, as in transformers."""
_MAX_SIDE: Final = 8192
"""Bound on the pixels of a side to which a request may have an image scaled."""
_GRID_BYTES: Final = 24
_DEFAULT_TOKENS_PER_TILE: Final = 169
"""Image tokens of a tile if the folder of an Idefics3 or SmolVLM model does not say, as in transformers."""
_GEMMA3_SETTINGS: Final = {
    "do_convert_rgb": True,
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
"""What the processor of Gemma 3 has its image processor do, whatever the folder says, as in transformers."""


class ModelProcessor(NamedTuple):
    """What a client needs of a model's processor."""

    image_processor: ProcessorSettings
    text_of: Callable[[ImageResult], str]
    """Returns the text that takes the place of a placeholder, for a processed image."""


def read_processor_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the content of those of `PROCESSOR_FILES` that the folder has. Raises ValueError for invalid JSON."""
    contents = {name: read_json(folder / name, dict) for name in PROCESSOR_FILES}
    return {name: content for name, content in contents.items() if content is not None}


def model_processor(
    images: ImageConfig,
    text_of_token: Callable[[int], str],
    files: dict[str, dict[str, Any]],
    hf_config: dict[str, Any],
) -> ModelProcessor:
    """Return the processor of a model that takes images; `files` are those of `read_processor_files`.

    `text_of_token` returns the text of a token of the model's tokenizer.

    No code that a folder names is run: its processor must be one of transformers' own. Raises ValueError, with the
    remedy, if the files have no image processor or one that the model cannot have.
    """
    whole = files.get("processor_config.json", {})
    settings = whole.get("image_processor") or files.get("preprocessor_config.json")
    if not isinstance(settings, dict):
        raise ValueError(
            "the model's folder has no settings of an image processor (preprocessor_config.json, or processor_config."
            "json with image_processor); download the model's files again"
        )
    known = _PROCESSORS[images.family]
    name = str(settings.get("image_processor_type") or known[0]).removesuffix("Fast").removesuffix("Pil")
    if name not in known:
        raise ValueError(
            f"the model's image processor {name!r:.100} is not served for {images.family}; use a checkpoint with "
            + " or ".join(known)
        )
    image_token = text_of_token(images.token_id)
    if images.begin_id is not None and images.end_id is not None:
        settings = {**settings, **_GEMMA3_SETTINGS}
        num_tokens = _integer("image_seq_length", whole.get("image_seq_length", images.tile_tokens), 1)
        tile = f"\n\n{text_of_token(images.begin_id)}{image_token * num_tokens}{text_of_token(images.end_id)}\n\n"
        return ModelProcessor(_settings(name, settings), _panned_text(tile))
    if images.merge_size:
        bounded = _settings("Qwen2VLImageProcessor", _bounded(settings, images))
        return ModelProcessor(bounded, _grid_text(image_token, images.merge_size))
    chosen = _settings(name, settings)
    if images.family == "llava":
        return ModelProcessor(chosen, _llava_text(image_token, whole, hf_config))
    num_tokens = whole.get("image_seq_len", _DEFAULT_TOKENS_PER_TILE)
    return ModelProcessor(chosen, _tiled_text(image_token, _integer("image_seq_len", num_tokens, 1)))


def _settings(name: str, settings: dict[str, Any]) -> ProcessorSettings:
    return ProcessorSettings(f"{name}Pil", json.dumps(settings).encode())


def _panned_text(tile: str) -> Callable[[ImageResult], str]:
    """Return `text_of` of Gemma 3: the whole image, and with pan and scan the crops that were made of it."""

    def text_of(image: ImageResult) -> str:
        if not image.columns:
            return tile
        crops = " ".join([tile] * image.columns)
        return f"Here is the original image {tile} and here are some crops to help you see better {crops}"

    return text_of


def _tiled_text(image_token: str, num_tokens: int) -> Callable[[ImageResult], str]:
    """Return `text_of` of Idefics3 and SmolVLM: the tiles of an image row by row, and then the whole image."""
    around, tile = "<fake_token_around_image>", image_token * num_tokens

    def text_of(image: ImageResult) -> str:
        whole = f"{around}<global-img>{tile}{around}"
        if not image.rows and not image.columns:
            return whole
        lines = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(image.columns)) + "\n"
            for row in range(image.rows)
        ]
        return f"{''.join(lines)}\n{whole}"

    return text_of


def _bounded(settings: dict[str, Any], images: ImageConfig) -> dict[str, Any]:
    """Return settings by which an image has no more pixels than its arrays may have bytes."""
    limit = _max_pixels(images)
    given = settings.get("size")
    size = dict(given) if isinstance(given, dict) else dict(_DEFAULT_SIZE)
    for name, old_name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        value = settings.get(old_name, size.pop(old_name, size.get(name)))
        if value is not None:
            size[name] = min(_integer(old_name, value, 1, 2**31), limit)
    return {**{name: value for name, value in settings.items() if name not in _PIXEL_LIMITS}, "size": size}


def _max_pixels(images: ImageConfig) -> int:
    """Return the most pixels that an image may have of a model whose images are grids of patches."""
    limit = (MAX_IMAGE_BYTES - _GRID_BYTES) // 12  # 3 colours in float32
    return limit - limit % (images.patch_size * images.merge_size) ** 2


def bounded_options(options: dict[str, Any], images: ImageConfig) -> dict[str, Any]:
    """Return `mm_processor_kwargs` with sizes that an image process has time and memory for.

    The most pixels of an image are lowered to what its arrays may have. Raises ValueError, naming the option, for other
    sizes that are too large.
    """
    limit = _max_pixels(images) if images.merge_size else _MAX_SIDE

    def bounded(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: bounded(f"{name}.{key}", each) for key, each in value.items()}
        if not isinstance(value, int | float) or value <= limit:
            return value
        if images.merge_size and name in ("max_pixels", "size.longest_edge"):
            return limit
        raise ValueError(f"mm_processor_kwargs: {name} must be at most {limit}, got {value}; lower it")

    return {name: bounded(name, value) if name in _SIZES else value for name, value in options.items()}


def _grid_text(image_token: str, merge_size: int) -> Callable[[ImageResult], str]:
    """Return `text_of` of Qwen2-VL and Qwen2.5-VL: an image token for each square of patches."""

    def text_of(image: ImageResult) -> str:
        [grid] = [array for array in image.arrays if array.name == "image_grid_thw"]
        num_patches = math.prod(np.frombuffer(grid.data, np.int64).tolist())
        num_tokens: int = num_patches // merge_size**2
        return image_token * num_tokens

    return text_of


def _llava_text(image_token: str, settings: dict[str, Any], hf_config: dict[str, Any]) -> Callable[[ImageResult], str]:
    """Return `text_of` of LLaVA: an image token for each patch of the vision tower whose features are used."""
    vision = hf_config.get("vision_config") or {}
    of_model = "patch_size" not in settings or settings["patch_size"] is None
    patch_size = _integer("patch_size", vision.get("patch_size", 14) if of_model else settings["patch_size"], 1)
    strategy = settings.get("vision_feature_select_strategy") or hf_config.get(
        "vision_feature_select_strategy", "default"
    )
    has_class_token = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    more = int(has_class_token) if of_model else settings.get("num_additional_image_tokens", 0)
    num_more = _integer("num_additional_image_tokens", more, 0) - (strategy == "default")

    def text_of(image: ImageResult) -> str:
        [pixels] = [array for array in image.arrays if array.name == "pixel_values"]
        height, width = pixels.shape[-2:]
        num_tokens: int = (height // patch_size) * (width // patch_size) + num_more
        return image_token * num_tokens

    return text_of


def _integer(name: str, value: Any, low: int, high: int = 65_536) -> int:
    """Return `value`. Raises ValueError unless it is an integer from `low` to `high`."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(
            f"processor_config.json: {name} must be an integer from {low} to {high}, got {value!r:.99}; correct it"
        )
    return value
