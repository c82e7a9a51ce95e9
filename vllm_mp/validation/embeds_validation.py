"""The checks of a prompt that is given as embeddings; the client makes them, and the core again."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vllm_mp.config import ModelConfig
from vllm_mp.requests.prompt_embeds import EMBEDS_DTYPES, PromptEmbeds
from vllm_mp.requests.sampling_params import SamplingParams

_MAX_VALUES: Final = {"float32": 3.4028234663852886e38, "float16": 65504.0, "bfloat16": 3.3895313892515355e38}
"""The largest finite value of each dtype."""
_EXPONENT: Final = np.uint16(0x7C00)
"""The bits of a float16's exponent, which are all set if it is infinite or NaN."""
_CHECKED_VALUES: Final = 2**18
"""Number of values that are checked at a time, which bounds the memory of the check."""


def check_prompt_embeds(embeds: PromptEmbeds, params: SamplingParams, model: ModelConfig) -> None:
    """Raise ValueError, naming the fault and the remedy, for embeddings from which the model cannot generate."""
    if not model.enable_prompt_embeds:
        raise ValueError(
            "prompt_embeds needs an engine with enable_prompt_embeds=True; start the engine with that option, or give "
            "text or token ids"
        )
    if params.prompt_logprobs is not None:
        raise ValueError(
            "prompt_logprobs must be None with prompt_embeds, because such a prompt has no tokens; leave it out"
        )
    if embeds.dtype not in EMBEDS_DTYPES:
        raise ValueError(f"prompt_embeds must be of {', '.join(EMBEDS_DTYPES)}, got {embeds.dtype[:50]!r}; convert it")
    if embeds.num_tokens < 1:
        raise ValueError("the prompt is empty; give prompt_embeds of at least one token")
    hidden_size, item_bytes = model.architecture.hidden_size, EMBEDS_DTYPES[embeds.dtype]
    if len(embeds.data) != embeds.num_tokens * hidden_size * item_bytes:
        width = len(embeds.data) / (embeds.num_tokens * item_bytes)
        raise ValueError(
            f"prompt_embeds must be [num_tokens, {hidden_size}], the length of the model's hidden states, got "
            f"[{embeds.num_tokens}, {width:g}]"
        )
    _check_values(embeds, model.dtype)


def _check_values(embeds: PromptEmbeds, model_dtype: str) -> None:
    """Raise ValueError for values that are not finite in `model_dtype`, the dtype in which the model computes."""
    limit = _MAX_VALUES.get(model_dtype, _MAX_VALUES["float32"])
    item_bytes = EMBEDS_DTYPES[embeds.dtype]
    data, step = memoryview(embeds.data), _CHECKED_VALUES * item_bytes
    for start in range(0, len(data), step):
        values = _values(embeds.dtype, data[start : start + step])
        if embeds.dtype == "float16":  # finite values fit every dtype, and NumPy's conversion is slow
            is_valid = values.view(np.uint16) & _EXPONENT != _EXPONENT
        else:
            is_valid = np.abs(values) <= limit  # false for NaN
        if not is_valid.all():
            index = int(np.argmin(is_valid))
            row = (start + index * item_bytes) * embeds.num_tokens // len(data)
            raise ValueError(
                f"prompt_embeds must be finite in {model_dtype}, the model's dtype, got {values[index]} in row {row}"
            )


def _values(dtype: str, data: memoryview) -> npt.NDArray[Any]:
    """Return the values of `data` [n], float16 or float32."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(data, "<f4" if dtype == "float32" else "<f2")
