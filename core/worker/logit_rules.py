"""What a request's parameters do to its logits before a token is chosen: bars, biases and penalties."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_mp.sampling_params import SamplingParams

Ids = npt.NDArray[np.int64]


class LogitRules:
    """The rules of one request, and what of its tokens they need to remember."""

    def __init__(self, params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> None:
        self.allowed = None if params.allowed_token_ids is None else as_ids(params.allowed_token_ids)
        bias = params.logit_bias or {}
        self.bias_ids = as_ids(bias)
        self.bias = np.fromiter(bias.values(), np.float32, len(bias))
        self._always_barred = [word[0] for word in bad_words if len(word) == 1]
        self._barred_after: dict[int, list[tuple[list[int], int]]] = {}
        """What comes before the last token of a bad word, and that token, by the last but one."""
        for word in bad_words:
            if len(word) > 1:
                self._barred_after.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
        self.repetition = params.repetition_penalty
        self.frequency = params.frequency_penalty
        self.presence = params.presence_penalty
        self.counts = TokenCounts() if _penalizes(params) else None

    @classmethod
    def of(cls, params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> "LogitRules | None":
        """The rules that `params` ask for; None if they ask for none. `bad_words` are theirs, as token ids."""
        if params.allowed_token_ids is None and not params.logit_bias and not bad_words and not _penalizes(params):
            return None
        return cls(params, bad_words)

    @property
    def reads_answer(self) -> bool:
        """Whether what is allowed next depends on the tokens so far."""
        return self.counts is not None or bool(self._barred_after)

    def barred(self, output: npt.NDArray[np.int32]) -> list[int]:
        """The tokens that would complete a bad word behind `output` [n], the answer so far."""
        barred = self._always_barred
        for start, last in self._barred_after.get(int(output[-1]), ()) if len(output) else ():
            if output[-len(start) :].tolist() == start:
                barred = [*barred, last]
        return barred


class TokenCounts:
    """The different tokens of one sequence, and how often each is in its answer."""

    def __init__(self) -> None:
        self._ids = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)
        self._place_of: dict[int, int] = {}
        self._num_seen = 0

    def catch_up(self, tokens: npt.NDArray[np.int32], num_prompt_tokens: int) -> tuple[Ids, npt.NDArray[np.float32]]:
        """The ids [n] and counts [n] for a sequence of `tokens`, which begins with those of the last call."""
        if self._num_seen < num_prompt_tokens:
            for token in np.unique(tokens[:num_prompt_tokens]).tolist():
                self._place(token)
            self._num_seen = num_prompt_tokens
        for token in tokens[self._num_seen :].tolist():
            place = self._place(token)  # which may make a larger array of the counts
            self._counts[place] += 1
        self._num_seen = len(tokens)
        used = len(self._place_of)
        return self._ids[:used], self._counts[:used]

    def _place(self, token: int) -> int:
        place = self._place_of.setdefault(token, len(self._place_of))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        return place


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def as_ids(values: Iterable[Any]) -> Ids:
    return np.fromiter(values, np.int64)
