"""What `speculative_config` may say, by vLLM's names, and the section of the configuration that follows from it."""

from collections.abc import Mapping
from typing import Any, Final

from vllm_mp.arguments.suggestions import did_you_mean
from vllm_mp.config.sections import QUANTIZATIONS, SpeculativeConfig

METHODS: Final = ("ngram", "suffix", "draft_model")
DRAFT_MODEL: Final = METHODS[2]
_MAX_TOKENS: Final = 64
"""Maximum of `num_speculative_tokens`: a step with more of them computes for longer than it waits for the weights."""
_DEFAULT_TOKENS: Final = 8
_DEFAULT_LOOKUP: Final = (2, 5)
_RANGES: Final[Mapping[str, tuple[type, float, float]]] = {
    "num_speculative_tokens": (int, 1, _MAX_TOKENS),
    "prompt_lookup_min": (int, 1, 64),
    "prompt_lookup_max": (int, 1, 64),
    "suffix_decoding_max_tree_depth": (int, 3, 256),
    "suffix_decoding_max_cached_requests": (int, 0, 2**31 - 1),
    "suffix_decoding_max_spec_factor": (float, 0.0, 64.0),
    "suffix_decoding_min_token_prob": (float, 0.0, 1.0),
}
"""Type, least and greatest value of each number."""
_NAMES: Final = ("model", "revision", "quantization")
"""Fields of the method "draft_model", each a string."""
_SOURCES: Final = "drafts come from the texts of requests (ngram, suffix) or from a smaller model (draft_model)"
_LIKE_THE_TARGET: Final = "the draft model is loaded and run as the engine's options say for the model"
_UNSERVED: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "attention_backend",
            "code_revision",
            "draft_load_config",
            "enforce_eager",
            "max_model_len",
            "moe_backend",
        ),
        _LIKE_THE_TARGET,
    ),
    **dict.fromkeys(
        (
            "disable_padded_drafter_batch",
            "draft_sample_method",
            "parallel_drafting",
            "speculative_token_tree",
            "use_local_argmax_reduction",
        ),
        "a draft model proposes its most likely tokens, one after another",
    ),
    **dict.fromkeys(("draft_tensor_parallel_size", "tensor_parallel_size"), "a draft model has one rank"),
    "disable_by_batch_size": "the number of drafts follows the load as it is measured",
    "rejection_sample_method": "a draft is accepted if the request's own random number chooses it",
    "synthetic_acceptance_rate": "a draft is accepted if the request's own random number chooses it",
    "synthetic_acceptance_rates": "a draft is accepted if the request's own random number chooses it",
}
"""Fields of vLLM that are not served, and why."""


def read_speculative_config(given: Mapping[str, Any]) -> SpeculativeConfig | None:
    """Return the section that `given` asks for; None if it is empty.

    Without a method, it is "draft_model" if there is a model, else "ngram". The draft model itself is not looked at.

    Raises NotImplementedError for a method or field of vLLM that is not served, and TypeError or ValueError, with
    name, value and remedy, for anything else that is wrong.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    if not fields:
        return None
    if fields.get("method") is None and fields.get("model") in METHODS[:2]:
        fields["method"] = fields["model"]
    method = fields.pop("method", METHODS[0] if fields.get("model") is None else DRAFT_MODEL)
    if method != DRAFT_MODEL and fields.get("model") == method:
        fields.pop("model", None)
    if method not in METHODS:
        _refuse_method(method)
    if method == DRAFT_MODEL and fields.get("draft_tensor_parallel_size") == 1:
        fields.pop("draft_tensor_parallel_size")
    for name, value in fields.items():
        _check_field(name, value)
        if name in _NAMES and method != DRAFT_MODEL:
            raise ValueError(
                f"speculative_config[{name!r}]={value!r} belongs to method={DRAFT_MODEL!r}, and the method is "
                f"{method!r}; leave out one of them"
            )
    if method == DRAFT_MODEL and "model" not in fields:
        raise ValueError(
            f"speculative_config: method={DRAFT_MODEL!r} needs the name or path of a smaller model; set model"
        )
    numbers: dict[str, Any] = {
        "num_speculative_tokens": _DEFAULT_TOKENS,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 1000,
        "suffix_decoding_max_spec_factor": 2.0,
        "suffix_decoding_min_token_prob": 0.1,
        **fields,
    }
    shortest, longest = _lookup(fields)
    return SpeculativeConfig(
        **{**numbers, "method": method, "prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    )


def _lookup(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the least and the greatest number of tokens that are looked up. As in vLLM, one stands for both."""
    shortest, longest = fields.get("prompt_lookup_min"), fields.get("prompt_lookup_max")
    if shortest is None and longest is None:
        return _DEFAULT_LOOKUP
    shortest, longest = shortest or longest, longest or shortest
    assert shortest is not None
    assert longest is not None
    if shortest > longest:
        raise ValueError(
            f"speculative_config: prompt_lookup_min={shortest} is above prompt_lookup_max={longest}; lower the first"
        )
    return shortest, longest


def _refuse_method(method: object) -> None:
    """Raise the error for a method that is not served."""
    if not isinstance(method, str):
        raise TypeError(f"speculative_config['method'] must be one of {', '.join(METHODS)}, got {method!r}")
    raise NotImplementedError(
        f"speculative_config['method']={method!r} is not served: {_SOURCES}; choose one of these"
        f"{did_you_mean(method, METHODS)}"
    )


def _check_field(name: str, value: Any) -> None:
    """Raise the error for a field that is not served, or not of its type and in its range."""
    if name in _UNSERVED:
        raise NotImplementedError(
            f"speculative_config[{name!r}]={value!r} is not served: {_UNSERVED[name]}; leave it out"
        )
    if name in _NAMES:
        if not isinstance(value, str):
            raise TypeError(f"speculative_config[{name!r}] must be of type str, got {value!r}")
        if name == "quantization" and value not in QUANTIZATIONS:
            raise ValueError(
                f"speculative_config['quantization'] must be one of {', '.join(QUANTIZATIONS)}, got {value!r}"
            )
        return
    if name not in _RANGES:
        raise ValueError(f"speculative_config has no field {name!r}{did_you_mean(name, ['method', *_NAMES, *_RANGES])}")
    kind, low, high = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise TypeError(f"speculative_config[{name!r}] must be of type {kind.__name__}, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"speculative_config[{name!r}] must be from {low:g} to {high:g}, got {value!r}")
