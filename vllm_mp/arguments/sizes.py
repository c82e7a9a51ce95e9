"""Sizes in bytes, as people write them."""

import re
from typing import Final

_SIZE: Final = re.compile(r"(\d+|\d*\.\d+|\d+\.\d*)\s*([kKmMgGtT]?)(i?)[bB]?")
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
