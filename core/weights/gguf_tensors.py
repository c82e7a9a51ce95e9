"""The weights in a GGUF file, mapped into memory.

The mapping is shared and read-only: matrices in block types stay where they are, unless their rows are so short that
products rewrite them, and the system loads and evicts their pages. If the file is truncated while it is mapped, a read
of a missing page ends the core with SIGBUS.
"""

import functools
import logging
import mmap
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vllm_mp.core.weights.checkpoint import CheckpointMismatchError
from vllm_mp.kernels.block_weight import BLOCK_TYPES, BlockWeight, quantize_blocks
from vllm_mp.model_store.gguf import MappedGguf, mapped_gguf
from vllm_mp.model_store.gguf_file.config import GgufFamily, checkpoint_name, family_of
from vllm_mp.model_store.gguf_file.mmproj import checkpoint_names, dim_of_parts, offset_of
from vllm_mp.model_store.gguf_file.reader import GgufFile, StoredTensor
from vllm_mp.model_store.gguf_file.rope import ROPE_FACTORS

logger = logging.getLogger(__name__)

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SHARED_GATE = ".mlp.shared_expert_gate.weight"
_GATES = (".mlp.gate.weight", _SHARED_GATE)
"""The ends of the names of matrices that models keep in floats, because their outputs decide or weigh."""
_KEPT_TYPE = BLOCK_TYPES["Q8_0"]
"""The type of matrices beside others in block types whose own type has no kernel."""


def gguf_tensors(
    mapped_file: MappedGguf,
    keeps_blocks: bool,
    progress: Callable[[float], None] | None,
    wanted: Callable[[str], bool] = lambda _: True,
) -> Iterator[tuple[str, Tensor | BlockWeight]]:
    """Yield the name in a checkpoint and the weight of each tensor in `mapped_file`.

    A tensor of all experts of a layer becomes a matrix for each. With `keeps_blocks`, matrices in the types of
    `BLOCK_TYPES` are yielded as they lie in the file, and all other matrices but gates are rounded to `_KEPT_TYPE`. All
    other tensors are in float dtypes. Tensors whose name is not `wanted` are not read. `progress` is called with the
    fraction of the bytes done, ending at 1.0. Raises ValueError as `MappedGguf.read` does, before anything is mapped.
    """
    file = mapped_file.read()
    family = family_of(file)
    assert family is not None  # the folder was made of the same header
    maps = [_mapped(part) for part in file.files]
    total = sum(part.identity.size for part in file.files)
    converted: Counter[str] = Counter()
    done = 0
    for stored_name, stored in file.tensors.items():
        heads = _interleaved_heads(file, family, stored_name)
        own_name = checkpoint_name(stored_name, family) or stored_name
        mapped = maps[stored.part]
        for name, tensor in _single_tensors(own_name, stored) if stored_name not in ROPE_FACTORS else ():
            if not wanted(name):
                continue
            weight = _weight(mapped, tensor, keeps_blocks and not name.endswith(_GATES))
            if tensor.type.name != (weight.type.name if isinstance(weight, BlockWeight) else _NAMES[weight.dtype]):
                kind = f"to {weight.type.name}" if isinstance(weight, BlockWeight) else "to floats"
                converted[f"{tensor.type.name} {kind}"] += tensor.num_bytes
            if family.norm_offset and stored_name.endswith("_norm.weight") and isinstance(weight, Tensor):
                weight = weight.float() - family.norm_offset
            lies_in_file = isinstance(weight, BlockWeight) and weight.type.name == tensor.type.name
            if heads and tensor.shape[0] % (2 * heads) == 0:
                weight = _with_split_heads(weight, heads)
                lies_in_file = False
            yield name, weight
            if not lies_in_file:
                _release(mapped, tensor)  # the consumer has copied it
        done += stored.num_bytes
        if progress is not None:
            progress(min(1.0, done / total))
    if progress is not None:
        progress(1.0)
    if converted:
        counts = ", ".join(f"{count:,} bytes of {kind}" for kind, count in sorted(converted.items()))
        logger.info("%s: converted when they were loaded: %s", mapped_file.path, counts)


def image_tensors(mapped_file: MappedGguf) -> Iterator[tuple[str, Tensor]]:
    """Yield the name in a checkpoint and the weight, in a float dtype, of each tensor in a file of image parts.

    The consumer must copy a weight before it takes the next one. Raises ValueError as `MappedGguf.read` does.
    """
    file = mapped_file.read()
    maps = [_mapped(part) for part in file.files]
    parts: dict[str, list[str]] = {}
    for stored_name, name in checkpoint_names(file).items():
        parts.setdefault(name, []).append(stored_name)
    for name, stored_names in parts.items():
        weights = [_weight(maps[file.tensors[each].part], file.tensors[each], False) for each in stored_names]
        floats = [weight for weight in weights if isinstance(weight, Tensor)]
        if dim := dim_of_parts(name):
            weight = torch.stack(floats, dim)
        else:
            weight = floats[0] if len(floats) == 1 else torch.cat(floats)
        offset = offset_of(stored_names[0])
        yield name, weight.float() - offset if offset else weight
        for each in stored_names:
            _release(maps[file.tensors[each].part], file.tensors[each])


