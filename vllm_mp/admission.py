"""The conditions under which a request can run, checked by the client first and by the core again."""

import numpy as np
import numpy.typing as npt

from vllm_mp.sampling_params import SamplingParams, check_served
from vllm_mp.wire import MAX_REQUEST_ID_BYTES


def check_request(
    request_id: str,
    prompt: npt.NDArray[np.int32],
    output: npt.NDArray[np.int32],
    params: SamplingParams,
    max_model_len: int,
    vocab_size: int,
) -> int:
    """The number of tokens, prompt included, at which the answer ends for length.

    `prompt` [n] and `output` [m], the answer so far, are token ids. Raises ValueError for a request that can never
    run, NotImplementedError for one that asks for what is not served, naming the field.
    """
    check_served(params)
    try:
        size = len(request_id.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"request_id must be valid Unicode, got {request_id[:50]!r}") from error
    if size > MAX_REQUEST_ID_BYTES:
        raise ValueError(f"request_id must be of at most {MAX_REQUEST_ID_BYTES} bytes, got {request_id[:50]!r}...")
    if not len(prompt):
        raise ValueError("the prompt is empty; give at least one token")
    if len(prompt) >= max_model_len:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, and with the answer max_model_len={max_model_len} is all there may "
            "be; shorten it, or raise max_model_len if the model's context allows it"
        )
    _check_ids("prompt_token_ids", prompt, vocab_size)
    _check_ids("the answer so far", output, vocab_size)
    _check_ids("stop_token_ids", np.asarray(params.stop_token_ids or [], np.int64), vocab_size)
    max_total = max_model_len
    if params.max_tokens is not None:
        max_total = min(max_total, len(prompt) + params.max_tokens)
    if len(prompt) + len(output) >= max_total:
        raise ValueError(f"the answer has {len(output)} tokens already, which is all that the request allows")
    return max_total


def _check_ids(name: str, ids: npt.NDArray[np.integer], vocab_size: int) -> None:
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise ValueError(f"{name} must be in [0, {vocab_size}), the model's vocabulary, got {int(wrong[0])}")
