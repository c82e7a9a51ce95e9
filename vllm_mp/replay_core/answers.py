"""The recorded answers, and which of them a request gets."""

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_mp.requests.sampling_params import SamplingParams

_FILE = Path(__file__).parent / "answers.npy"
"""Written by `tools/recordings/record_answers.py`."""


class Answer(NamedTuple):
    """What a request gets: `length` tokens of a recorded answer, which is repeated if it is too short."""

    number: int
    """The recorded answer."""
    length: int
    """Number of output tokens."""
    reason: str
    """"length" or "stop"."""
    stop_reason: int | None = None
    """The stop token, unless it is the unnamed end-of-sequence token."""


class Answers:
    """The recorded answers, all of the same length."""

    def __init__(self) -> None:
        self.tokens: npt.NDArray[np.uint32] = np.load(_FILE).astype(np.uint32)
        """[answers, tokens]"""

    def choose(
        self,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        max_tokens: int,
        eos_token_ids: list[int],
        unnamed_eos_token_id: int | None = None,
    ) -> Answer:
        """Return the answer to `prompt` [n], which depends on the prompt alone, and with a temperature on the seed too.

        The answer ends at the first stop token after `params.min_tokens`, or else with `max_tokens` tokens.
        """
        seed = (params.seed or 0) if params.temperature > 0 else 0
        index = (zlib.crc32(prompt.astype("<i4").tobytes()) + seed) % len(self.tokens)
        eos = [] if params.ignore_eos else eos_token_ids
        stops = np.asarray([*eos, *(params.stop_token_ids or [])], np.int64)
        if len(stops):
            # A stop token that is not in the first repetition is in no other, unless `min_tokens` hides the first.
            span = min(max_tokens, params.min_tokens + self.tokens.shape[1])
            tokens = self.prefix(index, span)
            hits = np.flatnonzero((tokens[params.min_tokens :, None] == stops).any(1))
            if len(hits):
                length = params.min_tokens + int(hits[0]) + 1
                token = int(tokens[length - 1])
                return Answer(index, length, "stop", None if token in eos and token == unnamed_eos_token_id else token)
        return Answer(index, max_tokens, "length")

    def prefix(self, index: int, length: int) -> npt.NDArray[np.uint32]:
        """Return the first `length` tokens of the answer `index`, repeated as often as needed."""
        return np.resize(self.tokens[index], length)