def _mapped(file: GgufFile) -> mmap.mmap:
    """Return the content of a file, or of one part, mapped into memory."""
    with file.path.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), file.identity.size, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_WILLNEED)
    return mapped


def has_block_types(folder: Path) -> bool:
    """Tell whether most weights in matrices of the GGUF file that `folder` names are quantized, in any type.

    The other matrices can then be rounded to `_KEPT_TYPE`. False if `folder` names no file.
    """
    mapped_file = mapped_gguf(folder)
    if mapped_file is None:
        return False
    matrices = [tensor for tensor in mapped_file.read().tensors.values() if len(tensor.shape) >= 2]
    quantized = sum(prod(tensor.shape) for tensor in matrices if tensor.type.name not in _DTYPES)
    fits = all(tensor.shape[-1] % _KEPT_TYPE.weights == 0 for tensor in matrices)
    return fits and 2 * quantized > sum(prod(tensor.shape) for tensor in matrices)


def _single_tensors(name: str, stored: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensor `name` as checkpoints have it: the matrices of all experts as one for each."""
    if ".experts." in name and len(stored.shape) == 3:
        experts, *shape = stored.shape
        size = stored.num_bytes // experts
        for expert in range(experts):
            matrix = StoredTensor(tuple(shape), stored.type, stored.offset + expert * size, size)
            yield name.replace(".experts.", f".experts.{expert}."), matrix
    elif name.endswith(_SHARED_GATE) and len(stored.shape) == 1:
        yield name, stored._replace(shape=(1, *stored.shape))
    else:
        yield name, stored


def _weight(mapped: mmap.mmap, stored: StoredTensor, keeps_blocks: bool) -> Tensor | BlockWeight:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of memory that is read-only
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=stored.num_bytes, offset=stored.offset)
    kind, is_matrix = stored.type.name, len(stored.shape) == 2
    if kind in BLOCK_TYPES and is_matrix:
        release = functools.partial(_release, mapped, stored)
        weight = BlockWeight(data.view(stored.shape[0], -1), BLOCK_TYPES[kind], stored.shape[1], release)
        return weight if keeps_blocks else weight.dequantized()
    if kind in _DTYPES:
        floats = data.view(_DTYPES[kind]).view(stored.shape)
    else:
        # Imported here, because few files have other types.
        import gguf

        rows = data.view(prod(stored.shape[:-1]), -1).numpy()
        try:
            dequantized = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
        except NotImplementedError:
            raise CheckpointMismatchError(f"weights of the type {kind} cannot be read") from None
        floats = torch.from_numpy(np.ascontiguousarray(dequantized)).view(stored.shape)
    return quantize_blocks(floats, _KEPT_TYPE) if keeps_blocks and is_matrix else floats


def _interleaved_heads(file: GgufFile, family: GgufFamily, name: str) -> int:
    """Return the heads whose rows the tensor `name` has in interleaved order; 0 for other tensors."""
    kind = name.split(".")[-2] if name.count(".") >= 2 else ""
    if not family.interleaves_heads or kind not in ("attn_q", "attn_k"):
        return 0
    architecture = file.metadata["general.architecture"]
    heads = file.metadata[f"{architecture}.attention.head_count"]
    if kind == "attn_k":
        heads = file.metadata.get(f"{architecture}.attention.head_count_kv", heads)
    assert isinstance(heads, int)
    return heads


def _with_split_heads(weight: Tensor | BlockWeight, heads: int) -> Tensor | BlockWeight:
    """Return a copy with the two halves of each head's rotated pairs one after the other, as the models have them."""
    rows = weight.data if isinstance(weight, BlockWeight) else weight
    pairs = rows.view(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    split = pairs.transpose(1, 2).reshape(rows.shape)
    return BlockWeight(split, weight.type, weight.inputs) if isinstance(weight, BlockWeight) else split


def _release(mapped: mmap.mmap, stored: StoredTensor) -> None:
    """Let the system take back the pages of the file that lie in the tensor."""
    begin = -(-stored.offset // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (stored.offset + stored.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        mapped.madvise(mmap.MADV_DONTNEED, begin, end - begin)
