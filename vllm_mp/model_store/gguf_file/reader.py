"""The header of a GGUF file: metadata and the offsets of its tensors, checked before anything is believed.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, in versions 2 and 3, little-endian. A file may
be hostile: the header is read, not mapped, so that a file that shrinks meanwhile ends no process, and every count and
length is compared with the bytes that are there before memory or time is spent on it.
"""

import hashlib
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

MAX_HEADER_BYTES: Final = 2**27
"""The longest header that is read: 128 MiB; headers of vocabularies with 260,000 tokens have 16 MB."""
_MAX_ENTRIES: Final = 2**16
"""Maximum number of metadata entries, and of tensors."""
_MAX_NAME_BYTES: Final = 2**10
"""Longest key, and longest name of a tensor."""
_MAX_KEPT_ELEMENTS: Final = 2**12
"""Longer arrays (vocabularies) are checked, and only their number of elements is kept."""
_MAX_ALL_KEPT: Final = 2**18
"""Maximum number of elements that are kept of all arrays."""
_MAX_STRINGS: Final = 2**22
"""Maximum number of texts in all arrays; files with 260,000 tokens have about 800,000 with their merges."""
_MAX_DIMENSIONS: Final = 4
_FIRST_BYTES: Final = 2**20
"""Size of the first read; later reads double it."""
_REMEDY: Final = "the file is damaged or incomplete: download or convert it again"

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type numbers of metadata, and their codes for `struct`."""
_STRING, _ARRAY = 8, 9


class TensorType(NamedTuple):
    """A type of tensor: `weights` weights in a block of `num_bytes` bytes."""

    name: str
    weights: int
    num_bytes: int


TENSOR_TYPES: Final = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}
"""The types of tensors by their number in files."""


class LongArray(NamedTuple):
    """An array of the metadata that is too long to keep."""

    length: int


Scalar = int | float | bool | str
Value = Scalar | list[int] | list[float] | list[bool] | list[str] | LongArray


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    shape: tuple[int, ...]
    """Rows first, as torch has it."""
    type: TensorType
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int
    part: int = 0
    """The number of the part that holds it, from 0."""


class FileIdentity(NamedTuple):
    """What changes when a file is written or replaced."""

    size: int
    mtime_ns: int
    device: int
    inode: int


@dataclass(frozen=True)
class GgufFile:
    """The checked header of the file `path`, or those of all parts of a split file."""

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, StoredTensor]
    digest: str
    """SHA-256 of the header, in hex."""
    identity: FileIdentity
    parts: "tuple[GgufFile, ...]" = ()
    """The parts of a split file, whose first part has `path` and `identity`; () for a file that is not split."""

    @property
    def files(self) -> "tuple[GgufFile, ...]":
        """The parts, or the file itself."""
        return self.parts or (self,)


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header of `path`.

    Raises ValueError, naming file, field, value and remedy, for a file that is not a GGUF file, is damaged
    or cannot be read.
    """
    try:
        with path.open("rb") as file:
            return _read(path, file)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; check the file and its rights") from error


def file_identity(status: os.stat_result) -> FileIdentity:
    """Return the identity of the file with this `status`."""
    return FileIdentity(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)


def _read(path: Path, file: BinaryIO) -> GgufFile:
    identity = file_identity(os.fstat(file.fileno()))
    header = _Header(path, file, identity.size)
    magic = header.take(4, "the magic number")
    if magic != b"GGUF":
        raise header.error("the magic number", magic, "it must be b'GGUF'")
    version = header.number("I", "the version")
    if version not in (2, 3):
        is_big_endian = version in (2 << 24, 3 << 24)
        reason = "big-endian files are not read: convert it for this machine" if is_big_endian else "only 2 and 3 exist"
        raise header.error("the version", version, reason)
    num_tensors = header.count("the number of tensors", 24)
    num_entries = header.count("the number of metadata entries", 12)
    metadata: dict[str, Value] = {}
    for i in range(num_entries):
        key = header.name(f"key {i} of the metadata")
        if key in metadata:
            raise header.error(f"key {i} of the metadata", key, "it is there twice")
        metadata[key] = header.value(key)
    tensors = _read_tensors(header, num_tensors, metadata.get("general.alignment", 32))
    return GgufFile(path, metadata, tensors, header.digest(), identity)


