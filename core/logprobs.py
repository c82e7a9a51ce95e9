"""Log-probabilities of chosen tokens and of the most likely ones, as they go over the wire."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_mp.core.batch import Batch, Rows
from vllm_mp.core.scheduler import Step
from vllm_mp.wire import TokenLogprobs

# Bound on the logits that one piece of a prompt materialises, in elements of [positions, vocab]; one message of all
# of their log-probabilities fits the wire, too.
MAX_LOGIT_ELEMENTS = 1 << 22

Owned = tuple[int, TokenLogprobs]
"""(client, what it is sent)."""


class Logprobs(NamedTuple):
    """Of n positions, on the host."""

    token_ids: npt.NDArray[np.int32]
    """[n, 1 + k] the chosen token, then the most likely ones, best first."""
    values: npt.NDArray[np.float32]
    """[n, 1 + k]."""
    ranks: npt.NDArray[np.uint32]
    """[n] place of the chosen token, 1 for the most likely; equal ones share the better place."""

    @classmethod
    def gather(cls, distribution: Tensor, chosen: Tensor, count: int) -> "Logprobs":
        """Those of `chosen` int64 [n] and of the `count` best, of `distribution` float32 [n, vocab] of logarithms."""
        chosen = chosen.unsqueeze(-1)
        own = distribution.gather(-1, chosen)
        ranks = (distribution > own).sum(-1) + 1
        best = distribution.topk(min(count, distribution.shape[-1]), dim=-1)
        ids = torch.cat((chosen, best.indices), -1).to(torch.int32)
        values = torch.cat((own, best.values), -1)
        return cls(ids.cpu().numpy(), values.cpu().numpy(), ranks.cpu().numpy().astype(np.uint32))

    def message(self, slot: int, position: int, first: int, last: int, count: int) -> TokenLogprobs:
        """The rows [first, last), `count` tokens beside the chosen one each, for the request in `slot`."""
        return TokenLogprobs(
            slot,
            position,
            self.token_ids[first:last, : count + 1].astype("<i4").tobytes(),
            self.values[first:last, : count + 1].astype("<f4").tobytes(),
            self.ranks[first:last].astype("<u4").tobytes(),
        )


def wants_logprobs(batch: Batch, rows: Rows) -> bool:
    """Whether any of the batch's `rows` does, of the tokens it samples."""
    return bool((batch.num_logprobs[rows] >= 0).any())


class StepLogprobs:
    """The log-probabilities of the tokens that a step samples, for those of its rows that want them.

    Made before the sampler changes the logits, because they are the model's own.
    """

    def __init__(self, logits: Tensor, batch: Batch, rows: Rows) -> None:
        """`logits` [n, vocab] of the batch's `rows` [n]."""
        self._batch = batch
        self._rows = rows
        self._wanting = np.flatnonzero(batch.num_logprobs[rows] >= 0)
        if len(self._wanting):
            self._index = torch.from_numpy(self._wanting).to(logits.device)
            self._distribution = logits[self._index].float().log_softmax(-1)

    def messages(self, tokens: Tensor) -> list[Owned]:
        """For `tokens` int64 [n], of which negative ones have no log-probability."""
        if not len(self._wanting):
            return []
        batch, rows = self._batch, self._rows[self._wanting]
        counts = batch.num_logprobs[rows]
        chosen = tokens[self._index]
        is_good = chosen.cpu().numpy() >= 0
        messages: dict[int, Owned] = {}
        # One selection for each number of tokens: how ties are ordered depends on it.
        for count in np.unique(counts).tolist():
            alike = np.flatnonzero((counts == count) & is_good)
            at = torch.from_numpy(alike).to(chosen.device)
            found = Logprobs.gather(self._distribution[at], chosen[at], count)
            for i, place in enumerate(alike.tolist()):
                row = int(rows[place])
                position = int(batch.num_tokens[row] - batch.num_prompt[row])
                message = found.message(int(batch.slot[row]), position, i, i + 1, count)
                messages[place] = int(batch.client[row]), message
        return [messages[place] for place in sorted(messages)]


def prompt_logprobs(
    step: Step, batch: Batch, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor], vocab_size: int
) -> list[Owned]:
    """Those of the prompt tokens that `step` reads, for the rows that want them and have not been sent them.

    `hidden` [num_tokens, hidden_size] are the step's final hidden states.
    """
    messages = []
    # Pieces, so that the logits of a long prompt stay bounded.
    piece = max(1, MAX_LOGIT_ELEMENTS // vocab_size)
    for i in np.flatnonzero(batch.num_prompt_logprobs[step.rows] >= 0).tolist():
        row = int(step.rows[i])
        request = batch.request(row)
        count, begin = request.num_prompt_logprobs, int(batch.num_computed[row])
        # The state at one position tells of the token at the next.
        first = max(request.num_prompt_logprobs_sent, begin + 1)
        last = min(begin + int(step.counts[i]) + 1, request.num_prompt)
        offset = int(step.counts[:i].sum()) - begin - 1
        for start in range(first, last, piece):
            stop = min(start + piece, last)
            distribution = compute_logits(hidden[offset + start : offset + stop]).float().log_softmax(-1)
            chosen = torch.from_numpy(batch.token_ids[row, start:stop].astype(np.int64)).to(hidden.device)
            found = Logprobs.gather(distribution, chosen, count)
            messages.append((request.client, found.message(request.slot, start, 0, stop - start, count)))
        request.num_prompt_logprobs_sent = max(first, last)
    return messages
