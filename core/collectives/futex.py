"""Waiting for a change of a 32-bit word in shared memory, by the futex system call of Linux."""

import ctypes
import platform
from typing import Final

_NUMBERS: Final = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_number = _NUMBERS.get(platform.machine())


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def is_available() -> bool:
    """Return whether the number of the system call is known for this machine."""
    return _number is not None


class Word:
    """A word of 32 bits, shared with other processes, for which they can wait."""

    def __init__(self, address: int) -> None:
        """`address` must be a multiple of 4 and stay mapped as long as this object is used."""
        self._address = ctypes.c_void_p(address)
        self._word = ctypes.c_uint32.from_address(address)

    @property
    def value(self) -> int:
        return self._word.value

    def set(self, value: int) -> None:
        """Store `value` and wake all who wait for a change."""
        self._word.value = value
        _syscall(_number, self._address, _WAKE, _ALL, None, None, 0)

    def wait_for_change(self, seen: int, seconds: float) -> None:
        """Return when the word is no longer `seen`, after `seconds`, or earlier without a reason."""
        whole = int(seconds)
        timeout = _Timespec(whole, int((seconds - whole) * 1e9))
        _syscall(_number, self._address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(timeout), None, 0)
