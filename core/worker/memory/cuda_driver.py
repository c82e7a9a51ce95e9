"""The calls of CUDA's driver for memory that one process after another maps, by a descriptor that outlives them.

The signatures are those of `cuda.h`, group "Virtual Memory Management".
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_void_p
from typing import Any, Final

_FILE_DESCRIPTOR: Final = 1
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"""
_PINNED: Final = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED"""
_DEVICE: Final = 1
"""CU_MEM_LOCATION_TYPE_DEVICE"""
_READ_WRITE: Final = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE"""
_RECOMMENDED: Final = 1
"""CU_MEM_ALLOC_GRANULARITY_RECOMMENDED"""
_EXPORTS: Final = 103
"""CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"""


class _Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32_metadata", c_void_p),
        ("flags", c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", _Location), ("flags", c_int))


_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (POINTER(c_int), c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}


class CudaDriver:
    """Makes and maps memory of one device. All methods raise OSError, with the driver's reason.

    Memory lives as long as a handle, a mapping or a descriptor of it, in any process.
    """

    def __init__(self, device: int, library: str = "libcuda.so.1") -> None:
        """`device` is the number of the device among those that this process sees.

        Raises OSError if the driver is missing, or cannot export memory of this device.
        """
        loaded = ctypes.CDLL(library)
        try:
            self._functions = {name: getattr(loaded, name) for name in _SIGNATURES}
        except AttributeError as error:
            raise OSError(f"the CUDA driver is too old: {error}") from error
        for name, types in _SIGNATURES.items():
            self._functions[name].argtypes = types
            self._functions[name].restype = c_int
        self._location = _Location(_DEVICE, device)
        self._properties = _Properties(_PINNED, _FILE_DESCRIPTOR, self._location)
        self._call("cuInit", 0)
        found, exports = c_int(), c_int()
        self._call("cuDeviceGet", found, device)
        self._call("cuDeviceGetAttribute", exports, _EXPORTS, found)
        if not exports.value:
            raise OSError(f"GPU {device} cannot export its memory as a descriptor")
        granularity = c_size_t()
        self._call("cuMemGetAllocationGranularity", granularity, self._properties, _RECOMMENDED)
        self._granularity = granularity.value

    def create(self, num_bytes: int) -> tuple[int, int]:
        """Allocate memory; return its handle and a descriptor, which the caller must release and close."""
        handle, descriptor = c_uint64(), c_int(-1)
        self._call("cuMemCreate", handle, self._aligned(num_bytes), self._properties, 0)
        try:
            self._call("cuMemExportToShareableHandle", descriptor, handle, _FILE_DESCRIPTOR, 0)
        except OSError:
            self.release(handle.value)
            raise
        return handle.value, descriptor.value

    def import_(self, descriptor: int) -> int:
        """Return a handle of the memory of `descriptor`, which another process has made; the caller must release it."""
        handle = c_uint64()
        self._call("cuMemImportFromShareableHandle", handle, descriptor, _FILE_DESCRIPTOR)
        return handle.value

    def release(self, handle: int) -> None:
        """Release a handle."""
        self._call("cuMemRelease", handle)

    def map(self, handle: int, num_bytes: int) -> int:
        """Map memory of this size; return its address on the device."""
        address, size = c_uint64(), self._aligned(num_bytes)
        self._call("cuMemAddressReserve", address, size, 0, 0, 0)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
            try:
                self._call("cuMemSetAccess", address, size, _Access(self._location, _READ_WRITE), 1)
            except OSError:
                self._call("cuMemUnmap", address, size)
                raise
        except OSError:
            self._call("cuMemAddressFree", address, size)
            raise
        return address.value

    def unmap(self, address: int, num_bytes: int) -> None:
        """Undo `map`. The device must have done all work that uses the memory."""
        self._call("cuMemUnmap", address, self._aligned(num_bytes))
        self._call("cuMemAddressFree", address, self._aligned(num_bytes))

    def _aligned(self, num_bytes: int) -> int:
        return -(-num_bytes // self._granularity) * self._granularity

    def _call(self, name: str, *arguments: Any) -> None:
        result = self._functions[name](*arguments)
        if result:
            reason = c_char_p()
            self._functions["cuGetErrorString"](result, reason)
            raise OSError(f"{name}: {(reason.value or b'unknown error').decode()} (CUDA error {result})")
