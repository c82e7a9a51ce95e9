"""The header of a file that processes share: a record with a digest, so that a damaged one is none."""

import contextlib
import hashlib
import os
from typing import Final, TypeVar

import msgspec

HEADER_BYTES: Final = 16_384

Header = TypeVar("Header", bound=msgspec.Struct)


class KeptHeader(msgspec.Struct, array_like=True, frozen=True):
    """What the file in memory with the KV cache holds; it is written once the file has its size."""

    fingerprint: str
    """The digest of all that decides what the caches hold and how they are laid out."""
    num_blocks: int
    """Number of blocks, with the padding block."""
    block_size: int
    segments: list[tuple[int, int]]
    """(offset of the first block in the file, bytes of each block) of each cache: keys and values of each layer."""
    nonce: str
    """Another one whenever the content of an earlier core is not used."""
    file_fingerprint: str = ""
    """That of the prefix cache file into which the blocks belong; empty: there is none."""


def read_header(descriptor: int, kind: type[Header]) -> Header | None:
    """Return the header of a file; None if there is none, or it is damaged. Raises OSError."""
    data = os.pread(descriptor, HEADER_BYTES, 0)
    digest, _, rest = data.partition(b"\0")
    with contextlib.suppress(msgspec.DecodeError):
        body = rest.rstrip(b"\0")
        if digest and hashlib.sha256(body).hexdigest().encode() == digest:
            return msgspec.json.decode(body, type=kind)
    return None


def write_header(descriptor: int, header: msgspec.Struct) -> None:
    """Write the header of a file, which has `HEADER_BYTES` for it. Raises OSError."""
    body = msgspec.json.encode(header)
    data = hashlib.sha256(body).hexdigest().encode() + b"\0" + body
    if len(data) > HEADER_BYTES:
        raise OSError(f"the header takes {len(data):,} bytes, and {HEADER_BYTES:,} are kept for it")
    os.pwrite(descriptor, data.ljust(HEADER_BYTES, b"\0"), 0)
