"""Giving a model its weights: from the safetensors files of a Hugging Face folder, or made up."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vllm_mp.config import ModelConfig
from vllm_mp.core.models import CausalLM, NativeModel, build_model
from vllm_mp.core.models.loading import CheckpointMismatchError
from vllm_mp.kernels.reference import FLOAT8, FLOAT8_MAX
from vllm_mp.model_config.architecture import NativeArchitecture

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

# A prime, so that the repeats of the dummy sequence never line up with the rows of a matrix.
DUMMY_PERIOD: Final = 1_048_573
DUMMY_STD: Final = 0.02


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] | None = None,
    cache_dtype: torch.dtype | None = None,
) -> CausalLM:
    """The model of `config` with its weights: a native one where there is one, or else transformers' own.

    It is for caches of `cache_dtype`, by default `dtype`. `progress` is called with the fraction done. Raises
    ValueError naming what is wrong with the checkpoint, or why its architecture or its quantization cannot run.
    """
    arch = config.architecture
    if isinstance(arch, NativeArchitecture):
        model = build_model(arch, dtype, device)
        load_weights(model, config.folder, config.load_format, config.seed, progress)
        native = cast("NativeModel", model)
        # In 8-bit floats weights are from the start.
        native.pack(None if config.quantization == "fp8" else config.quantization, cache_dtype or dtype)
        return native
    # Imported here, because native models come up without the seconds that transformers takes.
    from vllm_mp.core.models import transformers_backend

    return transformers_backend.load_model(config, dtype, device, progress or (lambda _: None))


def load_weights(
    model: nn.Module,
    folder: Path,
    load_format: str,
    seed: int,
    progress: Callable[[float], None] | None = None,
) -> None:
    """Fill every parameter of a model that `build_model` made.

    `load_format` `dummy` makes random ones from `seed` alone; any other reads safetensors from `folder`, one file or
    shards with an index, cast to the dtype of the parameters (a GGUF file has been converted to such a folder).
    `progress` is called with the fraction done, ending at 1.0.
    Raises ValueError naming the file, the cause and the remedy when weights are absent, unreadable, damaged
    or those of another model.
    """
    if load_format == "dummy":
        fill_with_dummy_weights(model, seed)
        if progress is not None:
            progress(1.0)
        return
    loader: Any = model
    try:
        loader.load_weights(read_tensors(checkpoint_files(folder), progress))
    except CheckpointMismatchError as error:
        raise ValueError(
            f"{folder}: {error}. Check that config.json and the weights belong to the same model."
        ) from None


@torch.no_grad()
def fill_with_dummy_weights(model: nn.Module, seed: int) -> None:
    """Random weights of standard deviation 0.02 and norms of one, the same for the same seed and model.

    Those in 8-bit floats all have the same scale.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(DUMMY_PERIOD, generator=generator) * DUMMY_STD
    float8_scale = float(drawn.abs().max()) / FLOAT8_MAX
    sequences: dict[torch.dtype, Tensor] = {}
    at = 0
    for name, parameter in model.named_parameters():
        if name.endswith(".weight_scale"):
            parameter.fill_(float8_scale)
            continue
        if parameter.dim() == 1 and not name.endswith("bias"):
            parameter.fill_(1.0)
            continue
        if parameter.dtype not in sequences:
            of_dtype = drawn / float8_scale if parameter.dtype == FLOAT8 else drawn
            sequences[parameter.dtype] = of_dtype.to(parameter)
        sequence = sequences[parameter.dtype]
        # Drawing each number would take a minute a billion; one stretch of them repeats instead.
        flat = parameter.view(-1)
        filled = 0
        while filled < flat.numel():
            count = min(DUMMY_PERIOD - at, flat.numel() - filled)
            flat[filled : filled + count] = sequence[at : at + count]
            filled += count
            at = (at + count) % DUMMY_PERIOD


def checkpoint_files(folder: Path) -> dict[Path, list[str] | None]:
    """The files to read, and which tensors from each (None: all)."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        return {single: None}
    if not index.is_file():
        found = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
        if found:
            raise ValueError(
                f"{folder} has weights only as {found[0]}, a pickle, which can run code and is not loaded; "
                "convert it with transformers: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        raise ValueError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; point `model` at a folder with the "
            "weights of a Hugging Face checkpoint, or use load_format='dummy' for random ones"
        )
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = [(str(name), str(file)) for name, file in weight_map.items()]
    except OSError as error:
        raise _unreadable(index, error) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a safetensors index ({error!r}); download it again") from None
    shards: dict[Path, list[str]] = {}
    for name, file in names:
        # The index comes with the checkpoint: it may not point outside the checkpoint's folder.
        if Path(file).name != file or file == "..":
            raise ValueError(f"{index} places {name} in {file!r}, which is not the name of a file beside it")
        shards.setdefault(folder / file, []).append(name)
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(shards)} files that {INDEX_FILE} names, the "
            f"first being {missing[0]}; download the checkpoint again"
        )
    return dict(shards)


def read_tensors(
    shards: dict[Path, list[str] | None], progress: Callable[[float], None] | None
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the shards, mapped from its file and not yet copied."""
    total = max(1, sum(path.stat().st_size for path in shards))
    done = 0
    for path, wanted in shards.items():
        try:
            path.open("rb").close()  # safe_open reports a file that it may not read as absent
            with safe_open(path, framework="pt") as file:
                present = set(file.keys())
                for name in wanted if wanted is not None else file.keys():
                    if name not in present:
                        raise ValueError(f"{path} lacks {name}, which {INDEX_FILE} places there; download it again")
                    tensor = file.get_tensor(name)
                    yield name, tensor
                    done += tensor.nbytes
                    if progress is not None:
                        progress(min(1.0, done / total))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or incomplete ({error}); download it again") from None
        except OSError as error:
            raise _unreadable(path, error) from None
    if progress is not None:
        progress(1.0)


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"cannot read {path} ({error.strerror or error}); check that it exists and its permissions")
