"""GGUF files that are split into parts: each part has a header of its own, and the first has the metadata.

llama.cpp splits files, and names the parts `NAME-00001-of-00003.gguf` and so on. Any part stands for all of them.
"""

import hashlib
import re
from pathlib import Path
from typing import Final

from vllm_mp.model_store.gguf_file.reader import GgufFile, StoredTensor, read_gguf

_PART_NAME: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_MAX_MISSING: Final = 4
"""The most missing parts that an error names."""


def read_gguf_model(path: Path) -> GgufFile:
    """Read and check the header of `path`, or those of all parts if `path` is one part of a split file.

    Raises ValueError, naming the file and the remedy, if a part is missing or belongs to another file, and as
    `read_gguf` does.
    """
    paths = part_paths(path)
    parts = [read_gguf(part) for part in paths]
    if len(parts) > 1 or parts[0].metadata.get("split.count", 1) not in (0, 1):
        return _joined(parts)
    return parts[0]


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of the file that `path` is a part of by its name; `path` alone for another name.

    Raises ValueError, naming them, if parts are missing.
    """
    name = _PART_NAME.fullmatch(path.name)
    if name is None or int(name["count"]) <= 1:
        return [path]
    count = int(name["count"])
    paths = [path.with_name(f"{name['stem']}-{number:05}-of-{count:05}{path.suffix}") for number in range(1, count + 1)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        more = f" and {len(missing) - _MAX_MISSING} more" if len(missing) > _MAX_MISSING else ""
        raise ValueError(
            f"{path} is one of the {count} parts of a split GGUF file, and {path.parent} lacks "
            f"{', '.join(missing[:_MAX_MISSING])}{more}: put all parts into one folder, with their names"
        )
    return paths


def first_part(paths: list[Path]) -> Path | None:
    """Return the first part if `paths` are the names of the parts of one split file; None otherwise."""
    names = {(name["stem"], name["count"]) for path in paths if (name := _PART_NAME.fullmatch(path.name))}
    is_split = len(names) == 1 and all(_PART_NAME.fullmatch(path.name) for path in paths)
    return min(paths) if is_split else None


def _joined(parts: list[GgufFile]) -> GgufFile:
    """Return the file that consists of `parts`, which must be all of its parts in their order."""
    tensors: dict[str, StoredTensor] = {}
    for number, part in enumerate(parts):
        for key, expected in (("split.count", len(parts)), ("split.no", number)):
            if part.metadata.get(key) != expected:
                raise ValueError(
                    f"{part.path}: {key} is {part.metadata.get(key)!r:.80}: by its name it must be {expected}; parts "
                    "of a split file need the names that llama.cpp gives them (NAME-00001-of-00003.gguf)"
                )
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ValueError(f"{part.path}: {name} is in another part too; download all parts again")
            tensors[name] = tensor._replace(part=number)
    first = parts[0]
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ValueError(
            f"{first.path}: split.tensors.count is {total!r:.80}: the parts have {len(tensors)} tensors; download all "
            "parts again"
        )
    digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()
    return GgufFile(first.path, first.metadata, tensors, digest, first.identity, tuple(parts))
