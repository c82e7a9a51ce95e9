"""Tensors and arrays that callers give as prompts, as the bytes that the wire carries."""

import asyncio
import sys
from typing import Any

import numpy as np

from vllm_mp.client.prompts.prompt import TooManyTokensError
from vllm_mp.config import ModelConfig
from vllm_mp.requests.prompt_embeds import EMBEDS_DTYPES, MAX_EMBEDS_BYTES, PromptEmbeds
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.validation.embeds_validation import check_prompt_embeds

_INLINE_BYTES = 2**18
"""Size up to which embeddings are packed and checked in the event loop; a thread takes larger ones."""


async def pack_prompt_embeds(
    value: Any, limit: int | None, max_tokens: int | None, params: SamplingParams, model: ModelConfig
) -> PromptEmbeds:
    """Return `value`, a torch tensor or NumPy array [num_tokens, hidden_size] on any device, as bytes.

    Only the last `limit` rows are kept, unless it is None. `value` must not change until this returns. Raises TypeError
    or ValueError, naming the fault, for any other value and for embeddings from which the model cannot generate, and
    TooManyTokensError for more than `max_tokens` rows. Nothing large is copied before shape and dtype are checked.
    """
    # No torch is imported here: without it, no value can be a tensor.
    torch: Any = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if not is_tensor and not isinstance(value, np.ndarray):
        raise TypeError(
            "prompt_embeds must be a torch tensor or a NumPy array [num_tokens, hidden_size], got "
            f"{type(value).__name__}"
        )
    dtype = str(value.dtype).removeprefix("torch.") if is_tensor else value.dtype.name
    if dtype not in EMBEDS_DTYPES:
        raise TypeError(f"prompt_embeds must be of {', '.join(EMBEDS_DTYPES)}, got {dtype}; convert it")
    shape = list(value.shape)
    if len(shape) == 3 and shape[0] == 1:  # a batch of one prompt, as models take it
        value, shape = value[0], shape[1:]
    if len(shape) != 2:
        raise ValueError(f"prompt_embeds must be [num_tokens, hidden_size], got {shape}")
    if limit is not None:
        value = value[max(0, shape[0] - limit) :]
    num_tokens = len(value)
    if max_tokens is not None and num_tokens > max_tokens:
        raise TooManyTokensError(f"{num_tokens} tokens")
    num_bytes = num_tokens * shape[1] * EMBEDS_DTYPES[dtype]
    if num_bytes > MAX_EMBEDS_BYTES:
        raise ValueError(
            f"prompt_embeds must be of at most {MAX_EMBEDS_BYTES} bytes, got {num_bytes}; shorten the prompt"
            + (", or convert it to 16 bits" if dtype == "float32" else "")
        )

    def pack() -> PromptEmbeds:
        embeds = PromptEmbeds(dtype, num_tokens, _tensor_bytes(value, torch) if is_tensor else _array_bytes(value))
        check_prompt_embeds(embeds, params, model)
        return embeds

    is_on_host = not is_tensor or value.device.type == "cpu"
    return pack() if is_on_host and num_bytes <= _INLINE_BYTES else await asyncio.to_thread(pack)


def _tensor_bytes(tensor: Any, torch: Any) -> bytes:
    data: bytes = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return data


def _array_bytes(array: Any) -> bytes:
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    data: bytes = array.tobytes()
    return data
