"""How a core reads the folder of an adapter: its weights, and their digest."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch

from vllm_mp.config import ModelConfig
from vllm_mp.core.lora.adapter import Adapter, read_adapter
from vllm_mp.model_config.architecture import NativeArchitecture


def adapter_reader(config: ModelConfig, max_rank: int) -> Callable[[str], tuple[Adapter, str]]:
    """Return a function that reads the adapter in a folder, for the model of `config`, and returns it and its digest.

    The function raises ValueError, with the remedy, for a folder that does not suit the model, and OSError.
    """
    dtype = getattr(torch, config.dtype)
    architecture = cast("NativeArchitecture", config.architecture)

    def read(folder: str) -> tuple[Adapter, str]:
        adapter = read_adapter(Path(folder), architecture, dtype, max_rank)
        return adapter, adapter_digest(adapter)

    return read


def adapter_digest(adapter: Adapter) -> str:
    """Return a digest of all values of an adapter, as the model uses them; it takes 1 s per GB."""
    digest = hashlib.sha256()
    for name, factors in sorted(adapter.factors.items()):
        for tensor in factors:
            digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