def _read_tensors(header: "_Header", count: int, alignment: Value) -> dict[str, StoredTensor]:
    if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & alignment - 1:
        raise header.error("general.alignment", alignment, "it must be a power of two from 8 to 1048576")
    found: dict[str, tuple[tuple[int, ...], TensorType, int]] = {}
    for i in range(count):
        name = header.name(f"the name of tensor {i}")
        if name in found:
            raise header.error(f"the name of tensor {i}", name, "it is there twice")
        found[name] = (header.shape(name), header.type(name), header.number("Q", f"the offset of {name}"))
    begin = -(-header.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for name, (shape, kind, offset) in found.items():
        if shape[-1] % kind.weights:
            raise header.error(
                f"the shape of {name}", list(shape), f"rows of {kind.name} have blocks of {kind.weights}"
            )
        num_bytes = prod(shape) // kind.weights * kind.num_bytes
        if offset % alignment:
            raise header.error(f"the offset of {name}", offset, f"it must be a multiple of {alignment}")
        if begin + offset + num_bytes > header.size:
            end = begin + offset + num_bytes
            raise header.error(f"the end of {name}", end, f"the file has {header.size} bytes")
        tensors[name] = StoredTensor(shape, kind, begin + offset, num_bytes)
    _check_overlaps(header, tensors)
    return tensors


def _check_overlaps(header: "_Header", tensors: dict[str, StoredTensor]) -> None:
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise header.error(f"the offset of {name}", tensor.offset, f"{before} ends at {end}")
        end, before = tensor.offset + tensor.num_bytes, name


class _Header:
    """The bytes of a header from its start, and the position of the next field."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._bytes = bytearray()
        self._num_kept = 0
        self._num_strings = 0
        self.size = size
        self.position = 0

    def error(self, field: str, value: object, reason: str) -> ValueError:
        text = repr(value)
        text = text if len(text) <= 80 else text[:77] + "..."
        return ValueError(f"{self._path}: {field} is {text}: {reason}; {_REMEDY}")

    def digest(self) -> str:
        return hashlib.sha256(memoryview(self._bytes)[: self.position]).hexdigest()

    def _require(self, count: int, field: str) -> None:
        """Read until `count` bytes after the position are in memory."""
        end = self.position + count
        if end <= len(self._bytes):
            return
        if end > min(self.size, MAX_HEADER_BYTES):
            limit = f"the file has {self.size} bytes, and its header may have {MAX_HEADER_BYTES}"
            raise self.error(f"the end of {field}", end, limit)
        wanted = min(self.size, MAX_HEADER_BYTES, max(end, 2 * len(self._bytes), _FIRST_BYTES))
        self._bytes += self._file.read(wanted - len(self._bytes))
        if end > len(self._bytes):
            raise self.error("the size of the file", len(self._bytes), "it shrinks while it is read")

    def take(self, count: int, field: str) -> bytes:
        self._require(count, field)
        self.position += count
        return bytes(self._bytes[self.position - count : self.position])

    def number(self, code: str, field: str) -> int:
        """Return an integer of the type that `struct` calls `code`."""
        return int(struct.unpack("<" + code, self.take(struct.calcsize(code), field))[0])

    def count(self, field: str, least_bytes: int) -> int:
        """Return a number of entries that have at least `least_bytes` bytes each."""
        count = self.number("Q", field)
        if count > _MAX_ENTRIES:
            raise self.error(field, count, f"at most {_MAX_ENTRIES} are read")
        self._require(count * least_bytes, field)
        return count

    def name(self, field: str) -> str:
        length = self.number("Q", f"the length of {field}")
        if not 0 < length <= _MAX_NAME_BYTES:
            raise self.error(f"the length of {field}", length, f"it must be from 1 to {_MAX_NAME_BYTES} bytes")
        text = self.take(length, field)
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise self.error(field, text, "it is not UTF-8") from None

    def shape(self, name: str) -> tuple[int, ...]:
        dimensions = self.number("I", f"the number of dimensions of {name}")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self.error(f"the number of dimensions of {name}", dimensions, f"it must be 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self.number("Q", f"the shape of {name}") for _ in range(dimensions))[::-1]
        if not all(shape) or prod(shape) > 2**48:
            raise self.error(f"the shape of {name}", list(shape), "it must have from 1 to 2**48 elements")
        return shape

    def type(self, name: str) -> TensorType:
        number = self.number("I", f"the type of {name}")
        if number not in TENSOR_TYPES:
            raise self.error(f"the type of {name}", number, "no such type is known")
        return TENSOR_TYPES[number]

    def value(self, key: str) -> Value:
        kind = self.number("I", f"the type of {key}")
        if kind == _STRING:
            return self.take(self.number("Q", f"the length of {key}"), key).decode(errors="replace")
        if kind in _SCALARS:
            return self._scalars(_SCALARS[kind], 1, key)[0]
        if kind != _ARRAY:
            raise self.error(f"the type of {key}", kind, "no such type is known")
        kind = self.number("I", f"the type of the elements of {key}")
        length = self.number("Q", f"the length of {key}")
        if kind == _STRING:
            return self._strings(length, key)
        if kind not in _SCALARS:
            reason = "arrays of arrays are not read" if kind == _ARRAY else "no such type is known"
            raise self.error(f"the type of the elements of {key}", kind, reason)
        if not self._keeps(length):
            num_bytes = length * struct.calcsize(_SCALARS[kind])
            self._require(num_bytes, key)
            self.position += num_bytes
            return LongArray(length)
        return self._scalars(_SCALARS[kind], length, key)

    def _keeps(self, count: int) -> bool:
        """Tell whether the `count` elements of an array are kept, which then count."""
        if count > _MAX_KEPT_ELEMENTS or self._num_kept + count > _MAX_ALL_KEPT:
            return False
        self._num_kept += count
        return True

    def _scalars(self, code: str, count: int, key: str) -> list[int] | list[float] | list[bool]:
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code), key)))

    def _strings(self, count: int, key: str) -> Value:
        self._require(8 * count, key)
        self._num_strings += count
        if self._num_strings > _MAX_STRINGS:
            raise self.error(f"the length of {key}", count, f"at most {_MAX_STRINGS} texts are read of a file")
        if self._keeps(count):
            texts = (self.take(self.number("Q", f"a length in {key}"), key) for _ in range(count))
            return [text.decode(errors="replace") for text in texts]
        for _ in range(count):
            length = self.number("Q", f"a length in {key}")
            self._require(length, key)
            self.position += length
        return LongArray(count)
