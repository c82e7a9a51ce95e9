"""Which requests a step ends, and why."""

import numpy as np

from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import LiveOutput
from vllm_mp.wire import Finished

_NO_TOKEN_ERROR = (
    "the model's logits are not finite, or allowed_token_ids, bad_words, logit_bias, structured_outputs and min_tokens "
    "together allow no token; lift one of these, or give the model another prompt"
)
_NO_VECTOR_ERROR = "the vector is not finite, as the model overflows on this prompt; give the model another prompt"


def find_endings(batch: Batch, live: LiveOutput) -> dict[int, Finished]:
    """Return, by row, the end of each request whose last token or vector is in `live`.

    A new token ends its request if it is an end-of-sequence or stop token, or if the request has reached its length.
    Its stop reason is the token, except for the tokenizer's own end-of-sequence token, as in vLLM. A vector always ends
    its request. A negative token, or a vector that is not finite, ends its request with an error.
    """
    rows, tokens = live.rows, live.tokens
    at_eos = batch.stops_at_eos[rows] & (tokens[:, None] == batch.eos_token_ids).any(1)
    is_last = at_eos | (tokens < 0) | (live.ends + 1 >= batch.max_total_tokens[rows])
    is_named = at_eos & (tokens != batch.unnamed_eos_token_id)
    stopped_by = {i: int(tokens[i]) for i in np.flatnonzero(is_named).tolist()}
    for i in np.flatnonzero(batch.has_stop_ids[rows] & ~at_eos).tolist():
        stop_token_ids = batch.request(int(rows[i])).sampling.stop_token_ids or ()
        if tokens[i] in stop_token_ids:
            stopped_by[i] = int(tokens[i])
            is_last[i] = True

    endings: dict[int, Finished] = {}
    for i in np.flatnonzero(is_last).tolist():
        row = int(rows[i])
        num_output_tokens = int(live.ends[i] - batch.num_prompt_tokens[row])  # without the new token
        request = batch.request(row)
        if tokens[i] < 0:
            endings[row] = _ending_without_token(request, num_output_tokens)
        elif at_eos[i] or i in stopped_by:
            endings[row] = Finished(request.slot, num_output_tokens + 1, "stop", stopped_by.get(i))
        else:
            endings[row] = Finished(request.slot, num_output_tokens + 1, "length")
    for row, vector in zip(live.pooled_rows.tolist(), live.vectors, strict=True):
        slot, is_finite = batch.request(row).slot, bool(np.isfinite(vector).all())
        endings[row] = Finished(slot, 0, "stop") if is_finite else Finished(slot, 0, "error", error=_NO_VECTOR_ERROR)
    return endings


def _ending_without_token(request: Request, num_output_tokens: int) -> Finished:
    """Return how a request ends for which no token could be sampled."""
    processed, constrained = request.processed, request.constrained
    if processed is not None and processed.error:
        return Finished(request.slot, num_output_tokens, "error", error=processed.error)
    if constrained is not None and constrained.error:
        return Finished(request.slot, num_output_tokens, "error", error=constrained.error, invalid_constraint=True)
    return Finished(request.slot, num_output_tokens, "error", error=_NO_TOKEN_ERROR)
