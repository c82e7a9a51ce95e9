"""The `adapter_config.json` of a PEFT folder: what kind of adapter it is, and its scale in each layer."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

_Value = TypeVar("_Value", int, float)

CONFIG_FILE: Final = "adapter_config.json"
_MAX_CONFIG_BYTES: Final = 2**20
_MAX_PATTERNS: Final = 4096
_MAX_PATTERN_LENGTH: Final = 256
_QUANTIFIER: Final = re.compile(r"[*+?{]")
_MAX_QUANTIFIERS: Final = 3
"""The limit for one pattern; together they may have `_MAX_ALL_QUANTIFIERS`."""
_MAX_ALL_QUANTIFIERS: Final = 100
_MAX_SHOWN: Final = 200
_EMBEDDINGS: Final = ("embed_tokens", "lm_head", "wte", "wpe")
_UNSUPPORTED: Final = {
    "modules_to_save": "it replaces whole modules, such as extra embeddings",
    "trainable_token_indices": "it changes embeddings",
    "use_dora": "DoRA changes the magnitude of weights",
    "lora_bias": "biases are not adapted",
    "layer_replication": "it repeats layers of the model",
    "target_parameters": "only linear layers are adapted",
    "alora_invocation_tokens": "an activated LoRA changes only some tokens",
    "use_qalora": "QA-LoRA pools the inputs",
    "use_bdlora": "block-diagonal factors are not read",
    "arrow_config": "Arrow routes tokens between adapters",
    "kasa_config": "KaSA has a third factor",
    "monteclora_config": "MonteCLoRA samples its factors",
    "velora_config": "VeLoRA projects the inputs",
    "megatron_config": "layers of Megatron are not adapted",
}
"""Fields that change what an adapter computes, each with the reason why it is refused if it is set."""
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights`, or how they begin, with which PEFT also changes the weights of the model."""


class PeftConfig(NamedTuple):
    """The fields of a configuration that say how to scale the adapter."""

    rank: int
    alpha: float
    is_rank_stabilized: bool
    rank_pattern: list[tuple[re.Pattern[str], int]]
    alpha_pattern: list[tuple[re.Pattern[str], float]]

    def rank_of(self, module: str) -> int:
        """Return the rank of the factors of `module`, its full name in the model."""
        return _first_match(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of `B @ A` in `module`: by rank, or by its root if rank-stabilized (Kalajdzievski 2023)."""
        rank = self.rank_of(module)
        alpha = _first_match(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_peft_config(folder: Path) -> PeftConfig:
    """Read `adapter_config.json` in `folder`; raise ValueError, naming file, field and remedy, if it is not served."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"the adapter {folder} lacks {CONFIG_FILE}; give the folder that save_pretrained wrote")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror or error}); check its permissions") from None
    if len(content) > _MAX_CONFIG_BYTES:
        raise ValueError(f"{path} is too large: more than {_MAX_CONFIG_BYTES:,} bytes; download it again")
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must contain a JSON object, not {type(config).__name__}; download it again")
    try:
        return _parse(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parse(config: Mapping[str, Any]) -> PeftConfig:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"peft_type {_shown(kind)} is not served, only 'LORA'")
    for field, reason in _UNSUPPORTED.items():
        if config.get(field):
            raise ValueError(f"{field}={_shown(config[field])} is not served: {reason}; train without it")
    if config.get("bias", "none") != "none":
        raise ValueError(f"bias={_shown(config['bias'])} is not served: biases are not adapted; train with bias='none'")
    initialization = config.get("init_lora_weights")
    if isinstance(initialization, str) and initialization.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"init_lora_weights={_shown(initialization)} also changes the weights of the model; save the adapter with "
            "path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        )
    targets = config.get("target_modules")
    named = [targets] if isinstance(targets, str) else targets if isinstance(targets, list) else []
    for target in named:
        if isinstance(target, str) and target.split(".")[-1] in _EMBEDDINGS:
            raise ValueError(f"target_modules contains {_shown(target)}: embeddings are not adapted; train without it")
    return PeftConfig(
        _rank("r", config.get("r", 8)),
        _alpha("lora_alpha", config.get("lora_alpha", 8)),
        bool(config.get("use_rslora")),
        [(pattern, _rank("rank_pattern", value)) for pattern, value in _patterns(config, "rank_pattern")],
        [(pattern, _alpha("alpha_pattern", value)) for pattern, value in _patterns(config, "alpha_pattern")],
    )


def _rank(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field} must be an integer of at least 1, got {_shown(value)}")
    return value


def _alpha(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ValueError(f"{field} must be a finite number, got {_shown(value)}")
    return float(value)


def _patterns(config: Mapping[str, Any], field: str) -> list[tuple[re.Pattern[str], Any]]:
    """Return the compiled keys of a field, in PEFT's meaning: a regular expression for the end of a module's name."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict) or len(patterns) > _MAX_PATTERNS:
        raise ValueError(f"{field} must be an object of at most {_MAX_PATTERNS} patterns")
    if sum(len(_QUANTIFIER.findall(pattern)) for pattern in patterns) > _MAX_ALL_QUANTIFIERS:
        raise ValueError(f"{field} has patterns that may take too long to match; write out the names of the layers")
    return [(_compiled(field, pattern), value) for pattern, value in patterns.items()]


def _compiled(field: str, pattern: str) -> re.Pattern[str]:
    # Without quantified groups and with few quantifiers, a match takes polynomial time in the length of a name.
    is_simple = len(pattern) <= _MAX_PATTERN_LENGTH and not re.search(r"\)[*+?{]", pattern)
    if not is_simple or len(_QUANTIFIER.findall(pattern)) > _MAX_QUANTIFIERS:
        raise ValueError(f"{field} has a pattern that may take too long to match: {pattern[:100]!r}; simplify it")
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError) as error:
        raise ValueError(f"{field} has an invalid pattern {pattern!r}: {error}") from None


def _first_match(patterns: list[tuple[re.Pattern[str], _Value]], module: str, default: _Value) -> _Value:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _shown(value: Any) -> str:
    """Return a value for an error, which the core sends to a client."""
    return repr(value)[:_MAX_SHOWN]
