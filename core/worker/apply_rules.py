"""Applying the rules of many requests to the logits of one step.

Every rule touches a few tokens of the vocabulary, so a step gathers these tokens of all its rows, changes them in
one operation of each kind, and puts them back. A request without rules has no part in it.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm_mp.core.scheduler.batch import Batch, Rows
from vllm_mp.core.worker.host_copies import to_device
from vllm_mp.core.worker.logit_rules import Ids, as_ids


def apply_rules(logits: Tensor, batch: Batch, rows: Rows) -> None:
    """Apply the rules of the batch's `rows` [n] to `logits` float32 [n, vocab], contiguous, in place.

    The order is that of `SamplingParams`: allowed tokens, bars, biases, penalties.
    """
    flat, vocab_size = logits.view(-1), logits.shape[-1]
    allowed, bars, biased = _Entries(), _Entries(), _Entries()
    penalized = _Entries()
    limited: list[int] = []
    for i in np.flatnonzero(batch.num_tokens[rows] < batch.min_total_tokens[rows]).tolist():
        bars.add(i, _stop_tokens(batch, int(rows[i])))
    for i in np.flatnonzero(batch.has_rules[rows]).tolist():
        row = int(rows[i])
        rules = batch.request(row).rules
        assert rules is not None
        tokens, num_prompt_tokens = batch.token_ids[row, : batch.num_tokens[row]], int(batch.num_prompt_tokens[row])
        if rules.allowed is not None:
            limited.append(i)
            allowed.add(i, rules.allowed)
        if barred := rules.barred(tokens[num_prompt_tokens:]):
            bars.add(i, as_ids(barred))
        if len(rules.bias_ids):
            biased.add(i, rules.bias_ids, rules.bias)
        if rules.counts is not None:
            ids, counts = rules.counts.catch_up(tokens, num_prompt_tokens)
            terms = np.empty((3, len(ids)), np.float32)
            # Only the repetition penalty looks at the prompt.
            terms[0], terms[1], terms[2] = rules.repetition, rules.frequency * counts, rules.presence * (counts > 0)
            penalized.add(i, ids, terms)
    if limited:
        index = allowed.index(vocab_size, logits.device)
        kept = flat[index]
        logits[to_device(np.array(limited), logits.device)] = -torch.inf
        flat[index] = kept
    if bars:
        flat[bars.index(vocab_size, logits.device)] = -torch.inf
    if biased:
        # No token is twice among the entries of a row, so nothing is lost in adding them side by side.
        index = biased.index(vocab_size, logits.device)
        flat[index] = flat[index] + biased.terms(logits.device)
    if penalized:
        index = penalized.index(vocab_size, logits.device)
        repetition, frequency, presence = penalized.terms(logits.device)
        value = flat[index]
        value = torch.where(value > 0, value / repetition, value * repetition)
        flat[index] = value - frequency - presence


class _Entries:
    """Tokens of rows, and for each what is to be done with it, collected row by row."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._ids: list[Ids] = []
        self._terms: list[npt.NDArray[np.float32]] = []

    def __bool__(self) -> bool:
        return bool(self._ids)

    def add(self, row: int, ids: Ids, terms: npt.NDArray[np.float32] | None = None) -> None:
        """`ids` [n] of `row` of the logits; `terms` [..., n]."""
        self._rows.append(row)
        self._ids.append(ids)
        if terms is not None:
            self._terms.append(terms)

    def index(self, vocab_size: int, device: torch.device) -> Tensor:
        """Where the entries lie in the flattened logits, int64 [total]."""
        starts = np.repeat(np.array(self._rows, np.int64) * vocab_size, [len(ids) for ids in self._ids])
        return to_device(starts + np.concatenate(self._ids), device)

    def terms(self, device: torch.device) -> Tensor:
        """The terms of all entries, float32 [..., total]."""
        return to_device(np.concatenate(self._terms, axis=-1), device)


def _stop_tokens(batch: Batch, row: int) -> Ids:
    stop = as_ids(batch.request(row).sampling.stop_token_ids or ())
    return np.concatenate([stop, batch.eos_token_ids]) if batch.stops_at_eos[row] else stop
