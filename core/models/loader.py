"""Load a model: choose its native module or transformers' own, and give it its weights."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import nn

from vllm_mp.config import ModelConfig
from vllm_mp.core.collectives.group import ALONE, RankGroup, bind_group
from vllm_mp.core.models import CausalLM, NativeModel, build_model
from vllm_mp.core.weights.block_matrix import count_block_weights
from vllm_mp.core.weights.checkpoint import CheckpointMismatchError, count_parameters
from vllm_mp.core.weights.checkpoint_files import read_tensors
from vllm_mp.core.weights.cuts import is_of_stage
from vllm_mp.core.weights.dummy import fill_with_dummy_weights
from vllm_mp.core.weights.four_bit_checkpoint import unpacked
from vllm_mp.core.weights.gguf_tensors import gguf_tensors, has_block_types
from vllm_mp.core.weights.packed_cache import find_packed, packed_path, remove_packed
from vllm_mp.core.weights.packed_file import PackedWeights
from vllm_mp.kernels import ops
from vllm_mp.kernels.cpu.packed_forms import PackedFormError, record_forms, reuse_forms
from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.families.registry import decoder_without_head
from vllm_mp.model_config.pipeline_parallel import stage_of
from vllm_mp.model_config.tensor_parallel import check_tensor_parallel, shard_of
from vllm_mp.model_store.folder import checkpoint_files
from vllm_mp.model_store.gguf import mapped_gguf

logger = logging.getLogger(__name__)

_SMALL_BYTES = 2**20
"""Larger parameters are released while the model is packed, which needs less memory then."""


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] | None = None,
    cache_dtype: torch.dtype | None = None,
    group: RankGroup = ALONE,
    stage: int = 0,
    num_stages: int = 1,
    keep_packed: Callable[[Path, PackedWeights], None] | None = None,
) -> CausalLM:
    """Return the model of `config` with its weights: the native one if there is one, else transformers' own.

    The model's KV cache must be of `cache_dtype`, by default `dtype`. `progress` is called with the fraction done. The
    model holds the share of this process in `group`, of the layers of `stage`. A whole model on a CPU maps its packed
    weights if the model cache has them; if it does not, `keep_packed` is called with the path where they belong and the
    weights, which are those of the model.
    Raises ValueError naming what is wrong with the checkpoint, or why its architecture or quantization cannot run.
    """
    arch = config.architecture
    if isinstance(arch, NativeArchitecture):
        if device.type == "cpu":
            ops.set_batch_invariant(config.batch_invariant)
        if arch.rope is not None:
            # Rotary angles are computed for the positions that requests can have, and LongRoPE's for that context.
            arch = msgspec.structs.replace(arch, max_position=config.max_model_len)
        if arch.blocks is not None and device.type != "cpu":
            raise ValueError(
                f"quantization={config.quantization!r} is computed on CPUs only, and the device is {device}; set "
                "device='cpu', or leave the quantization out"
            )
        keeps_blocks = (
            config.quantization is None
            and config.load_format != "dummy"
            and ops.computes_blocks(device, dtype)
            and has_block_types(config.folder)
        )
        if keeps_blocks:
            arch = msgspec.structs.replace(arch, blocks="gguf")
            check_tensor_parallel(arch, group.size, config.model)
        whole, arch = arch, shard_of(stage_of(arch, stage, num_stages), group.rank, group.size)
        quantization = "int8" if config.quantization == "int8" else None
        is_whole = group.size == num_stages == 1
        is_packed = device.type == "cpu" and arch.blocks is None and arch.fp8 is None
        # Scales of a cache of 8-bit floats are read with the weights.
        maps = is_packed and is_whole and cache_dtype in (None, dtype, torch.int8)
        path = packed_path(config, dtype) if maps else None
        if path is not None and (mapped := _mapped_model(path, arch, dtype, quantization)) is not None:
            if progress is not None:
                progress(1.0)
            bind_group(cast("nn.Module", mapped), group)
            return mapped
        model = build_model(arch, dtype, device)
        load_weights(model, config.folder, config.load_format, config.weights_seed, progress, keeps_blocks)
        native = cast("NativeModel", model)
        counted = model if is_whole else build_model(whole, dtype, "meta")
        native.num_parameters = count_parameters(counted) + count_block_weights(counted)
        # `load_weights` made all other kinds of weights already.
        if path is None or keep_packed is None:
            native.pack(quantization, cache_dtype or dtype)
        elif (packed := _pack_and_record(model, quantization, dtype)) is not None:
            keep_packed(path, packed)
        bind_group(model, group)
        return native
    # Imported here, because importing transformers takes seconds, which native models do not need.
    from vllm_mp.core.models.transformers import backend as transformers_backend

    return transformers_backend.load_model(
        config, dtype, device, progress or (lambda _: None), group, stage, num_stages
    )


def _mapped_model(
    path: Path, arch: NativeArchitecture, dtype: torch.dtype, quantization: str | None
) -> NativeModel | None:
    """Return the model whose packed weights are in the file `path`; None if there is none that fits."""
    packed = find_packed(path)
    if packed is None:
        return None
    model = build_model(arch, dtype, "cpu")
    native = cast("NativeModel", model)
    native.num_parameters = count_parameters(model)
    parameters = dict(model.named_parameters())
    try:
        for name, value in packed.parameters.items():
            parameter = parameters.get(name)
            if parameter is None or (parameter.shape, parameter.dtype) != (value.shape, value.dtype):
                raise PackedFormError(f"the model has no parameter {name} {list(value.shape)} of {value.dtype}")
            parameter.data = value
        # The other parameters have no values; the forms replace them.
        with reuse_forms(packed.forms):
            native.pack(quantization, dtype)
    except PackedFormError as error:
        logger.warning("the packed weights in %s do not fit: %s; the model's own files are read", path, error)
        remove_packed(path)
        return None
    return native


def _pack_and_record(model: nn.Module, quantization: str | None, dtype: torch.dtype) -> PackedWeights | None:
    """Pack `model`, and return its weights for `_mapped_model`; None if that could not make it of them."""
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    kept = {name: parameter for name, parameter in model.named_parameters() if parameter.nbytes <= _SMALL_BYTES}
    with record_forms(model) as recorder:
        cast("NativeModel", model).pack(quantization, dtype)
    kept |= {name: parameter for name, parameter in model.named_parameters() if name in sizes}
    is_complete = all(name in kept or recorder.has_all_of(name) for name in sizes)
    return (
        PackedWeights({name: value.detach() for name, value in kept.items()}, recorder.forms) if is_complete else None
    )


def load_weights(
    model: nn.Module,
    folder: Path,
    load_format: str,
    seed: int,
    progress: Callable[[float], None] | None = None,
    keeps_blocks: bool = False,
) -> None:
    """Fill every parameter of a model that `build_model` made.

    `load_format="dummy"` draws random weights from `seed` alone. Any other format reads the GGUF file that `folder`
    names, or else safetensors from `folder`, one file or shards with an index. Weights are cast to the dtype of the
    parameters; with `keeps_blocks`, matrices of a GGUF file stay where they lie, for a model with `blocks="gguf"`.
    `progress` is called with the fraction done, ending at 1.0. A stage of a pipeline reads its tensors only.
    Raises ValueError, naming the file, the cause and the remedy, when weights are absent, unreadable, damaged
    or belong to another model.
    """
    if load_format == "dummy":
        fill_with_dummy_weights(model, seed)
        if progress is not None:
            progress(1.0)
        return
    loader: Any = model
    mapped_file = mapped_gguf(folder)
    try:
        wanted = functools.partial(is_of_stage, arch=loader.arch)
        if mapped_file is not None:
            loader.load_weights(gguf_tensors(mapped_file, keeps_blocks, progress, wanted))
        else:
            # Tensors are mapped, so that the others are not read.
            tensors = (pair for pair in read_tensors(checkpoint_files(folder), progress) if wanted(pair[0]))
            four_bits = loader.arch.four_bits
            loader.load_weights(tensors if four_bits is None else unpacked(tensors, four_bits))
    except CheckpointMismatchError as error:
        if mapped_file is not None:
            raise ValueError(f"{mapped_file.path}: {error}; convert the model to GGUF again") from None
        remedy = "Check that config.json and the weights belong to the same model."
        if str(error).endswith(": missing lm_head.weight"):
            name = decoder_without_head(loader.arch.name)
            remedy = f'If it is a model for vectors, write "architectures": ["{name}"] in config.json.'
        raise ValueError(f"{folder}: {error}. {remedy}") from None
