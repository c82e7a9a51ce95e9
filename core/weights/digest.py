"""The digest of what a core has loaded: weights, config.json and tokenizer."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from vllm_mp.config import ModelConfig
from vllm_mp.model_store.folder import checkpoint_files, safetensors_header
from vllm_mp.model_store.gguf import mapped_gguf, mapped_mmproj
from vllm_mp.model_store.gguf_file.reader import GgufFile
from vllm_mp.model_store.tokenizer_files import TokenizerFiles
from vllm_mp.wire import ModelDigest

_SAMPLE_BYTES = 128
"""Bytes that are read at each of two offsets in every tensor."""
_NUM_SAMPLES = 1024
"""Number of samples of a file whose tensors are not found without reading it."""
_WITHOUT_INFLUENCE = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version"})
"""Fields of config.json that do not change what the model computes; the core's dtype is compared by itself."""


def model_digest(config: ModelConfig) -> ModelDigest:
    """Return the digest of the model that was just loaded, while its files are still in the system's memory.

    The weights' digest covers names, types and shapes of all tensors, and of each tensor a sample at its start and its
    middle: whole files would take seconds to minutes. Of a .bin file it covers samples of all parts. Names and times of
    files have no influence.
    """
    influential = {name: value for name, value in config.hf_config.items() if name not in _WITHOUT_INFLUENCE}
    return ModelDigest(
        weights=weights_digest(config),
        config=_shortened(hashlib.sha256(msgspec.json.encode(influential, order="deterministic"))),
        tokenizer=TokenizerFiles(config.tokenizer).digest(),
    )


def weights_digest(config: ModelConfig) -> str:
    """Return the digest of the weights alone."""
    if config.load_format == "dummy":
        return f"dummy {config.weights_seed}"
    if mapped_file := mapped_gguf(config.folder):
        tensors = list(_gguf_tensors(mapped_file.read()))
        if mmproj := mapped_mmproj(config.folder):
            tensors += _gguf_tensors(mmproj.read())
    else:
        tensors = [
            tensor
            for path in checkpoint_files(config.folder)
            for tensor in (_samples(path) if path.suffix == ".bin" else _tensors(path))
        ]
    return _shortened(hashlib.sha256("\n".join(sorted(tensors)).encode()))


def _tensors(path: Path) -> Iterator[str]:
    """Yield a line for each tensor of a safetensors file."""
    with path.open("rb") as file:
        tensors, data_begin = safetensors_header(file)
        for name, tensor in tensors.items():
            begin, end = (data_begin + offset for offset in tensor["data_offsets"])
            yield f"{name} {tensor['dtype']} {tensor['shape']} {_two_samples(file, begin, end)}"


def _gguf_tensors(gguf: GgufFile) -> Iterator[str]:
    """Yield a line for each tensor of a GGUF file."""
    for part in gguf.files:
        with part.path.open("rb") as file:
            for name, tensor in part.tensors.items():
                samples = _two_samples(file, tensor.offset, tensor.offset + tensor.num_bytes)
                yield f"{name} {tensor.type.name} {list(tensor.shape)} {samples}"


def _two_samples(file: BinaryIO, begin: int, end: int) -> str:
    """Return samples of the bytes from `begin` to `end`, at the start and in the middle."""
    samples = [
        os.pread(file.fileno(), min(_SAMPLE_BYTES, end - offset), offset) for offset in (begin, (begin + end) // 2)
    ]
    return b"".join(samples).hex()


def _samples(path: Path) -> Iterator[str]:
    """Yield a line for a .bin file: its size, and samples at even distances."""
    with path.open("rb") as file:
        size = path.stat().st_size
        offsets = range(0, size, max(_SAMPLE_BYTES, size // _NUM_SAMPLES))
        samples = [os.pread(file.fileno(), _SAMPLE_BYTES, offset) for offset in offsets]
    yield f"{size} {b''.join(samples).hex()}"


def _shortened(digest: "hashlib._Hash") -> str:
    return digest.hexdigest()[:32]
