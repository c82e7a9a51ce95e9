"""Read the `config.json` of models of texts and images whose text part is a native decoder."""

from collections.abc import Callable
from typing import Final

import msgspec

from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.config_json import Config, flag, shorten
from vllm_mp.model_config.families.llama import read_llama, read_mistral, read_qwen2, read_qwen3
from vllm_mp.model_config.images import read_image_config

_TEXT_PARTS: Final[dict[str, Callable[[str, Config], NativeArchitecture]]] = {
    "llama": read_llama,
    "mistral": read_mistral,
    "qwen2": read_qwen2,
    "qwen3": read_qwen3,
}
"""The readers of the text parts that are served, by `model_type`."""
_INNER_SIZES: Final = {"llama": 11_008, "mistral": 14_336, "qwen2": 22_016, "qwen3": 22_016}
_ROPE_FIELDS: Final = ("rope_parameters", "rope_scaling")


def read_with_images(name: str, config: Config) -> NativeArchitecture:
    """Read the text part of Idefics3, SmolVLM and LLaVA; `read_image_config` reads what is of images."""
    text = config.get("text_config") or {}
    if not isinstance(text, dict):
        raise ValueError(f"config field 'text_config' is {shorten(text)}; it must be an object")
    kind = text.get("model_type", "llama")
    if kind not in _TEXT_PARTS:
        raise ValueError(
            f"config field 'text_config.model_type' is {shorten(kind)}; supported are {', '.join(_TEXT_PARTS)}"
        )
    read_image_config(config)
    is_llava = name.startswith("Llava")
    # As in transformers, LLaVA's text part may say it too.
    is_tied = flag(config, "tie_word_embeddings", False) or (is_llava and flag(text, "tie_word_embeddings", False))
    of_all: Config = {field: config[field] for field in ("dtype", "torch_dtype") if field in config}
    defaults = _default_sizes(kind)
    if not is_llava:
        defaults["rms_norm_eps"] = 1e-5
    return _TEXT_PARTS[kind](name, {**defaults, **of_all, **text, "tie_word_embeddings": is_tied})


def _default_sizes(kind: str) -> Config:
    """Return the sizes that the object of a text part may leave out, as LLaVA 1.5 does: those of transformers."""
    return {
        "vocab_size": 151_936 if kind.startswith("qwen") else 32_000,
        "hidden_size": 4096,
        "intermediate_size": _INNER_SIZES[kind],
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }


def read_qwen_vl(name: str, config: Config) -> NativeArchitecture:
    """Read the text part of Qwen2-VL and Qwen2.5-VL, whose fields older files have at the top."""
    text = config if config.get("text_config") is None else config["text_config"]
    if not isinstance(text, dict):
        raise ValueError(f"config field 'text_config' is {shorten(text)}; it must be an object")
    read_image_config(config)
    of_all: Config = {field: config[field] for field in ("dtype", "torch_dtype") if field in config}
    is_tied = flag(config, "tie_word_embeddings", False) or flag(text, "tie_word_embeddings", False)
    fields = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, **of_all, **text, "tie_word_embeddings": is_tied}
    sections: object = None
    for field in _ROPE_FIELDS:
        given = fields.get(field)
        if isinstance(given, dict):
            sections = given.get("mrope_section", sections)
            kind = given.get("rope_type", given.get("type", "default"))
            fields[field] = {**given, "rope_type": "default" if kind == "mrope" else kind}
    arch = read_qwen2(name, fields)
    sections = [16, 24, 24] if sections is None else sections
    if (
        not isinstance(sections, list | tuple)
        or len(sections) != 3
        or not all(type(size) is int and size >= 0 for size in sections)
        or 2 * sum(sections) != arch.head_dim
    ):
        raise ValueError(
            f"config field 'mrope_section' is {shorten(sections)}; it must be 3 numbers whose sum is half of head_dim: "
            f"{arch.head_dim // 2}"
        )
    assert arch.rope is not None
    return msgspec.structs.replace(arch, rope=msgspec.structs.replace(arch.rope, sections=tuple(sections)))
