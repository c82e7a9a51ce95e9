"""Files of small models that take images: their tokenizers, processors and chat templates."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from support.tiny_tokenizers import byte_level

IMAGE_TOKEN = "<image>"
BEGIN, END = "<start_of_image>", "<end_of_image>"
"""The tokens around an image of Gemma 3; the first is its placeholder."""
SPECIAL = [IMAGE_TOKEN, BEGIN, END, "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"] + [
    f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)
]
SPECIAL += ["<|vision_start|>", "<|vision_end|>"]
TILED = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
"""Settings of an image processor of SmolVLM or Idefics3 with tiles of 32 x 32 pixels."""
CROPPED = {"size": {"shortest_edge": 30}, "crop_size": {"height": 30, "width": 30}}
"""Settings of an image processor of LLaVA with images of 30 x 30 pixels."""
GRID = {"size": {"shortest_edge": 8 * 8, "longest_edge": 64 * 64}, "patch_size": 4}
"""Settings of an image processor of Qwen2-VL with patches of 4 x 4 pixels."""
RESIZED = {"size": {"height": 32, "width": 32}}
"""Settings of an image processor of Gemma 3 with images of 32 x 32 pixels."""
TOKENS_PER_TILE = 4
TOKENS_PER_IMAGE = 16
"""Image tokens of an image of Gemma 3."""
PATCH_SIZE = 10
PARTS_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}<image>{% endif %}"
    "{% endfor %}{{ '\n' }}{% endfor %}"
)
"""A template that reads lists of parts alone, as that of SmolVLM."""


def image_tokenizer(image_token: str = IMAGE_TOKEN) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens of images, in which `IMAGE_TOKEN` may have another name."""
    backend = byte_level()
    special = [image_token if text == IMAGE_TOKEN else text for text in SPECIAL]
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = PARTS_TEMPLATE
    return tokenizer


def image_fields(family: str) -> dict[str, Any]:
    """Return the fields of a `config.json` that say what a small model of a family takes as images."""
    token_id, begin_id, end_id = image_tokenizer().convert_tokens_to_ids([IMAGE_TOKEN, BEGIN, END])
    if family.startswith("qwen"):
        return {"model_type": family, "image_token_id": token_id, "vision_config": {"patch_size": 4}}
    if family == "gemma3":
        around = {"boi_token_index": begin_id, "eoi_token_index": end_id, "mm_tokens_per_image": TOKENS_PER_IMAGE}
        vision = {"image_size": 32, "patch_size": 4}
        return {"model_type": family, "image_token_index": token_id, "vision_config": vision, **around}
    vision = {"image_size": 30, "patch_size": PATCH_SIZE} if family == "llava" else {"image_size": 32, "patch_size": 8}
    return {"model_type": family, "image_token_id": token_id, "vision_config": vision}


def processor_files(family: str) -> dict[str, dict[str, Any]]:
    """Return the files of the processor of a small model of a family."""
    if family == "gemma3":
        return {
            "preprocessor_config.json": {"image_processor_type": "Gemma3ImageProcessor", **RESIZED},
            "processor_config.json": {"image_seq_length": TOKENS_PER_IMAGE},
        }
    if family == "llava":
        return {
            "preprocessor_config.json": {"image_processor_type": "CLIPImageProcessor", **CROPPED},
            "processor_config.json": {
                "patch_size": PATCH_SIZE,
                "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default",
            },
        }
    if family.startswith("qwen"):
        return {"preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **GRID}}
    name = "SmolVLMImageProcessor" if family == "smolvlm" else "Idefics3ImageProcessor"
    return {
        "preprocessor_config.json": {"image_processor_type": name, **TILED},
        "processor_config.json": {"image_seq_len": TOKENS_PER_TILE},
    }


def save_processor(folder: Path, family: str) -> None:
    """Write the files of the tokenizer and the processor of a small model of a family."""
    image_tokenizer().save_pretrained(folder)
    for name, content in processor_files(family).items():
        (folder / name).write_text(json.dumps(content))


def placeholder(family: str) -> str:
    """Return the placeholder of a family."""
    return BEGIN if family == "gemma3" else IMAGE_TOKEN


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
