"""Sizes in bytes and large numbers, as people write them."""

import re
from typing import Final

_SIZE: Final = re.compile(r"(\d+|\d*\.\d+|\d+\.\d*)\s*([kKmMgGtT]?)(i?)[bB]?")
_NUMBER: Final = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def byte_size(text: str) -> int:
    """Return the bytes that `text` means: a number, alone or with a unit such as MB, GB (powers of 1,000), MiB or GiB
    (powers of 1,024); the B may be missing.

    Raises ValueError for anything else.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is not a size; write it as 4GiB, 512MB or a number of bytes")
    number, unit, binary = found.groups()
    factor: int = (1024 if binary else 1000) ** _POWERS[unit.lower()]
    return int(number) * factor if number.isdecimal() else round(float(number) * factor)


def readable_int_or_auto(text: str) -> int:
    """Return what `readable_int` does, and -1 for "auto", as vLLM does."""
    return -1 if text.strip().lower() == "auto" else readable_int(text)


def readable_int(text: str) -> int:
    """Return the integer that `text` means, as vLLM does: 32k is 32,000, 1.5k is 1,500, and 32K is 32,768.

    Raises ValueError for anything else.
    """
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return int(text)
    number, unit = found.groups()
    factor: int = (1024 if unit.isupper() else 1000) ** _POWERS[unit.lower()]
    return int(number) * factor if unit.isupper() else round(float(number) * factor)
