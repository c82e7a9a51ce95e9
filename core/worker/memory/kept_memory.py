"""The memory of the KV cache that outlives a core, because the core's parent has made it and keeps it.

A file in memory holds a header, the `SealTable`, and the caches of all layers. The header says for which model, device
code and layout they are; a core that computes or lays out anything else finds nothing. A lock, which the kernel gives
back when no process maps the file any more, keeps a core that is still there from writing beside its successor. A core
that stops after its last step gives it back itself.

The caches of a core on a GPU lie in memory of the device (`DeviceMemory`), and the file holds the header and the table
alone. The nonce in the header is the name of the memory that belongs to them.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_mp.core.pages.mapping import map_aligned, map_pages
from vllm_mp.core.scheduler.cache.file_header import HEADER_BYTES, KeptHeader, read_header, write_header
from vllm_mp.core.scheduler.cache.prefix_file import PrefixFile
from vllm_mp.core.scheduler.cache.prefix_reader import PrefixReader
from vllm_mp.core.scheduler.cache.seal_table import SealTable
from vllm_mp.core.weights.code_digest import code_digest
from vllm_mp.core.worker.memory.cuda_driver import CudaDriver
from vllm_mp.core.worker.memory.device_memory import DeviceMemory, Driver
from vllm_mp.core.worker.memory.huge_pages import HugePages
from vllm_mp.core_link.core_launch import KeptCache
from vllm_mp.core_link.mailbox import empty_mailbox
from vllm_mp.machine.loading_thread import BESIDE_A_CORE, run_in_thread

logger = logging.getLogger(__name__)

KVShapes = Sequence[tuple[tuple[int, int], tuple[int, int]]]
"""((heads, dim) of keys, the same of values) of each layer."""

_ALIGNMENT: Final = 4096
_LOCK_WAIT_S: Final = 2.0
"""Time that processes of an earlier core, which was killed, get to end."""
_LOCK_STEP_S: Final = 0.005
_MAP_BYTES: Final = 16 * 2**20
"""Bytes that are mapped at a time: `EarlyMap.stop` waits for them."""
_NEW_BYTES: Final = 32 * 2**20
"""Bytes of new data in the file from which on all of it is looked at once more."""


class EarlyMap:
    """The file, mapped before `KeptMemory` has it: while an earlier core still uses it, or while its successor starts.

    Otherwise the first step would wait for the system to map each page of the cache that it reads, of which there may
    be a million.
    """

    def __init__(self, descriptor: int, memory: npt.NDArray[np.uint8]) -> None:
        self.descriptor = descriptor
        self.memory = memory
        self._stops = threading.Event()
        self._thread: threading.Thread | None = None
        self._num_bytes = 0
        """Bytes of data that the file had at the last call of `map_new_pages`."""

    def map_pages(self) -> None:
        """Have the system map all pages with data. The others are left out, because they would take memory."""
        address, size, end = self.memory.ctypes.data, len(self.memory), 0
        with contextlib.suppress(OSError):  # there is no more data, or the system cannot tell; it only saves time
            while end < size and not self._stops.is_set():
                begin = os.lseek(self.descriptor, end, os.SEEK_DATA)
                end = min(os.lseek(self.descriptor, begin, os.SEEK_HOLE), begin + _MAP_BYTES)
                map_pages(address + begin, min(end, size) - begin)

    def map_new_pages(self) -> None:
        """Map all pages with data at a low priority, if there are clearly more than at the last call."""
        num_bytes = 512 * os.fstat(self.descriptor).st_blocks
        if num_bytes >= self._num_bytes + _NEW_BYTES:
            self._num_bytes = num_bytes
            run_in_thread(self.map_pages, niceness=BESIDE_A_CORE)

    def map_pages_beside(self, before: Callable[[], None]) -> None:
        """Call `before` and `map_pages` in a thread; `stop` must be called before the file is made shorter."""

        def run() -> None:
            before()
            self.map_pages()

        self._thread = threading.Thread(target=run, name="page-mapper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Map no more pages; idempotent."""
        self._stops.set()
        if self._thread is not None:
            self._thread.join()


def map_early(descriptor: int) -> EarlyMap | None:
    """Map the file of an earlier core, without its pages, for `KeptMemory`; None if there is no cache in it."""
    opened = _open_again(descriptor)
    size = os.fstat(opened).st_size
    if size <= HEADER_BYTES:
        os.close(opened)
        return None
    return EarlyMap(opened, map_aligned(opened, size))


