"""The sampling parameters of a chat that neither the user nor the model sets."""

from collections.abc import Mapping
from typing import Any, Final

from vllm_mp.cli.terminal.repetition import penalty_against_loops
from vllm_mp.requests.sampling_params import PARAMETERS

MAX_TOKENS: Final = 2048
_SAMPLED = {"temperature": 0.7, "top_p": 0.95}
_SAMPLERS = {name for name, parameter in PARAMETERS.items() if parameter.column and parameter.generation_config}
"""The temperature and the filters, as far as a model's generation_config.json may set them."""


def chat_defaults(model_defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a chat without flags: the model's, and the chat's own where it has none.

    A model that sets a filter but no temperature gets temperature 1, as in transformers.
    """
    sampled = {"temperature": 1.0} if model_defaults.keys() & _SAMPLERS else _SAMPLED
    return {"max_tokens": MAX_TOKENS, **sampled, **penalty_against_loops(model_defaults), **model_defaults}
