"""The files that a model's folder must hold before an engine is started on it."""

from pathlib import Path
from typing import Any

from vllm_mp.model_config.json_file import read_json

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken")
"""Patterns of the files that hold a tokenizer. The first is the fast tokenizer, the others are vocabularies."""

WEIGHT_INDEX = "model.safetensors.index.json"
_POINTER_START = b"version https://git-lfs"


def folder_problem(folder: Path, load_format: str) -> str | None:
    """Return the reason why `folder` cannot be loaded, with the remedy, or None if it can.

    Checks that config.json can be read and, unless `load_format` is "dummy", that there are safetensors files, that
    each file of the index exists, and that none is a Git LFS pointer. The tensors themselves are not read. With
    "tokenizer" only a tokenizer is required.
    """
    if load_format == "tokenizer":
        if has_tokenizer(folder):
            return None
        return (
            f"{folder} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}); copy the tokenizer's files there, or "
            "name another folder"
        )
    try:
        if read_json(folder / "config.json", dict) is None:
            return (
                f"{folder} has no config.json: a model folder holds config.json, *.safetensors and tokenizer.json, "
                "as `save_pretrained` writes them"
            )
        return None if load_format == "dummy" else _weights_problem(folder)
    except ValueError as error:
        return str(error)


def has_tokenizer(folder: Path) -> bool:
    """Return whether `folder` holds one of `TOKENIZER_FILES`."""
    return any(path.is_file() for pattern in TOKENIZER_FILES for path in folder.glob(pattern))


def _weights_problem(folder: Path) -> str | None:
    """Return the reason why the safetensors of `folder` cannot be loaded, or None.

    Raises ValueError if the index cannot be read.
    """
    index: dict[str, Any] = read_json(folder / WEIGHT_INDEX, dict) or {}
    files = set(index.get("weight_map", {}).values())
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        return (
            f"{folder} lacks {len(missing)} of the {len(files)} files that {WEIGHT_INDEX} names, "
            f"for example {missing[0]}: copy or download them again"
        )
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        return (
            f"{folder} holds no .safetensors file: load the model with transformers and write it again with "
            "`save_pretrained`"
        )
    for shard in shards:
        with shard.open("rb") as file:
            if file.read(len(_POINTER_START)) == _POINTER_START:
                return f"{shard} is a Git LFS pointer, not the weights: run `git lfs pull` in {folder}"
    return None