class KeptMemory:
    """The file behind a descriptor that the parent has passed on. One core at a time uses it."""

    def __init__(
        self,
        descriptor: int,
        adopts: bool,
        prefix_file: int | None = None,
        device_memory: DeviceMemory | None = None,
        early: EarlyMap | None = None,
    ) -> None:
        """`adopts`: the caches of an earlier core may be used. `prefix_file`: descriptor of the prefix cache file.
        `device_memory`: where the caches lie; None: in the file.

        `early` is what `map_early` has made of the same file. Raises OSError if an earlier core is still there.
        """
        self._early = early
        self._descriptor = _open_again(descriptor) if early is None else early.descriptor
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self._stop_mapping()
                    os.close(self._descriptor)
                    raise
                time.sleep(_LOCK_STEP_S)
        self._device_memory = device_memory
        if not adopts:
            self.empty()
        self._map: npt.NDArray[np.uint8] | None = None
        self._huge_pages: HugePages | None = None
        """Of the caches in the file; None until there are some."""
        self._header: KeptHeader | None = None
        """What `caches` has written."""
        self._caches_at = 0
        """Where the caches begin in the file, or where it ends if they lie in memory of a device."""
        self._block_size = 0
        self._fingerprint = ""
        self._segments: list[tuple[int, int]] = []
        """As in the header."""
        self._file_fingerprint = ""
        """As in the header."""
        self._prefix_file = None if prefix_file is None else PrefixFile(prefix_file)

    def num_blocks(self, block_size: int, identity: Sequence[object]) -> int:
        """Return how many blocks an earlier core has left, the padding block included; 0 if there are none to use.

        `identity` is all that decides what the caches hold and how they are laid out; its items have a `str` that says
        what they are.
        """
        self._block_size = block_size
        self._fingerprint = self._fingerprint_of(identity)
        header = read_header(self._descriptor, KeptHeader)
        if header is not None and header.fingerprint == self._fingerprint:
            begin, size = header.segments[-1]
            end = begin + _aligned(header.num_blocks * size)
            if self._device_memory is None or self._device_memory.find(header.nonce, end):
                return header.num_blocks
        elif header is not None:
            logger.info("the KV cache of the core before is of another model or layout: prompts are read again")
        self.empty()
        return 0

    def empty(self) -> None:
        """Give back what an earlier core has left."""
        self._stop_mapping()
        os.ftruncate(self._descriptor, 0)
        if self._device_memory is not None:
            self._device_memory.release()

    @property
    def is_in_use(self) -> bool:
        """Whether there are caches, of this core or of an earlier one that left them to it."""
        return self._map is not None or read_header(self._descriptor, KeptHeader) is not None

    def caches(self, num_blocks: int, shapes: KVShapes, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Return (keys, values) of each layer, [num_blocks, block_size, heads, dim] each, as they are in the memory.

        `num_blocks` is what the method of this name returned, if that is used. The memory is not zeroed, and untouched
        pages of the file take none. Raises OSError if file or device cannot have this size.
        """
        block_bytes = [dtype.itemsize * self._block_size * heads * dim for layer in shapes for heads, dim in layer]
        self._caches_at = HEADER_BYTES + _aligned(SealTable.num_bytes(num_blocks, self._block_size))
        end = self._caches_at if self._device_memory is None else 0
        self._segments = []
        for size in block_bytes:
            self._segments.append((end, size))
            end += _aligned(num_blocks * size)
        file_size = end if self._device_memory is None else self._caches_at
        nonce = secrets.token_hex(8)
        if self._map is None:
            header = read_header(self._descriptor, KeptHeader)
            if os.fstat(self._descriptor).st_size != file_size or header is None or header.num_blocks != num_blocks:
                self._stop_mapping()
                os.ftruncate(self._descriptor, 0)
                os.ftruncate(self._descriptor, file_size)
            else:
                nonce = header.nonce
            early = self._early
            is_whole = early is not None and len(early.memory) == file_size
            of_file = early.memory if early is not None and is_whole else map_aligned(self._descriptor, file_size)
        else:
            os.ftruncate(self._descriptor, file_size)  # after `release`
            of_file = self._map
        if self._device_memory is None:
            memory = torch.from_numpy(of_file)
            self._huge_pages = HugePages(of_file, self._segments, num_blocks, self._num_used_blocks())
        else:
            memory = self._device_memory.tensor(nonce, end)
        self._map = of_file
        tensors = []
        for (offset, size), shape in zip(self._segments, [each for layer in shapes for each in layer], strict=True):
            flat = memory[offset : offset + num_blocks * size].view(dtype)
            tensors.append(flat.view(num_blocks, self._block_size, *shape))
        self._header = KeptHeader(
            self._fingerprint, num_blocks, self._block_size, self._segments, nonce, self._file_fingerprint
        )
        write_header(self._descriptor, self._header)
        return list(zip(tensors[::2], tensors[1::2], strict=True))

    def use_cells(self, cells: Tensor) -> None:
        """Prepare the memory of the cells `cells` [n], int64, for a step that writes them; no-op on a GPU."""
        if self._huge_pages is not None:
            self._huge_pages.cover(int(cells.max()) // self._block_size + 1)

    def cover_ahead(self) -> bool:
        """Do what `HugePages.cover_ahead` does; return False if the caches lie in no huge pages."""
        return self._huge_pages is not None and self._huge_pages.cover_ahead()

    def _num_used_blocks(self) -> int:
        """Return how many blocks the file has memory for already, by its first segment."""
        begin, size = self._segments[0]
        return (os.lseek(self._descriptor, begin, os.SEEK_HOLE) - begin) // size

    def table(self) -> SealTable:
        """Return the table of what the blocks hold; `caches` must have been called."""
        assert self._header is not None
        assert self._map is not None
        return SealTable(self._map.data[HEADER_BYTES:], self._header.num_blocks, self._block_size)

    def prefix_reader(self, num_bytes: int, beat: Callable[[], None]) -> PrefixReader | None:
        """Return what reads blocks of the prefix cache file into the caches; None if there is no such file.

        The file has at most `num_bytes`; one of another model or layout is emptied. `beat` is called after each block.
        `caches` must have been called. Raises ValueError if not a single block fits.
        """
        file = self._prefix_file
        if file is None:
            return None
        assert self._header is not None
        assert self._map is not None
        memory = self._map.data

        def views(block: int) -> list[memoryview]:
            return [memory[begin + block * size : begin + (block + 1) * size] for begin, size in self._segments]

        self._file_fingerprint = hashlib.sha256(f"{self._fingerprint} {code_digest()}".encode()).hexdigest()
        try:
            file.prepare(self._file_fingerprint, sum(size for _, size in self._segments), num_bytes)
            self._header = msgspec.structs.replace(self._header, file_fingerprint=self._file_fingerprint)
            write_header(self._descriptor, self._header)
        except OSError as error:
            logger.warning("the prefix cache file cannot be used (%s): prompts are read again", error)
            return None
        return PrefixReader(file, views, beat)

    def forget_model(self) -> None:
        """Let no other core find what `caches` returns from now on, until `identify` says which model computes it.

        The prefix cache file is emptied, and not used again: its blocks may not fit the next weights.
        """
        if self._prefix_file is not None:
            self._prefix_file.abandon()
        self._fingerprint, self._file_fingerprint = secrets.token_hex(), ""

    def identify(self, identity: Sequence[object]) -> None:
        """Note what the caches hold from now on, as for `num_blocks`, after `forget_model`."""
        self._fingerprint = self._fingerprint_of(identity)
        if self._header is not None:
            self._header = msgspec.structs.replace(
                self._header, fingerprint=self._fingerprint, file_fingerprint=self._file_fingerprint
            )
            write_header(self._descriptor, self._header)

    def _fingerprint_of(self, identity: Sequence[object]) -> str:
        return hashlib.sha256(repr([self._block_size, *map(str, identity)]).encode()).hexdigest()

    def _stop_mapping(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            early.stop()

    def unlock(self) -> None:
        """Let the next core use the file, in which this one writes nothing more, before this process has ended."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def release(self) -> None:
        """Give the memory of the caches back after their last use; `caches` makes them again. The table stays."""
        self._stop_mapping()
        self._huge_pages = None
        os.ftruncate(self._descriptor, self._caches_at)
        if self._device_memory is not None:
            self._device_memory.release()


def _open_again(descriptor: int) -> int:
    """Open the file once more, so that the lock is this core's, and stays until its last mapping has gone."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def driver_of(device: torch.device) -> Driver | None:
    """Return what makes memory of `device`; None if that is the host. Raises OSError if the driver cannot."""
    return None if device.type == "cpu" else CudaDriver(device.index)


def kept_memory(
    cache: KeptCache | None, rank: int, device: torch.device, early: EarlyMap | None = None
) -> KeptMemory | None:
    """Return the memory of `rank` on `device`; `early` as for `KeptMemory`.

    None: there is none, the driver of the device cannot share it, or a process of an earlier core still has it.
    """
    if cache is None:
        return None
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    try:
        driver = driver_of(device)
    except OSError as error:
        logger.info("the KV cache ends with this core: %s", error)
        return None
    device_memory = None if driver is None else DeviceMemory(cache.mailboxes[rank], device, driver)
    try:
        return KeptMemory(cache.descriptors[rank], cache.adopts, cache.prefix_file, device_memory, early)
    except OSError as error:
        logger.warning("the memory of the KV cache cannot be used (%s): prompts are read again", error)
        if cache.mailboxes:
            empty_mailbox(cache.mailboxes[rank][1])
        return None
