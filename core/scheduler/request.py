"""A request as the scheduler holds it."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_mp.core.worker.logits_processors import LogitsProcessors
from vllm_mp.pooling_params import PoolingParams
from vllm_mp.sampling_params import SamplingParams

NO_ROW = -1


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate, or to make a vector of.

    While it runs, its tokens and counters live in its row of the `Batch`.
    """

    client: int
    slot: int
    request_id: str
    params: SamplingParams
    tokens: npt.NDArray[np.int32]
    """[num_tokens] prompt and answer so far; up to date only while the request waits."""
    num_prompt_tokens: int
    max_total_tokens: int
    """Tokens, prompt included, at which the answer ends for length."""
    order: tuple[int, int]
    """(priority, arrival number): what runs first, and is preempted last."""
    num_bytes: int = 0
    """What it counts for in `MemoryQuota`."""
    hashes: list[bytes] = field(default_factory=list)
    """The root hash, then that of each full block, as far as they have been needed. Empty: it shares no blocks."""
    reads_cache: bool = True
    """False: its beginning is computed even if it is in the cache; others may still build on its blocks."""
    num_cached_tokens: int | None = None
    """Tokens whose keys and values were in the cache already when the request was first admitted; None before."""
    logits_processors: LogitsProcessors | None = None
    num_logprobs: int = -1
    """Log-probabilities to send of the most likely tokens at each position of the answer; -1: none at all."""
    num_prompt_logprobs: int = -1
    """The same for the prompt."""
    num_prompt_logprobs_sent: int = 1
    """Positions of the prompt that need none any more; the first token has none."""
    pooling: PoolingParams | None = None
    """Make a vector of the prompt, and nothing else; without None in `pooling_type` and `normalize`."""
    isolate_until_num_tokens: int = 0
    """Where not 0: an earlier core died with it in the step, and it runs alone until its answer has so many tokens."""
    row: int = field(default=NO_ROW)
    aborted: bool = False

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens
