"""The names of the files of packed weights in the model cache, which a core on a CPU writes and maps."""

import hashlib
from pathlib import Path
from typing import Final

PACKED_SUFFIX: Final = ".packed"
_PREFIX_DIGITS: Final = 16


def packed_folder(root: Path) -> Path:
    """Return the folder in the cache folder `root` that has the files."""
    return root / "packed"


def packed_prefix(model: Path) -> str:
    """Return how the names of the files of the model in the folder `model` begin."""
    return hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:_PREFIX_DIGITS] + "-"


def packed_files(root: Path, model: Path) -> list[Path]:
    """Return the files of the model in the folder `model`: one for each dtype, quantization and version of the code."""
    return sorted(packed_folder(root).glob(f"{packed_prefix(model)}*{PACKED_SUFFIX}"))
