"""The header of a GGUF file is checked before anything in it is believed."""

import random
import re
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.tiny_gguf import write_tiny_gguf

from vllm_mp.model_store.gguf_file.reader import TENSOR_TYPES, LongArray, read_gguf


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, content: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + content


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_bytes(
    entries: list[bytes] = [],  # noqa: B006
    tensors: list[bytes] = [],  # noqa: B006
    data: int = 4096,
    version: int = 3,
) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries + tensors)
    return header + bytes(-len(header) % 32 + data)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


def test_reads_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    file, expected = read_gguf(path), gguf.GGUFReader(path)
    assert {key: value for key, value in file.metadata.items() if not isinstance(value, LongArray)} == {
        key: field.contents() for key, field in expected.fields.items() if not key.startswith("GGUF.")
    }
    assert list(file.tensors) == [tensor.name for tensor in expected.tensors]
    data = np.fromfile(path, np.uint8)
    for found, wanted in zip(file.tensors.values(), expected.tensors, strict=True):
        assert list(found.shape) == wanted.shape.tolist()[::-1]
        assert found.type.name == wanted.tensor_type.name
        assert (data[found.offset :][: found.num_bytes] == wanted.data.view(np.uint8).ravel()).all()


def test_sizes_of_tensor_types_are_those_of_the_gguf_package() -> None:
    for number, kind in TENSOR_TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert (kind.name, kind.weights, kind.num_bytes) == (known.name, *gguf.GGML_QUANT_SIZES[known])


def test_version_2_and_long_arrays_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    tokens = entry("tokens", 9, array(8, 5000, text("token") * 5000))
    scores = entry("scores", 9, array(6, 5000, bytes(20_000)))
    path.write_bytes(gguf_bytes([tokens, scores], [tensor("a", [32, 2], 2)], version=2))
    file = read_gguf(path)
    assert file.metadata == {"tokens": LongArray(5000), "scores": LongArray(5000)}
    assert file.tensors["a"].num_bytes == 36


def test_many_arrays_take_little_memory_and_time(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes([entry(f"{i}", 9, array(0, 4096, bytes(4096))) for i in range(1000)]))
    tracemalloc.start()
    values = list(read_gguf(path).metadata.values())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (values[0], values[-1]) == ([0] * 4096, LongArray(4096))
    assert peak < 25_000_000
    half = array(8, 2**21 + 1, bytes(8 * (2**21 + 1)))
    path.write_bytes(gguf_bytes([entry("a", 9, half), entry("b", 9, half)]))
    with pytest.raises(ValueError, match=r"the length of b is 2097153: at most 4194304 texts are read"):
        read_gguf(path)


