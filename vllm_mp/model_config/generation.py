"""What a model's generation_config.json says: the defaults of sampling parameters."""

import logging
from pathlib import Path
from typing import Any

from vllm_mp.model_config.json_file import read_json
from vllm_mp.requests.sampling_params import PARAMETERS, SamplingParams

logger = logging.getLogger(__name__)

_FIELDS = {
    parameter.generation_config: field
    for field, parameter in PARAMETERS.items()
    if parameter.generation_config is not None
}
"""The names in generation_config.json of the fields of `SamplingParams`."""
_GREEDY_NAMES = {"repetition_penalty", "max_new_tokens"}
"""The names whose settings apply to greedy decoding too."""


def read_generation_config(setting: str, folder: Path) -> dict[str, Any]:
    """Return the contents of generation_config.json; {} if there is none or it is not wanted.

    `setting` is "auto" (the file in the model's `folder`, if it exists), "vllm" (no file) or another folder with such a
    file. Raises ValueError, naming the file, if it is missing in that other folder or cannot be read.
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


def default_sampling_params(generation: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that `generation` sets; `overrides` is the part that the user gave.

    Raises ValueError, naming the field, its value and where it comes from, for a value out of range.
    """
    for name in overrides.keys() - {*_FIELDS, "do_sample", "eos_token_id"}:
        logger.warning("override_generation_config: %r is ignored, as no sampling parameter has this name", name)
    defaults: dict[str, Any] = {}
    wanted = set(_FIELDS)
    if generation.get("do_sample") is False:
        # Transformers saves the other settings too, but ignores them. A setting that the user gives is intended.
        defaults["temperature"] = 0.0
        wanted = _GREEDY_NAMES | (set() if "do_sample" in overrides else overrides.keys())
    elif generation.get("do_sample"):
        defaults["temperature"] = 1.0
    for name, field in _FIELDS.items():
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
                "set generation_config='vllm' to ignore the file"
            ) from error
    return defaults
