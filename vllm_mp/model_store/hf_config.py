"""The configuration of a model's folder: config.json, and what only other files of the folder say."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from vllm_mp.model_config.architecture import Architecture, NativeArchitecture
from vllm_mp.model_config.families.registry import decoder_without_head, read_architecture
from vllm_mp.model_config.json_file import read_json
from vllm_mp.model_config.quantization import stated_quantization
from vllm_mp.model_store.folder import SAFETENSORS, read_weight_map, safetensors_header

logger = logging.getLogger(__name__)

_QUANTIZATION_FILES: Final = ("quantize_config.json", "quant_config.json")
"""Files in which AutoGPTQ and AutoAWQ described the quantization before config.json did."""
_AWQ_NAMES: Final = {"w_bit": "bits", "q_group_size": "group_size"}
"""AutoAWQ's own names of fields, and their names in config.json."""


def read_hf_config(folder: Path, load_format: str) -> dict[str, Any]:
    """Return the content of config.json in `folder`, completed by what only other files of the folder say.

    A quantization that only quantize_config.json describes becomes `quantization_config`. If the weights lack the head
    that config.json promises, `architectures` names the decoder without a head. Raises ValueError, naming the file or
    the field, for a file that is missing or cannot be read, and for a configuration that is not supported.
    """
    config = read_json(folder / "config.json", dict)
    if config is None:
        raise ValueError(f"{folder} has no config.json; fetch or save the model again")
    if not stated_quantization(config) and (quantization := _quantization_of_file(folder)):
        config = {**config, "quantization_config": quantization}
    if load_format == "dummy":
        return config
    without_head = _decoder_without_head(read_architecture(config))
    if without_head is not None and _lacks_head(folder):
        logger.warning(
            "%s has no weights of a head (lm_head.weight), so the model runs as %s: for vectors, not for text",
            folder,
            without_head,
        )
        config = {**config, "architectures": [without_head]}
    return config


def _quantization_of_file(folder: Path) -> dict[str, Any] | None:
    """Return what one of `_QUANTIZATION_FILES` says, with the names of fields in config.json; None without a file."""
    for name in _QUANTIZATION_FILES:
        found = read_json(folder / name, dict)
        if found is not None:
            method = "awq" if "zero_point" in found or found.keys() & _AWQ_NAMES.keys() else "gptq"
            return {"quant_method": method} | {_AWQ_NAMES.get(field, field): value for field, value in found.items()}
    return None


def _decoder_without_head(architecture: Architecture) -> str | None:
    """Return the name of the decoder of a native model with a head of its own; None for another model."""
    if not isinstance(architecture, NativeArchitecture) or not architecture.has_head:
        return None
    return None if architecture.tie_word_embeddings else decoder_without_head(architecture.name)


def _lacks_head(folder: Path) -> bool:
    """Tell whether there are tensors in the safetensors of `folder`, and none of a head.

    A file that cannot be read is reported when the weights are loaded.
    """
    try:
        names = list(_tensor_names(folder))
    except (OSError, ValueError, AttributeError):
        return False
    return bool(names) and not any("lm_head." in name for name in names)


def _tensor_names(folder: Path) -> Iterator[str]:
    """Yield the names of the tensors in safetensors files, from their index or their headers."""
    index = folder / SAFETENSORS.index_name
    if index.is_file() and not (folder / SAFETENSORS.single).is_file():
        yield from read_weight_map(index)
        return
    for path in sorted(folder.glob(SAFETENSORS.pattern)):
        with path.open("rb") as file:
            yield from safetensors_header(file)[0]