HUGE = 2**63
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the end of the magic number is 4: the file has 0 bytes"),
    "other magic": (b"GGML" + bytes(40), "the magic number is b'GGML'"),
    "version 1": (gguf_bytes(version=1), "the version is 1: only 2 and 3 exist"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(40), "the version is 50331648: big-endian"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "the number of tensors is 9223372036854775808"),
    "many entries": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**16), "the end of the number of metadata entries"),
    "key length": (gguf_bytes([struct.pack("<Q", HUGE)]), "the length of key 0 of the metadata is 92"),
    "empty key": (gguf_bytes([text("")]), "the length of key 0 of the metadata is 0"),
    "key bytes": (gguf_bytes([struct.pack("<Q", 1) + b"\xff"]), "it is not UTF-8"),
    "repeated key": (gguf_bytes([entry("a", 0, b"1")] * 2), "key 1 of the metadata is 'a': it is there twice"),
    "type of a value": (gguf_bytes([entry("a", 13, b"")]), "the type of a is 13: no such type"),
    "string length": (gguf_bytes([entry("a", 8, struct.pack("<Q", HUGE))]), "the end of a is 92"),
    "array length": (gguf_bytes([entry("a", 9, array(4, HUGE))]), "the end of a is 368"),
    "strings": (gguf_bytes([entry("a", 9, array(8, HUGE))]), "the end of a is 737"),
    "string in an array": (gguf_bytes([entry("a", 9, array(8, 5000, b"\xff" * 41_000))]), "the end of a is 18446"),
    "array of arrays": (gguf_bytes([entry("a", 9, array(9, 1, array(9, 1)))]), "arrays of arrays are not read"),
    "type of elements": (gguf_bytes([entry("a", 9, array(99, 1))]), "the type of the elements of a is 99"),
    "alignment": (gguf_bytes([entry("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment is 0"),
    "repeated tensor": (gguf_bytes([], [tensor("a", [8])] * 2), "the name of tensor 1 is 'a': it is there twice"),
    "dimensions": (gguf_bytes([], [tensor("a", [1] * 5)]), "the number of dimensions of a is 5"),
    "no dimension": (gguf_bytes([], [tensor("a", [])]), "the number of dimensions of a is 0"),
    "empty tensor": (gguf_bytes([], [tensor("a", [8, 0])]), r"the shape of a is \[0, 8\]"),
    "overflow": (gguf_bytes([], [tensor("a", [2**32, 2**32])]), r"the shape of a is \[4294967296, 4294967296\]"),
    "type": (gguf_bytes([], [tensor("a", [8], 4)]), "the type of a is 4: no such type"),
    "part of a block": (gguf_bytes([], [tensor("a", [48], 2)]), r"the shape of a is \[48\]: rows of Q4_0"),
    "odd offset": (gguf_bytes([], [tensor("a", [8], 0, 4)]), "the offset of a is 4: it must be a multiple of 32"),
    "far offset": (gguf_bytes([], [tensor("a", [8], 0, 2**63)]), "the end of a is 9223372036854775904: the file has"),
    "past the end": (gguf_bytes([], [tensor("a", [1025])]), "the end of a is 4164: the file has 4160 bytes"),
    "overlap": (gguf_bytes([], [tensor("a", [16]), tensor("b", [8], 0, 32)]), "the offset of b is 128: a ends at 160"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_lying_file_is_refused_by_file_field_and_value(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path)) + ": .*" + message) as caught:
        read_gguf(path)
    assert str(caught.value).endswith("download or convert it again")
    assert "\n" not in str(caught.value)


def test_absent_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*none\.gguf: No such file"):
        read_gguf(tmp_path / "none.gguf")


def _flip(content: bytearray, random: random.Random, _: int) -> None:
    for _ in range(random.randint(1, 4)):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)


def _overwrite(content: bytearray, random: random.Random, _: int) -> None:
    at = random.randrange(len(content) - 8)
    content[at : at + 8] = struct.pack("<Q", random.choice([0, 1, 2**31, 2**32, 2**63, 2**64 - 1, len(content)]))


def _cut(content: bytearray, random: random.Random, size: int) -> None:
    del content[random.randrange(size) :]


def _repeat(content: bytearray, random: random.Random, _: int) -> None:
    begin = random.randrange(len(content))
    content[begin:begin] = content[begin : begin + random.randint(1, 200)]


@pytest.mark.parametrize("damage", [_flip, _overwrite, _cut, _repeat])
def test_damaged_file_is_read_within_its_bounds_or_refused_in_one_line(
    tmp_path: Path, damage: Callable[[bytearray, random.Random, int], None]
) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    good = path.read_bytes()
    header = min(place.offset for place in read_gguf(path).tensors.values())
    draws = random.Random(0)
    tracemalloc.start()
    errors: list[str] = []
    for _ in range(60):
        content = bytearray(good[:header])
        damage(content, draws, header)
        path.write_bytes(bytes(content) + good[header:])
        try:
            file = read_gguf(path)
        except ValueError as error:
            errors.append(str(error))
        else:
            assert all(place.offset + place.num_bytes <= file.identity.size for place in file.tensors.values())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert errors
    assert all(error.startswith(f"{path}: ") and "\n" not in error for error in errors)
    assert peak < 5_000_000
