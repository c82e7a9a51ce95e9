"""Memory of a device that outlives the process that has made it, because a descriptor of it waits in a mailbox.

A mailbox is a pair of sockets that the core's parent has made and keeps. A core sends the descriptor of the memory in
one end, and no process receives it: so it waits in the other end, and the driver keeps the memory, until the next core
looks at it there. To receive it is to give the memory back.
"""

import array
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import torch
from torch import Tensor

from vllm_mp.core_link.mailbox import empty_mailbox

logger = logging.getLogger(__name__)

_NAME_BYTES: Final = 64


class Driver(Protocol):
    """What makes and maps the memory of a device, as `CudaDriver` does."""

    def create(self, num_bytes: int) -> tuple[int, int]: ...

    def import_(self, descriptor: int) -> int: ...

    def release(self, handle: int) -> None: ...

    def map(self, handle: int, num_bytes: int) -> int: ...

    def unmap(self, address: int, num_bytes: int) -> None: ...


class DeviceMemory:
    """The memory of one mailbox. One core at a time uses it."""

    def __init__(self, mailbox: tuple[int, int], device: torch.device, driver: Driver) -> None:
        """`mailbox`: descriptors of the end to send to and of the end to receive from; they stay open. `device` has an
        index unless it is the host.
        """
        self._sends, self._receives = (socket.socket(fileno=os.dup(end)) for end in mailbox)
        self._device = device
        self._driver = driver
        self._mapped: tuple[str, int, int] | None = None
        """(name, address, bytes) of the memory that is mapped."""

    def find(self, name: str, num_bytes: int) -> bool:
        """Map the memory that an earlier core has left by this name; return whether it is there.

        If it is not, whatever waits in the mailbox is given back.
        """
        try:
            with self._waiting() as (found, descriptor):
                if found == name:
                    self._map(name, self._driver.import_(descriptor), num_bytes)
                    return True
        except BlockingIOError:
            pass  # the mailbox is empty
        except OSError as error:
            logger.warning("the KV cache of the core before cannot be mapped (%s): prompts are read again", error)
        self.release()
        return False

    def tensor(self, name: str, num_bytes: int) -> Tensor:
        """Return memory by this name, uint8 [num_bytes]: what `find` has mapped, or other memory, which is not zeroed.

        Raises OSError if the driver cannot allocate it, or torch cannot use it.
        """
        if self._mapped is None or self._mapped[::2] != (name, num_bytes):
            self.release()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # what torch holds and does not use, the driver cannot allocate
            handle, descriptor = self._driver.create(num_bytes)
            try:
                self._map(name, handle, num_bytes)
                socket.send_fds(self._sends, [name.encode()], [descriptor], socket.MSG_DONTWAIT)
            except OSError:
                self.release()
                raise
            finally:
                os.close(descriptor)
        assert self._mapped is not None
        _, address, _ = self._mapped
        try:
            # torch does not free such a storage.
            storage = torch._C._construct_storage_from_data_pointer(address, self._device, num_bytes)
            return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        except (AttributeError, RuntimeError) as error:
            self.release()
            raise OSError(f"torch cannot use memory that it has not allocated: {error}") from error

    def release(self) -> None:
        """Give the memory back, that of an earlier core too. No tensor of it may be used any more. Idempotent."""
        mapped, self._mapped = self._mapped, None
        empty_mailbox(self._receives.fileno())
        if mapped is not None:
            _, address, num_bytes = mapped
            self._driver.unmap(address, num_bytes)

    def _map(self, name: str, handle: int, num_bytes: int) -> None:
        try:
            self._mapped = name, self._driver.map(handle, num_bytes), num_bytes
        finally:
            self._driver.release(handle)

    @contextmanager
    def _waiting(self) -> Iterator[tuple[str, int]]:
        """Yield the name and a descriptor of the memory that waits in the mailbox, where it stays.

        Raises BlockingIOError if there is none, and OSError if the system does not let this process have it.
        """
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        # Not `socket.recv_fds`, which ignores its flags in Python 3.11.
        name, ancillary, _, _ = self._receives.recvmsg(_NAME_BYTES, socket.CMSG_LEN(array.array("i").itemsize), flags)
        descriptors = array.array("i", b"".join(data for _, _, data in ancillary))
        if not descriptors:
            raise OSError("this process can open no more descriptors")
        [descriptor] = descriptors
        try:
            yield name.decode(), descriptor
        finally:
            os.close(descriptor)
