"""Errors for valid frames: in their bytes, in their structure, or in a value."""

import copy
import datetime
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec


class HostileMessage(NamedTuple):
    """One message, usually of one frame, and the kind of its error."""

    kind: str
    frames: list[bytes]


SCALARS: tuple[Any, ...] = (
    None,
    True,
    False,
    *(sign * 2**bits + offset for bits in (0, 7, 8, 15, 16, 20, 31, 32, 53) for sign in (1, -1) for offset in (-1, 0)),
    -(2**63),
    2**63,
    2**64 - 1,
    0.0,
    -0.0,
    0.5,
    1e-320,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x",
    "é\u0000😀",
    "__class__",
    "__init__.__globals__",
    "status",
    "pause",
    "abort",
    b"",
    b"\x00",
    b"\x01\x00\x00",
    b"\xff\xff\xff\xff",
    b"\x05\x00\x00\x00" * 3,
    datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC),
    msgspec.msgpack.Ext(5, b"ext"),
    msgspec.msgpack.Ext(-128, b""),
)

_NOT_UTF8 = b"\xa2\xff\xfe"
UNENCODABLE: tuple[bytes, ...] = (
    b"",
    b"\xc1",
    b"\x91" * 5000,
    b"\x81\xa1x" * 3000,
    b"\xdd\xff\xff\xff\xff\x02",
    b"\xdf\xff\xff\xff\xff\x01\x01",
    b"\xdb\xff\xff\xff\xffabc",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
    b"\x92\x01" + _NOT_UTF8,
    b"\x96\x02\x01\x00" + _NOT_UTF8 + b"\xc4\x00\x80",
    b"\x94\x04\x01\x00" + _NOT_UTF8,
    b"\x93\x03\x01\xdd\xff\xff\xff\xff",
    b"\x96\x02\x01\x00\xa1x\xc4\x04\x01\x00\x00\x00\x82\xa1n\x01\xa1n\xc0",
    b"\x96\x02\x01\x00\xa1x\xc4\x04\x01\x00\x00\x00\x81\xaaextra_args\x81\xa1a" + b"\x91" * 5000,
    b"\x96\x02\x01\x00\xa1x\xc4\x04\x01\x00\x00\x00\x81\xaalogit_bias\x81\x80\x01",
    b"\x92\x04\xc7\x0c\xff" + b"\xff" * 12,
    b"\x92\x04\xd6\xff\xff\xff\xff\xff",
)
"""Bytes that no encoder makes: truncated, with false lengths, nested too deeply, not UTF-8, times out of range."""


class Mutator:
    """Puts random errors into valid frames."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def value(self) -> Any:
        """Return a value that a field does not expect, rarely a large one."""
        chance = self._chance
        kind = chance.random()
        if kind < 0.85:
            return copy.copy(chance.choice(SCALARS))
        if kind < 0.98:
            items = [chance.choice(SCALARS) for _ in range(chance.choice((0, 1, 2, 8)))]
            if chance.random() < 0.4:
                return {str(i): item for i, item in enumerate(items)}
            return [items] if chance.random() < 0.3 else items
        size = chance.choice((300, 2000, 70_000))
        return chance.choice((b"\x00" * size, "s" * size, [0] * size, [[]] * size, dict.fromkeys(range(size), 0.5)))

    def change_bytes(self, frame: bytes, others: list[bytes]) -> bytes:
        """Return `frame` with a few bytes changed, removed, doubled or taken from one of `others`."""
        chance, data = self._chance, bytearray(frame)
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            at = chance.randrange(len(data) + 1)
            kind = chance.randrange(7)
            if kind == 0:
                data[at:at] = chance.randbytes(chance.choice((1, 1, 2, 4)))
            elif kind == 1:
                del data[at : at + chance.choice((1, 1, 2, 4))]
            elif kind == 2:
                del data[at:]
            elif kind == 3:
                data[at:at] = data[max(0, at - 4) : at]
            elif kind == 4:
                other = chance.choice(others)
                data[at:] = other[chance.randrange(len(other) + 1) :]
            elif at < len(data):
                data[at] = chance.randrange(256) if kind == 5 else data[at] ^ (1 << chance.randrange(8))
        return bytes(data)

    def change_structure(self, frame: bytes) -> bytes:
        """Return the valid `frame` with values replaced, removed, doubled or swapped."""
        chance, tree = self._chance, msgspec.msgpack.decode(frame)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            places = list(_places(tree))
            if not places:
                break
            owner, key = chance.choice(places)
            kind = chance.randrange(8)
            if isinstance(owner, dict):
                if kind == 0:
                    del owner[key]
                elif kind == 1:
                    owner[f"{key}_"] = owner.pop(key)
                else:
                    owner[key] = self.value()
            elif kind == 0:
                del owner[key]
            elif kind == 1:
                owner.insert(key, copy.deepcopy(owner[key]))
            elif kind == 2:
                other = chance.randrange(len(owner))
                owner[key], owner[other] = owner[other], owner[key]
            elif kind == 3 and isinstance(owner[key], int) and not isinstance(owner[key], bool):
                owner[key] = max(-(2**63), min(2**64 - 1, owner[key] + chance.choice((-1, 1, 2**16, -(2**16)))))
            else:
                owner[key] = self.value()
        return msgspec.msgpack.encode(tree)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) below `tree`; of long containers, only the beginning."""
    stack = [tree]
    while stack:
        owner = stack.pop()
        keys = range(min(len(owner), 16)) if isinstance(owner, list) else list(itertools.islice(owner, 64))
        for key in keys:
            yield owner, key
            if isinstance(owner[key], list | dict):
                stack.append(owner[key])
