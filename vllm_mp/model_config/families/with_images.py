"""Read the `config.json` of models of texts and images whose text part is a native decoder."""

from collections.abc import Callable
from typing import Final

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
    norm: Config = {} if is_llava else {"rms_norm_eps": 1e-5}
    return _TEXT_PARTS[kind](name, {**norm, **of_all, **text, "tie_word_embeddings": is_tied})
