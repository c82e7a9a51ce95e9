"""Log-probabilities of chosen tokens and of the most likely tokens, as the wire carries them."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from vllm_mp.core.scheduler.batch import Batch, Counts, Rows
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.worker.sampling.host_copies import ToHost, on_host, to_device
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import Logprobs
from vllm_mp.wire import TokenLogprobs

MAX_LOGIT_ELEMENTS = 1 << 22
"""Most elements of the logits [positions, vocab] of one piece of a prompt. A message with all of their
log-probabilities fits the limit of the wire."""

Owned = tuple[int, TokenLogprobs]
"""(client, message to the client)."""


def _gather(logits: Tensor, chosen: Tensor, count: int, to_host: ToHost = on_host) -> Logprobs:
    """Return what `ops.logprobs` returns, on the host or being copied to it."""
    return Logprobs(*(to_host(column) for column in ops.logprobs(logits, chosen, count)))


def _message(logprobs: Logprobs, slot: int, position: int, first: int, last: int, count: int) -> TokenLogprobs:
    """Return the message to `slot` with entries [first, last), each with `count` tokens beside the chosen token.

    `position` is the position of the first entry in the output or prompt of the request.
    """
    return TokenLogprobs(
        slot,
        position,
        logprobs.token_ids[first:last, : count + 1].numpy().astype("<i4").tobytes(),
        logprobs.values[first:last, : count + 1].numpy().astype("<f4").tobytes(),
        logprobs.ranks[first:last].numpy().astype("<u4").tobytes(),
    )


def wants_logprobs(batch: Batch, rows: Rows) -> bool:
    """Return whether any of the batch's `rows` asks for log-probabilities of its sampled tokens."""
    return bool((batch.num_logprobs[rows] >= 0).any())


class StepLogprobs:
    """The log-probabilities of the tokens that a step samples, for the rows that ask for them.

    They are the model's own, so they must be made before the sampler changes the logits.
    """

    def __init__(
        self,
        logits: Tensor,
        batch: Batch,
        rows: Rows,
        num_tokens: Counts | None = None,
        step: ScheduledStep | None = None,
    ) -> None:
        """`logits` [n, vocab] of the batch's `rows` [n].

        `num_tokens` [n] counts the tokens of each row before the token that is sampled; by default, all known tokens.
        If `step` has drafts, only the tokens that it yields have messages.
        """
        if num_tokens is None:
            num_tokens = batch.num_tokens[rows]
        self._step = None if step is None or step.drafts is None else step
        wanting = np.flatnonzero(batch.num_logprobs[rows] >= 0)
        rows = rows[wanting]
        self._counts = batch.num_logprobs[rows]
        # Read now, because the rows may belong to other requests when the messages are made.
        positions = num_tokens[wanting] - batch.num_prompt_tokens[rows]
        self._owners = list(
            zip(batch.client[rows].tolist(), batch.slot[rows].tolist(), positions.tolist(), strict=True)
        )
        if len(wanting):
            self._wanting = wanting
            self._index = to_device(wanting, logits.device)
            self._logits = logits.index_select(0, self._index)

    def messages(self, tokens: Tensor, to_host: ToHost = on_host) -> Callable[[], list[Owned]]:
        """Return a function for the messages about the sampled `tokens` int64 [n]; a negative token has no message.

        Several tokens of a request have one message.

        Call the function once the copies of `to_host` are complete.
        """
        if not self._owners:
            return list
        chosen = tokens[self._index]
        host_chosen, step = to_host(chosen), self._step
        host_tokens = None if step is None else to_host(tokens)
        groups = []
        # One selection for each number of tokens: the number decides how ties are ordered, so a row must not depend on
        # the numbers of other rows.
        for count in np.unique(self._counts).tolist():
            members = np.flatnonzero(self._counts == count)
            at = to_device(members, chosen.device)
            logits = self._logits if len(members) == len(self._owners) else self._logits.index_select(0, at)
            logprobs = _gather(logits, chosen[at].clamp(min=0), count, to_host)
            groups.append((count, members.tolist(), logprobs))

        def make() -> list[Owned]:
            is_sampled = host_chosen.numpy() >= 0
            if step is not None and host_tokens is not None:
                is_sampled &= step.is_yielded(host_tokens.numpy())[self._wanting]
            messages: dict[int, Owned] = {}
            for count, members, logprobs in groups:
                first = 0  # of the tokens of the request, which follow one another
                for i, member in enumerate(members):
                    client, slot, position = self._owners[member]
                    if i and self._owners[members[first]][:2] != (client, slot):
                        first = i
                    if is_sampled[member]:
                        position -= i - first
                        messages[members[first]] = client, _message(logprobs, slot, position, first, i + 1, count)
            return [messages[member] for member in sorted(messages)]

        return make


def prompt_logprobs(
    step: ScheduledStep,
    batch: Batch,
    hidden: Tensor,
    compute_logits: Callable[[Tensor, int, int], Tensor],
    vocab_size: int,
    to_host: ToHost = on_host,
    num_computed: Counts | None = None,
) -> Callable[[], list[Owned]]:
    """Return a function for the messages about the prompt tokens that `step` predicts.

    Rows that do not ask for log-probabilities have no messages, and each token has one only once, even if its prompt is
    computed again. `hidden` are the step's final hidden states [num_tokens, hidden_size], and
    `compute_logits(hidden, first, last)` returns the logits of the tokens [first, last). `num_computed` [num_rows]
    counts the tokens that were computed before the step, by default as `batch` does. Call the function once the copies
    of `to_host` are complete.
    """
    firsts = batch.num_computed_tokens[step.rows] if num_computed is None else num_computed
    parts: list[tuple[int, int, int, int, Logprobs]] = []
    # Pieces, so that the logits of a long prompt stay bounded.
    piece = max(1, MAX_LOGIT_ELEMENTS // vocab_size)
    for i in np.flatnonzero(batch.num_prompt_logprobs[step.rows] >= 0).tolist():
        row = int(step.rows[i])
        request = batch.request(row)
        count, begin = request.num_prompt_logprobs, int(firsts[i])
        # The hidden state at one position predicts the token at the next.
        first = max(request.num_prompt_logprobs_sent, begin + 1)
        last = min(begin + int(step.counts[i]) + 1, request.num_prompt_tokens)
        offset = int(step.counts[:i].sum()) - begin - 1
        for start in range(first, last, piece):
            stop = min(start + piece, last)
            logits = compute_logits(hidden, offset + start, offset + stop)
            chosen = to_device(batch.token_ids[row, start:stop].astype(np.int64), hidden.device)
            found = _gather(logits, chosen, count, to_host)
            parts.append((request.client, request.slot, start, count, found))
        request.num_prompt_logprobs_sent = max(first, last)
    return lambda: [
        (client, _message(found, slot, start, 0, len(found.ranks), count))
        for client, slot, start, count, found in parts
    ]
