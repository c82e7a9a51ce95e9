"""Read and check a LoRA adapter that PEFT has saved: `adapter_config.json` and `adapter_model.safetensors`."""

import logging
import re
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from vllm_mp.core.lora.peft_config import PeftConfig, read_peft_config
from vllm_mp.core.lora.targets import projections
from vllm_mp.core.models.text_part import is_of_images, name_in_text_part
from vllm_mp.core.weights.checkpoint import FLOAT_DTYPES, MAX_LISTED
from vllm_mp.core.weights.checkpoint_files import read_tensors
from vllm_mp.kernels.ops import Factors
from vllm_mp.model_config.architecture import NativeArchitecture

logger = logging.getLogger(__name__)

WEIGHTS_FILE: Final = "adapter_model.safetensors"
_MAX_PROBLEM: Final = 400
"""Characters of an error about one tensor, whose name may be long."""
_PREFIX: Final = "base_model.model."
_MODEL_PREFIXES: Final = ("model.", "transformer.")
"""The names of the model around the layers, which adapters for the bare model lack."""
_EMBEDDING: Final = re.compile(r"(lora_embedding_|\b(embed_tokens|lm_head|wte|wpe)\b|modules_to_save)")
_LAYER: Final = re.compile(r"(?:layers|h)\.(\d+)\.")


class Adapter(NamedTuple):
    """An adapter in host memory."""

    factors: dict[str, Factors]
    """By the name of the linear layer, as in `Projection.parts`, in the dtype of the model."""
    num_bytes: int


def read_adapter(folder: Path, arch: NativeArchitecture, dtype: torch.dtype, max_rank: int) -> Adapter:
    """Return the adapter in `folder` for a model of `arch` in `dtype`.

    Raises ValueError, naming the folder, the cause and the remedy, if files are missing, damaged or pickles, if the
    adapter is of a kind that is not served, belongs to another model or has a rank above `max_rank`, and if a
    value is not finite. Nothing in the folder is run.
    """
    if not folder.is_dir():
        raise ValueError(f"the adapter {folder} is not a folder; give the folder that PEFT's save_pretrained wrote")
    config = read_peft_config(folder)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles:
            raise ValueError(
                f"the adapter {folder} has weights only as {pickles[0]}, a pickle, which can run code and is not "
                "loaded; save it again with PEFT's save_pretrained(FOLDER, safe_serialization=True)"
            )
        raise ValueError(f"the adapter {folder} lacks {WEIGHTS_FILE}; give the folder that save_pretrained wrote")
    reader = _Reader(config, arch, dtype, max_rank)
    for name, tensor in read_tensors({weights: None}, None):
        reader.add(name, tensor)
    try:
        return reader.adapter()
    except ValueError as error:
        raise ValueError(f"the adapter {folder} cannot be used: {error}") from None


class _Reader:
    """Collects the tensors of one adapter, and what is wrong with them."""

    def __init__(self, config: PeftConfig, arch: NativeArchitecture, dtype: torch.dtype, max_rank: int) -> None:
        self._config = config
        self._arch = arch
        self._dtype = dtype
        self._max_rank = max_rank
        self._sizes = {
            part: (projection.inputs, outputs)
            for projection in projections(arch)
            for part, outputs in zip(projection.parts, projection.outputs, strict=True)
        }
        """Inputs and outputs of each linear layer."""
        self._found: dict[str, dict[str, Tensor]] = {}
        """By layer: its factors "A" and "B"."""
        self._problems: list[str] = []
        self._num_of_images = 0
        """Number of tensors for the parts of the model that compute images, which no request uses."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor of the file."""
        problem = self._take(name, tensor)
        if problem is not None:
            self._problems.append(problem[:_MAX_PROBLEM])

    def adapter(self) -> Adapter:
        """Return the adapter; raise ValueError that lists what is wrong."""
        for module, factors in self._found.items():
            self._problems += [f"{module} lacks lora_{factor}" for factor in "AB" if factor not in factors]
        if not self._found and not self._problems:
            of_images = "adapts only the parts of the model for images, and texts alone are served"
            self._problems.append(f"{WEIGHTS_FILE} {of_images if self._num_of_images else 'is empty'}")
        if self._num_of_images:
            logger.warning("%d tensors of an adapter are for images, which are not served", self._num_of_images)
        if self._problems:
            more = len(self._problems) - MAX_LISTED
            raise ValueError("; ".join(self._problems[:MAX_LISTED]) + (f"; and {more} more" if more > 0 else ""))
        made = {module: Factors(factors["A"], factors["B"]) for module, factors in self._found.items()}
        return Adapter(made, sum(tensor.nbytes for factors in made.values() for tensor in factors))

    def _take(self, name: str, tensor: Tensor) -> str | None:
        """Store a tensor; return what is wrong with it."""
        if is_of_images(name.removeprefix(_PREFIX)):
            self._num_of_images += 1
            return None
        if _EMBEDDING.search(name):
            return f"{name} changes embeddings or a whole module, which is not served"
        if "lora_magnitude_vector" in name:
            return f"{name} belongs to DoRA, which is not served"
        module, _, kind = name.removeprefix(_PREFIX).rpartition(".lora_")
        if kind not in ("A.weight", "B.weight"):
            return f"{name} is not a factor of LoRA"
        layer = name_in_text_part(module)
        layer = next((layer.removeprefix(prefix) for prefix in _MODEL_PREFIXES if layer.startswith(prefix)), layer)
        if layer not in self._sizes:
            number = _LAYER.search(layer)
            if number and int(number[1]) >= self._arch.num_layers:
                return f"{module} does not exist: the model has {self._arch.num_layers} layers"
            return f"{module} is not a linear layer of {self._arch.name} that can be adapted"
        if kind[0] in self._found.get(layer, {}):
            return f"{name} occurs twice"
        rank = self._config.rank_of(module)
        if rank > self._max_rank:
            return f"{module} has rank {rank}, above max_lora_rank={self._max_rank}; start the engine with a higher one"
        inputs, outputs = self._sizes[layer]
        factor = kind[0]
        expected = [rank, inputs] if factor == "A" else [outputs, rank]
        if list(tensor.shape) != expected:
            return f"{name} has shape {list(tensor.shape)}, not {expected}; is it for another model?"
        if tensor.dtype not in FLOAT_DTYPES:
            return f"{name} has dtype {tensor.dtype}, not a 16, 32 or 64-bit float"
        if factor == "B":
            tensor = tensor.float() * self._config.scale_of(module)
        stored = tensor.to(self._dtype, copy=True)
        if not stored.isfinite().all():
            return f"{name} has values that are not finite in {str(self._dtype).removeprefix('torch.')}"
        self._found.setdefault(layer, {})[factor] = stored
        return None
