"""How a chat samples where neither the user nor the model says it."""

from collections.abc import Mapping
from typing import Any, Final

MAX_TOKENS: Final = 2048
_SAMPLED = {"temperature": 0.7, "top_p": 0.95}
_NAMES = {"temperature", "top_p", "top_k", "min_p", "typical_p"}
_FREQUENCY_PENALTY = 0.3
"""Keeps small models out of loops. Unlike a repetition penalty it leaves the words of the question alone."""


def chat_defaults(model_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a chat without flags: the model's, and the chat's own where it has none.

    A model that sets a filter but no temperature gets temperature 1, as in transformers. A model that sets a repetition
    penalty gets no other penalty.
    """
    sampled = {"temperature": 1.0} if model_defaults.keys() & _NAMES else _SAMPLED
    penalty = {} if "repetition_penalty" in model_defaults else {"frequency_penalty": _FREQUENCY_PENALTY}
    return {"max_tokens": MAX_TOKENS, **sampled, **penalty, **model_defaults}
