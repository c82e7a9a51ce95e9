"""The file of a model's packed weights, which cores map instead of reading and packing the model's own files.

It holds the forms in which the C++ kernels read matrices (`kernels.cpu.packed_forms`), and the parameters that a packed
model still has. Like the cache, it is for one user, and it is complete: it is renamed into place as the last act.
"""

import fcntl
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from vllm_mp.core.pages.weight_pages import map_weights
from vllm_mp.kernels.cpu.packed_forms import PackedForm
from vllm_mp.machine.file_owner import check_private

PARTIAL: Final = ".partial"
"""The end of the name of a file that is being written."""
_MAGIC: Final = b"vllm_mp1"
_HEADER_AT: Final = 16
_NUMBER_BYTES: Final = 8
"""By which a large number is longer than 0 in the header."""
_MAX_HEADER_BYTES: Final = 64 * 2**20
_DATA_ALIGNMENT: Final = 2 * 2**20
"""The data begin at a multiple of the size of a huge page."""
_ALIGNMENT: Final = 64
_CHUNK_BYTES: Final = 8 * 2**20
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.float8_e4m3fn)
}


class PackedWeights(NamedTuple):
    """All weights of a packed model."""

    parameters: Mapping[str, Tensor]
    """The parameters whose elements the model reads before or after it is packed."""
    forms: list[PackedForm]
    """In the order in which the model packs its matrices."""

    @property
    def num_bytes(self) -> int:
        forms = (tensor for form in self.forms for tensor in form if tensor is not None)
        return sum(tensor.nbytes for tensor in (*self.parameters.values(), *forms))


class _Place(msgspec.Struct):
    """Where a tensor lies."""

    at: int
    """Bytes from the begin of the data."""
    shape: list[int]
    dtype: str


class _Header(msgspec.Struct):
    data_at: int
    parameters: dict[str, _Place]
    forms: list[tuple[_Place, _Place | None, _Place | None]]


def read_packed_file(path: Path) -> PackedWeights:
    """Return the weights in the file `path`, mapped by `map_weights`.

    Raises OSError if it cannot be read, and ValueError if it is damaged or another user can read or write it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        info = os.fstat(descriptor)
        check_private(path, info)
        start = os.pread(descriptor, _HEADER_AT, 0)
        num_bytes = int.from_bytes(start[len(_MAGIC) :], "little")
        if start[: len(_MAGIC)] != _MAGIC or not 0 < num_bytes <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a file of packed weights")
        header = msgspec.msgpack.decode(os.pread(descriptor, num_bytes, _HEADER_AT), type=_Header)
        file = map_weights(descriptor, info.st_size)
    finally:
        os.close(descriptor)
    data = file[header.data_at :]

    def tensor(place: _Place) -> Tensor:
        dtype = _DTYPES[place.dtype]
        num_bytes = torch.Size(place.shape).numel() * dtype.itemsize
        if min(place.at, *place.shape, 0) < 0 or place.at % _ALIGNMENT or place.at + num_bytes > len(data):
            raise ValueError(f"{path} is damaged: a tensor lies at {place.at}")
        return data[place.at : place.at + num_bytes].view(dtype).view(place.shape)

    try:
        return PackedWeights(
            {name: tensor(place) for name, place in header.parameters.items()},
            [
                PackedForm(tensor(weight), *(None if place is None else tensor(place) for place in columns))
                for weight, *columns in header.forms
            ],
        )
    except KeyError as error:
        raise ValueError(f"{path} is damaged: the dtype {error} is unknown") from None


def write_packed_file(path: Path, weights: PackedWeights) -> bool:
    """Write `weights` to the file `path`, for its owner alone; return False if another process does so, or has.

    Raises OSError if that is not possible; nothing is left then.
    """
    partial = path.with_name(f".{path.name}{PARTIAL}")
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with FileIO(descriptor, "wb") as file:
        if not is_locked_by_this_process(file.fileno(), partial) or path.exists():
            return False
        try:
            file.truncate(0)
            _write(file, weights)
            os.fsync(file.fileno())  # otherwise a crash of the system could leave zeros under the final name
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    return True


def is_locked_by_this_process(descriptor: int, path: Path) -> bool:
    """Lock the file `descriptor` and return True; False if another process has it, or if `path` is another file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _write(file: FileIO, weights: PackedWeights) -> None:
    end = 0
    tensors: list[tuple[int, Tensor]] = []

    def place(tensor: Tensor) -> _Place:
        nonlocal end
        at = end
        tensors.append((at, tensor.detach().contiguous()))
        end = -(-(at + tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT
        return _Place(at, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    def places(form: PackedForm) -> tuple[_Place, _Place | None, _Place | None]:
        scales, sums = (None if tensor is None else place(tensor) for tensor in (form.scales, form.sums))
        return place(form.weight), scales, sums

    header = _Header(0, {name: place(tensor) for name, tensor in weights.parameters.items()}, [])
    header.forms = [places(form) for form in weights.forms]
    # The data begin where the header ends, whose size depends on that number.
    header_end = _HEADER_AT + len(msgspec.msgpack.encode(header)) + _NUMBER_BYTES
    header.data_at = -(-header_end // _DATA_ALIGNMENT) * _DATA_ALIGNMENT
    encoded = msgspec.msgpack.encode(header)
    start = _MAGIC + len(encoded).to_bytes(_HEADER_AT - len(_MAGIC), "little") + encoded
    _write_all(file, start.ljust(header.data_at, b"\0"))
    # Writes of whole aligned chunks let the system keep the file in huge pages.
    chunk, first = np.zeros(_CHUNK_BYTES, np.uint8), 0
    for at, tensor in tensors:
        left = tensor.reshape(-1).view(torch.uint8).numpy()
        while len(left):
            while at >= first + _CHUNK_BYTES:
                _write_all(file, chunk.data)
                first += _CHUNK_BYTES
            room = chunk[at - first : at - first + len(left)]
            room[:] = left[: len(room)]
            left, at = left[len(room) :], at + len(room)
    _write_all(file, chunk[: end - first].data)


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while len(left):
        left = left[file.write(left) :]
