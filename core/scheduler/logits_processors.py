"""The changes of its logits that a request asks for: allowed tokens, barred tokens, biases and penalties.

The sampler applies them. This module must not import torch: requests may arrive before the core has imported it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_mp.requests.sampling_params import SamplingParams

Ids = npt.NDArray[np.int64]


class LogitsProcessors:
    """The logits processors of a request, with their counts of its tokens."""

    def __init__(self, params: SamplingParams, bad_words: Sequence[Sequence[int]], num_unknown: int = 0) -> None:
        """`bad_words` are `params.bad_words` as token ids; the first `num_unknown` tokens are given as embeddings."""
        self.allowed = None if params.allowed_token_ids is None else as_ids(params.allowed_token_ids)
        bias = params.logit_bias or {}
        self.bias_ids = as_ids(bias)
        self.bias = np.fromiter(bias.values(), np.float32, len(bias))
        self._always_barred = [word[0] for word in bad_words if len(word) == 1]
        self._barred_after: dict[int, list[tuple[list[int], int]]] = {}
        """By the last token but one of a bad word: (all of its tokens but the last, its last token)."""
        for word in bad_words:
            if len(word) > 1:
                self._barred_after.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        self.repetition = params.repetition_penalty
        self.frequency = params.frequency_penalty
        self.presence = params.presence_penalty
        self.counts = TokenCounts(num_unknown) if _penalizes(params) else None

    @classmethod
    def from_params(
        cls, params: SamplingParams, bad_words: Sequence[Sequence[int]], num_unknown: int = 0
    ) -> "LogitsProcessors | None":
        """Return the processors of `params`, None without any; the arguments are as for the constructor."""
        if params.allowed_token_ids is None and not params.logit_bias and not bad_words and not _penalizes(params):
            return None
        return cls(params, bad_words, num_unknown)

    @property
    def reads_output(self) -> bool:
        """Whether the change of the logits depends on the output tokens so far."""
        return self.counts is not None or bool(self._barred_after)

    def barred(self, output: npt.NDArray[np.int32]) -> list[int]:
        """Return the tokens that would complete a bad word after `output` [n], the output tokens so far."""
        barred = self._always_barred
        for start, last in self._barred_after.get(int(output[-1]), ()) if len(output) else ():
            if output[-len(start) :].tolist() == start:
                barred = [*barred, last]
        return barred


class TokenCounts:
    """The distinct tokens of a request's prompt and output, with the number of times that each occurs in the output."""

    def __init__(self, num_unknown: int = 0) -> None:
        """The first `num_unknown` tokens, which are the whole prompt or none, are not counted."""
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)
        self._index_of: dict[int, int] = {}
        self._num_seen = num_unknown

    def catch_up(self, tokens: npt.NDArray[np.int32], num_prompt_tokens: int) -> tuple[Ids, npt.NDArray[np.float32]]:
        """Return the ids [n] and counts [n] of `tokens`, which begin with the tokens of the call before."""
        if self._num_seen < num_prompt_tokens:
            for token in np.unique(tokens[:num_prompt_tokens]).tolist():
                self._index(token)
            self._num_seen = num_prompt_tokens
        for token in tokens[self._num_seen :].tolist():
            index = self._index(token)  # may replace `_counts`, so it is called first
            self._counts[index] += 1
        self._num_seen = len(tokens)
        used = len(self._index_of)
        return self._ids[:used], self._counts[:used]

    def ahead(self, drafts: npt.NDArray[np.int32]) -> tuple[Ids, npt.NDArray[np.float32]]:
        """Return what `catch_up` would return if `drafts` [n] followed the tokens so far, without counting them."""
        used = len(self._index_of)
        ids, counts = self._ids[:used], self._counts[:used].copy()
        new: dict[int, int] = {}
        for token in drafts.tolist():
            index = self._index_of.get(token)
            if index is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts[index] += 1
        more = np.fromiter(new.values(), np.float32, len(new))
        return np.concatenate([ids, as_ids(new)]), np.concatenate([counts, more])

    def _index(self, token: int) -> int:
        """Return the index of `token` in the arrays, which grow if it is new and they are full."""
        index = self._index_of.setdefault(token, len(self._index_of))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token
        return index


def as_ids(values: Iterable[Any]) -> Ids:
    return np.fromiter(values, np.int64)


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
