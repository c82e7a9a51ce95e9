"""What a model folder must hold before it is worth starting an engine on it."""

import json
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken")
_WEIGHT_INDEX = "model.safetensors.index.json"
_POINTER_START = b"version https://git-lfs"


def folder_problem(folder: Path, load_format: str) -> str | None:
    """Return what keeps `folder` from being loaded, with the remedy, or None.

    Looks for a config.json that can be read and, unless `load_format` is "dummy", for every safetensors file
    that the index names; the tensors themselves are not read. "tokenizer" looks for a tokenizer and no more.
    """
    if load_format == "tokenizer":
        if has_tokenizer(folder):
            return None
        return f"{folder} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)})"
    config = folder / "config.json"
    if not config.is_file():
        return (
            f"{folder} has no config.json: a model folder holds config.json, *.safetensors and tokenizer.json, "
            "as `save_pretrained` writes them"
        )
    if problem := _json_problem(config):
        return problem
    return None if load_format == "dummy" else _weights_problem(folder)


def has_tokenizer(folder: Path) -> bool:
    """Tell whether `folder` holds a tokenizer in one of the usual files."""
    return any(path.is_file() for pattern in TOKENIZER_FILES for path in folder.glob(pattern))


def _json_problem(path: Path) -> str | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"{path} is not valid JSON: {error}"
    return None if isinstance(content, dict) else f"{path} holds no JSON object"


def _weights_problem(folder: Path) -> str | None:
    index = folder / _WEIGHT_INDEX
    if index.is_file():
        if problem := _json_problem(index):
            return problem
        files = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        missing = sorted(name for name in files if not (folder / name).is_file())
        if missing:
            return (
                f"{folder} lacks {len(missing)} of the {len(files)} files that {_WEIGHT_INDEX} names, "
                f"{missing[0]} among them: copy or download them again"
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
