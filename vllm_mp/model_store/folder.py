"""The files that a model's folder must hold before an engine is started on it."""

import json
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from vllm_mp.model_config.json_file import read_json

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken")
"""Patterns of the files that hold a tokenizer. The first is the fast tokenizer, the others are vocabularies."""

_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
"""Files and folders of chat templates; older tokenizers have theirs in tokenizer_config.json."""


class WeightFiles(NamedTuple):
    """The names of files with weights, of one form."""

    single: str
    """The file, if there is one only."""
    index_name: str
    """The file that says which of several files holds a tensor."""
    pattern: str
    """All of them match it."""


SAFETENSORS: Final = WeightFiles("model.safetensors", "model.safetensors.index.json", "*.safetensors")
PICKLED: Final = WeightFiles("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin")
"""Read only where there are no safetensors, and only as far as they hold tensors."""
_MAX_HEADER_BYTES: Final = 100_000_000
"""The longest header of a safetensors file that the format allows."""
_OTHER_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_POINTER_START = b"version https://git-lfs"


def noun_of(load_format: str) -> str:
    """Return what errors call the thing that is loaded: the option that names it."""
    return "tokenizer" if load_format == "tokenizer" else "model"


def folder_problem(folder: Path, load_format: str) -> str | None:
    """Return the reason why `folder` cannot be loaded, with the remedy, or None if it can.

    Checks that config.json can be read and, unless `load_format` is "dummy", that there are safetensors files, or
    pytorch_model.bin where there are none, that each file that is loaded exists, and that none is a Git LFS pointer.
    The tensors themselves are not read. With "tokenizer" only a tokenizer is required.
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
    except OSError as error:
        return f"cannot read {error.filename or folder}: {error.strerror}; check the file and its permissions"


def has_tokenizer(folder: Path) -> bool:
    """Return whether `folder` holds one of `TOKENIZER_FILES`."""
    return any(path.is_file() for pattern in TOKENIZER_FILES for path in folder.glob(pattern))


def has_chat_template(folder: Path) -> bool:
    """Return whether the tokenizer in `folder` has a chat template. Raises ValueError for a file that is not JSON."""
    if any((folder / name).exists() for name in _TEMPLATES):
        return True
    return bool((read_json(folder / "tokenizer_config.json", dict) or {}).get("chat_template"))


def weight_files(folder: Path) -> WeightFiles | None:
    """Return the form of the weights that are loaded from `folder`; None if there are none."""
    for form in (SAFETENSORS, PICKLED):
        if (folder / form.index_name).is_file() or any(folder.glob(form.pattern)):
            return form
    return None


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the name of the file of each tensor that the file `index` names.

    Raises ValueError, naming `index` and the remedy, if it cannot be read, or places a tensor outside its folder.
    """
    weight_map = (read_json(index, dict) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        found = "no weight_map" if weight_map is None else f"a weight_map of {type(weight_map).__name__}"
        if weight_map == {}:
            found = "an empty weight_map"
        raise ValueError(f"{index} is not an index of weights (it has {found}); download it again")
    for name, file in weight_map.items():
        # The index is as untrusted as the checkpoint: it must not point outside the checkpoint's folder.
        if not isinstance(file, str) or Path(file).name != file or file == "..":
            raise ValueError(
                f"{index} places {name} in {file!r:.200}, which is not the name of a file beside it; download it again"
            )
    return weight_map


def safetensors_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return what a safetensors file says of its tensors, by name, and where their data begin in it.

    Raises ValueError if the file has no header, or one that is longer than the format allows.
    """
    num_bytes = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(num_bytes)) if num_bytes <= _MAX_HEADER_BYTES else None
    if not isinstance(header, dict):
        raise ValueError(f"{file.name} has no header of a safetensors file; download it again")
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}, 8 + num_bytes


def checkpoint_files(folder: Path) -> dict[Path, list[str] | None]:
    """Return the files with the weights in `folder`, each with the names of the tensors to read from it (None: all).

    They are safetensors, or pytorch_model.bin where there are none. An index beside a single file is of an earlier
    save. Without an index all safetensors are read. Raises ValueError, naming the file, the cause and the remedy, if
    there are none, or some are missing.
    """
    form = weight_files(folder)
    if form is None:
        raise ValueError(_no_weights(folder))
    single, index = folder / form.single, folder / form.index_name
    if single.is_file():
        return {single: None}
    if not index.is_file() and form == SAFETENSORS:
        return dict.fromkeys(sorted(folder.glob(form.pattern)))
    if not index.is_file():
        raise ValueError(
            f"{folder} has neither {form.single} nor {form.index_name}; point `model` at a folder with the "
            "weights of a Hugging Face checkpoint, or use load_format='dummy' for random ones"
        )
    shards: dict[Path, list[str]] = {}
    for name, file in read_weight_map(index).items():
        shards.setdefault(folder / file, []).append(name)
    missing = sorted(path.name for path in shards if not path.is_file())
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the {len(shards)} files that {form.index_name} names, "
            f"for example {missing[0]}: copy or download them again"
        )
    return dict(shards)


def _no_weights(folder: Path) -> str:
    """Return the error for a folder without weights that can be loaded, with the remedy."""
    others = sorted(path.name for pattern in _OTHER_PICKLES for path in folder.glob(pattern))
    if others:
        return (
            f"{folder} has weights only as {others[0]}, a pickle, which can run code and is not loaded; of pickles, "
            f"only {PICKLED.single} is. Convert it with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return (
        f"{folder} holds no .safetensors file: load the model with transformers and write it again with "
        "`save_pretrained`"
    )


def _weights_problem(folder: Path) -> str | None:
    """Return the reason why the weights of `folder` cannot be loaded, or None.

    Raises ValueError as `checkpoint_files` does, and OSError if a file cannot be read.
    """
    for shard in checkpoint_files(folder):
        if not shard.is_file():
            return f"{shard} is {_what_is_no_file(shard)}, not a file with weights: copy or download it again"
        with shard.open("rb") as file:
            if file.read(len(_POINTER_START)) == _POINTER_START:
                return f"{shard} is a Git LFS pointer, not the weights: run `git lfs pull` in {folder}"
    return None


def _what_is_no_file(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return "a link to a missing file"
    return "a folder" if path.is_dir() else "a special file"
