"""The pooling that a model's folder prescribes, in the files that sentence-transformers writes beside the weights."""

from pathlib import Path
from typing import Any

import msgspec

from vllm_mp.model_config.json_file import read_json

_LIBRARY = "sentence_transformers."
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""The flag of each pooling mode in older folders, and the name that newer folders use instead."""
_SERVED = {"cls": "cls", "mean": "mean", "lasttoken": "last", "last": "last"}
"""The served names, and the pooling type that each stands for."""


class PoolingConfig(msgspec.Struct, kw_only=True):
    """The pooling of requests that do not set it."""

    pooling_type: str
    """A member of `pooling_params.POOLING_TYPES`."""
    normalize: bool
    """Scale each vector to length 1."""


def read_pooling_config(folder: Path, is_encoder: bool) -> PoolingConfig:
    """Return the pooling that modules.json of `folder` describes; without this file "mean" for encoders, else "last".

    Raises ValueError, naming the file and the module, for pooling that is not supported: the vectors would be wrong.
    """
    path = folder / "modules.json"
    modules = read_json(path, list)
    if modules is None:
        return PoolingConfig(pooling_type="mean" if is_encoder else "last", normalize=True)
    kinds = [_kind(path, module) for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ValueError(
            f"{path} lists the modules {', '.join(kinds) or '(none)'}; supported are Transformer, Pooling and "
            "optionally Normalize, in this order, because other modules would change the vectors; choose another model"
        )
    if modules[0].get("path"):
        raise ValueError(
            f"{path} has the Transformer in {modules[0]['path']!r}; only '' (the folder itself) is supported: move "
            "the files there"
        )
    name = modules[1].get("path")
    # The file comes with the checkpoint and must not point outside the checkpoint's folder.
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
        raise ValueError(f"{path} has the Pooling in {name!r}, not the name of a folder beside it; correct it")
    return PoolingConfig(pooling_type=_pooling_type(folder / name / "config.json"), normalize="Normalize" in kinds)


def read_max_seq_length(folder: Path) -> int | None:
    """Return the longest prompt, in tokens, that sentence_bert_config.json of `folder` names; None if it names none.

    Raises ValueError, naming the file and the field, for a bad value, and if prompts must be converted to lower case.
    """
    path = folder / "sentence_bert_config.json"
    config = read_json(path, dict) or {}
    if config.get("do_lower_case"):
        raise ValueError(
            f"{path}: do_lower_case is {config['do_lower_case']!r}, which is not supported; set it to false, and give "
            "prompts in lower case unless the tokenizer converts them"
        )
    length = config.get("max_seq_length")
    if length is None:
        return None
    if not isinstance(length, int) or isinstance(length, bool) or length < 2:
        raise ValueError(f"{path}: max_seq_length is {length!r}; it must be an integer of at least 2, or null")
    return length


def _kind(path: Path, module: Any) -> str:
    """Return the class name of a module, with its path unless the class is the library's."""
    kind = module.get("type") if isinstance(module, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"{path} has an entry without a 'type': {module!r:.80}; fetch the model again")
    # Code that comes with a model may have classes with the names of the library's classes.
    return kind.rpartition(".")[2] if kind.startswith(_LIBRARY) else kind


def _pooling_type(path: Path) -> str:
    """Return the pooling type that the Pooling module's config.json at `path` chooses."""
    config = read_json(path, dict)
    if config is None:
        raise ValueError(f"{path} is missing, but modules.json names it; fetch the model again")
    mode = config.get("pooling_mode")
    chosen = [mode] if mode is not None else [name for flag, name in _MODES.items() if config.get(flag)]
    if isinstance(mode, list | tuple):
        chosen = list(mode)
    if len(chosen) != 1 or chosen[0] not in _SERVED:
        raise ValueError(
            f"{path} asks for pooling {' + '.join(map(str, chosen)) or '(none)'}; supported is one of cls, mean, "
            "last; choose another model"
        )
    return _SERVED[chosen[0]]
