"""Conversion to safetensors of GGUF files whose tensors have known names, and the dtypes of converted weights."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_mp.core.weights.gguf_tensors import gguf_tensors
from vllm_mp.kernels.block_weight import BlockWeight
from vllm_mp.model_store.gguf import MappedGguf
from vllm_mp.model_store.gguf_file.config import GgufFamily, checkpoint_name, read_gguf_config
from vllm_mp.model_store.gguf_file.reader import GgufFile

_EXACT_TYPES: Final = ("F64", "F32", "F16", "BF16")
_FLOAT16_RANGE: Final = (2.0**-16, 65504.0)
"""The largest magnitudes of tensors that float16 holds more exactly than bfloat16, which has a wider range."""


def write_model(file: GgufFile, family: GgufFamily, folder: Path, progress: Callable[[float], None]) -> None:
    """Write the configuration and the weights of `file` to `folder`. `progress` is called with the fraction done.

    Raises ValueError for metadata that `read_gguf_config` refuses, and for a file that changes meanwhile.
    """
    (folder / "config.json").write_text(json.dumps(read_gguf_config(file, family), indent=2))
    stored = {checkpoint_name(name, family) or name: tensor.type.name for name, tensor in file.tensors.items()}
    tensors = {}
    for name, weight in gguf_tensors(MappedGguf.of(file), False, progress):
        assert not isinstance(weight, BlockWeight)
        # A file may store the matrices of all experts as one tensor.
        kind = stored.get(name) or stored[re.sub(r"\.experts\.\d+\.", ".experts.", name)]
        kept = in_16_bits_if_exact(weight) if kind in _EXACT_TYPES else rounded_to_16_bits(weight)
        # A copy, because the pages of the file are given back after the loop's step.
        full_name = name if name.startswith("lm_head.") else f"model.{name}"
        tensors[full_name] = kept.clone(memory_format=torch.contiguous_format)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rounded_to_16_bits(weights: Tensor) -> Tensor:
    """Return the float32 `weights` of a quantized tensor in float16, or in bfloat16 if float16 cannot hold them."""
    least, most = _FLOAT16_RANGE
    dtype = torch.float16 if least <= weights.abs().max() <= most or not weights.any() else torch.bfloat16
    return weights.to(dtype)


def in_16_bits_if_exact(weights: Tensor) -> Tensor:
    """Return `weights` in 16 bits if they hold the values exactly, else as they are."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = weights.to(dtype)
        if torch.equal(narrow.to(weights.dtype), weights):
            return narrow
    return weights
