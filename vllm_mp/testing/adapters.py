"""LoRA adapters with random weights, saved as PEFT saves them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_mp.core.lora.adapter import WEIGHTS_FILE
from vllm_mp.core.lora.peft_config import CONFIG_FILE
from vllm_mp.core.lora.targets import projections
from vllm_mp.model_config.architecture import NativeArchitecture


def save_random_adapter(folder: Path, arch: NativeArchitecture, *, rank: int = 8, seed: int = 0) -> Path:
    """Write an adapter with random factors for all layers of a model; return `folder`."""
    return save_adapter(folder, adapter_tensors(arch, rank, seed=seed), r=rank)


def adapter_config(**fields: Any) -> dict[str, Any]:
    """Return the contents of an `adapter_config.json`."""
    return {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear", "bias": "none", **fields}


def adapter_tensors(
    arch: NativeArchitecture, rank: int, *, seed: int = 0, ranks: dict[str, int] | None = None, only: str = ""
) -> dict[str, Tensor]:
    """Return random factors of `rank` for all layers whose name contains `only`.

    `ranks` has the ranks that differ, by the end of a layer's name.
    """
    generator = torch.Generator().manual_seed(seed)
    around = "transformer" if arch.name == "GPT2LMHeadModel" else "model"
    tensors = {}
    for projection in projections(arch):
        for part, outputs in zip(projection.parts, projection.outputs, strict=True):
            own = next((value for end, value in (ranks or {}).items() if part.endswith(end)), rank)
            if only in part:
                at = f"base_model.model.{around}.{part}"
                tensors[f"{at}.lora_A.weight"] = 0.1 * torch.randn(own, projection.inputs, generator=generator)
                tensors[f"{at}.lora_B.weight"] = 0.1 * torch.randn(outputs, own, generator=generator)
    return tensors


def save_adapter(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    """Write an adapter of `tensors`, with `fields` in its configuration; return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(adapter_config(**fields)))
    save_file(tensors, folder / WEIGHTS_FILE)
    return folder
