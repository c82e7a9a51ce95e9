"""The name that a user gives a model becomes a local folder of config, safetensors and tokenizer files.

The name is an alias, a folder, a GGUF file or a hub id; a module beside this one fetches or converts each of them.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from vllm_mp.arguments.suggestions import did_you_mean
from vllm_mp.model_store.cache import cache_root
from vllm_mp.model_store.folder import folder_problem, noun_of, weight_files
from vllm_mp.model_store.gguf import gguf_model
from vllm_mp.model_store.gguf_file.mmproj import is_mmproj
from vllm_mp.model_store.gguf_file.parts import first_part
from vllm_mp.model_store.hub import hub_model, is_hub_id
from vllm_mp.model_store.own_names import named_path, own_names
from vllm_mp.model_store.package import DEFAULT_MODEL, PACKAGED_MODELS, packaged_model
from vllm_mp.model_store.progress import Progress

_LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy", "tokenizer")


def resolve_model(
    model: str,
    *,
    revision: str | None = None,
    hf_token: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
    mmproj: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Return the local folder of `model`; fetch and convert its files first if need be.

    `model` is, in this order: the alias of a packaged model, a name that the user has given to a folder or file
    (`vllm-mp alias`), a local folder, a `.gguf` file or any part of a split one (or a folder with exactly one such file
    that has no config.json or no other weights), or a hub id ("name" or "organisation/name"). A folder may also hold
    the GGUF file of the model's image parts; for a model that is named by its file, `mmproj` is the path of that file.

    `revision` and `hf_token` are used for the hub only. `download_dir` replaces both the hub's cache and
    `cache_root()`. `load_format="dummy"` requires no weights, "tokenizer" requires only the tokenizer, and "gguf"
    prefers a folder's GGUF file to its safetensors. `progress` gets lines of text; without it a bar or lines go to
    stderr.

    Raises ValueError naming the model, or the tokenizer, what is missing and the remedy; OSError if the cache cannot be
    written or is full; RuntimeError if the system ended a conversion.
    """
    if load_format not in _LOAD_FORMATS:
        raise ValueError(f"load_format must be one of {', '.join(_LOAD_FORMATS)}, got {load_format!r}")
    noun = noun_of(load_format)
    if not model.strip() or "\0" in model:
        raise ValueError(f"{noun} is {model!r}: name a folder, a .gguf file, a hub id or {DEFAULT_MODEL!r}")
    report = Progress(progress)
    cache = Path(os.path.expanduser(download_dir)).absolute() if download_dir else None
    if model.lower() in PACKAGED_MODELS and mmproj is None:
        return packaged_model(model.lower(), cache or cache_root(), report)
    path = named_path(model) or Path(os.path.expanduser(model))
    local = local_model(model, path, load_format)
    if local is not None and local.is_file():
        parts = _image_parts(path) if mmproj is None else _given_image_parts(mmproj)
        return gguf_model(local, cache or cache_root(), report, parts)
    if mmproj is not None:
        raise ValueError(
            f"mmproj is {mmproj!r}, which belongs to a model in a .gguf file, and model {model!r} is none; leave it out"
        )
    if local is not None:
        return local
    if _looks_like_path(model):
        raise ValueError(f"{noun} {model!r}: no such file or folder; correct the path{_similar_path(path)}")
    if not is_hub_id(model):
        raise ValueError(
            f"{noun} {model!r} is neither a file nor a folder nor a hub id (organisation/name): correct it, or give an "
            f"alias: {', '.join(PACKAGED_MODELS)}{_similar_alias(model)}"
        )
    try:
        return hub_model(model, revision, hf_token, cache, load_format, report)
    except ValueError as error:
        if hint := _similar_alias(model):
            raise ValueError(f"{error}{hint}") from error
        raise


def local_model(model: str, path: Path, load_format: str = "auto") -> Path | None:
    """Return the model's folder or GGUF file that is at `path`, as an absolute path; None if nothing is there.

    Raises ValueError, which calls it `model`, if what is there is no model.
    """
    if path.is_dir():
        gguf = _gguf_inside(path, load_format)
        if gguf is not None:
            return gguf
        if problem := folder_problem(path, load_format):
            raise ValueError(f"{noun_of(load_format)} {model!r}: {problem}")
        return path.absolute()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"model {model!r} is a file, but not a .gguf file: name the folder that holds config.json")
        return path.absolute()
    return None


def _similar_alias(model: str) -> str:
    """Return the end of a message that suggests the alias most like `model`, or whose first words are like it."""
    if "/" in model:
        return ""
    known = [*own_names(), *PACKAGED_MODELS]
    beginnings = {alias.rsplit("-", count)[0]: alias for alias in known for count in range(alias.count("-") or 1)}
    return did_you_mean(model, beginnings)


def _similar_path(path: Path) -> str:
    """Return the end of a message that suggests the file or folder beside `path` whose name is most like its name."""
    with contextlib.suppress(OSError):
        return did_you_mean(path.name, {entry.name: str(entry) for entry in path.parent.iterdir()})
    return ""


def is_path(model: str) -> bool:
    """Return whether `model` names a local folder or file, instead of being an alias or a hub id."""
    return _looks_like_path(model) or Path(model).exists()


def _looks_like_path(model: str) -> bool:
    """Return whether `model` can only be a path, so that the hub must not be asked."""
    return (
        model.startswith(("/", "./", "../", "~"))
        or model in (".", "..")
        or model.lower().endswith(".gguf")
        or model.count("/") > 1
    )


def _gguf_inside(folder: Path, load_format: str) -> Path | None:
    """Return the GGUF file to load from `folder`, or None if the folder is loaded as it is."""
    wanted = load_format == "gguf"
    # GGUF files often lie beside the config.json of the model from which they were made.
    needs_no_gguf = load_format != "auto" or weight_files(folder) is not None
    is_model = needs_no_gguf and (folder / "config.json").exists()
    if not wanted and (is_model or folder_problem(folder, load_format) is None):
        return None
    found = _gguf_files(folder)
    files = _text_parts(found)
    if len(files) > 1 and (first := first_part(files)) is not None:
        return first.absolute()
    if len(files) > 1 or (len(found) > 1 and not files):
        names = ", ".join(file.name for file in files or found)
        raise ValueError(f"model {str(folder)!r} holds several GGUF files ({names}): name one of them")
    if wanted and not files:
        raise ValueError(f"model {str(folder)!r} holds no .gguf file, which load_format='gguf' requires; leave it out")
    return (files or found)[0].absolute() if found else None


def _gguf_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() == ".gguf")


def _text_parts(files: list[Path]) -> list[Path]:
    """Return those of the GGUF files of a folder that may hold text parts; a single file is not read."""
    return files if len(files) == 1 else [file for file in files if not is_mmproj(file)]


def _image_parts(path: Path) -> Path | None:
    """Return the GGUF file of image parts in the model's folder `path`; None without it, and if `path` is a file.

    Raises ValueError, naming them, if there are several.
    """
    files = _gguf_files(path) if path.is_dir() else []
    texts = _text_parts(files)
    found = [file for file in files if file not in texts]
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(
            f"model {str(path)!r} holds several files of image parts ({names}): name one of them as mmproj"
        )
    return found[0].absolute() if found and texts else None


def _given_image_parts(mmproj: str) -> Path:
    """Return the path of the file `mmproj`. Raises ValueError if there is no such file."""
    path = Path(os.path.expanduser(mmproj))
    if not path.is_file():
        raise ValueError(f"mmproj is {mmproj!r}: no such file; name the GGUF file with the image parts of the model")
    return path.absolute()
