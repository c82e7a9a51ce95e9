"""What a model's generation_config.json says: where answers end, and how they are sampled unless a request says."""

import logging
from pathlib import Path
from typing import Any

from vllm_mp.model_config.json_file import read_json
from vllm_mp.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_GENERATION_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""generation_config.json's names, and those of `SamplingParams`."""
_GREEDY_FIELDS = {"repetition_penalty", "max_new_tokens"}
"""What of them matters without sampling."""


def read_generation_config(setting: str, folder: Path) -> dict[str, Any]:
    """The contents of generation_config.json, as far as they are wanted.

    `setting` is "auto" (that of the model's `folder`, if there is one), "vllm" (none) or the folder of another one.
    Raises ValueError, naming the file, if it is missing there or cannot be read.
    """
    if setting == "vllm":
        return {}
    content = read_json((folder if setting == "auto" else Path(setting)) / "generation_config.json", dict)
    if content is None and setting != "auto":
        raise ValueError(
            f"generation_config={setting!r}: there is no generation_config.json in this folder; give 'auto', 'vllm' or "
            "a folder that holds one"
        )
    return content or {}


def eos_token_ids(folder: Path, generation: dict[str, Any], hf_config: dict[str, Any], vocab_size: int) -> list[int]:
    """End-of-sequence ids: generation_config.json's, which may name several, before config.json's."""
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = hf_config.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    known = [one for one in ids if type(one) is int and 0 <= one < vocab_size]
    if len(known) < len(ids):
        logger.warning("%s: eos_token_id %s has ids outside the vocabulary of %d", folder, ids, vocab_size)
    return known


def default_sampling_params(generation: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that `generation` sets, `overrides` being what of it the user gave.

    Raises ValueError, naming the field and where it comes from, for bad ones.
    """
    for name in overrides.keys() - {*_GENERATION_FIELDS, "do_sample", "eos_token_id"}:
        logger.warning("override_generation_config: nothing here reads %r", name)
    defaults: dict[str, Any] = {}
    wanted = set(_GENERATION_FIELDS)
    if generation.get("do_sample") is False:
        # What transformers saves beside it are settings that it does not look at; what the user gives is meant.
        defaults["temperature"] = 0.0
        wanted = _GREEDY_FIELDS | (set() if "do_sample" in overrides else overrides.keys())
    elif generation.get("do_sample"):
        defaults["temperature"] = 1.0
    for name, field in _GENERATION_FIELDS.items():
        value = generation.get(name)
        if value is None or name not in wanted:
            continue
        try:
            defaults[field] = getattr(SamplingParams(**{field: value}), field)
        except (TypeError, ValueError) as error:
            if name in overrides:
                raise ValueError(f"override_generation_config: {name}={value!r}: {error}") from error
            raise ValueError(
                f"generation_config.json: {name}={value!r}: {error}; correct it with override_generation_config, or "
                "set generation_config='vllm' to do without the file"
            ) from error
    return defaults
