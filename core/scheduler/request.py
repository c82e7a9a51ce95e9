"""A request as the scheduler holds it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vllm_mp.core.scheduler.logits_processors import LogitsProcessors
from vllm_mp.core.scheduler.processed_request import ProcessedRequest
from vllm_mp.core_link.core_status import OutsideTask
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.prompt_embeds import PromptEmbeds
from vllm_mp.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_mp.core.images.request_images import RequestImages
    from vllm_mp.core.lora.cached_adapter import CachedAdapter
    from vllm_mp.core.speculation.request_drafts import RequestDrafts
    from vllm_mp.core.structured_output.constrained_output import ConstrainedOutput

NO_ROW = -1

RequestKey = tuple[int, int]
"""(client, slot), which names one live request."""

Line = tuple[int, int]
"""(client, tenant): the requests of one client for one of its tenants."""

GroupKey = tuple[int, int]
"""(client, isolation group), which names suspects that run in steps together."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt to generate tokens for, or to make a vector of.

    While the request runs, its tokens and counters live in its row of the `Batch`.
    """

    client: int
    slot: int
    request_id: str
    params: SamplingParams | PoolingParams
    """Sampling parameters of a request that generates; pooling parameters of a request for one vector, with
    `pooling_type` and `normalize` set."""
    tokens: npt.NDArray[np.int32]
    """[num_tokens] prompt and output so far; up to date only while the request waits. Zeros stand for a prompt that is
    given as embeddings."""
    num_prompt_tokens: int
    max_total_tokens: int
    """Number of tokens, prompt included, at which the request ends with reason "length"."""
    order: tuple[int, int]
    """(priority, arrival number): the lowest runs first and is preempted last."""
    num_bytes: int = 0
    """Bytes that the request takes of the `MemoryQuota`."""
    hashes: list[bytes] = field(default_factory=list)
    """The root hash, then the hash of each full block, as far as they are computed. Empty: it shares no blocks."""
    reads_cache: bool = True
    """False: its beginning is computed even if it is cached. Other requests may still build on its blocks."""
    num_cached_tokens: int | None = None
    """Number of tokens found in the prefix cache when the request was first admitted; 0 for a replay; None before."""
    queued_at: float = 0.0
    """When the request entered the waiting queue for the first time, in seconds of `time.monotonic()`."""
    queue_seconds: float | None = None
    """Time from `queued_at` until the request was first admitted; None before."""
    prompt_embeds: PromptEmbeds | None = None
    """The prompt, if it is given as embeddings."""
    images: "RequestImages | None" = None
    """The images of the prompt; None if it has none."""
    logits_processors: LogitsProcessors | None = None
    constrained: "ConstrainedOutput | None" = None
    """Where the output stands in the grammar that it must match; None if it must match none."""
    processed: ProcessedRequest | None = None
    """What registered logits processors know of the request; None if none is for it."""
    num_logprobs: int = -1
    """Number of most likely tokens whose log-probabilities are sent at each output position; -1: send none at all."""
    num_prompt_logprobs: int = -1
    """The same for each position of the prompt."""
    num_prompt_logprobs_sent: int = 1
    """Number of prompt positions, from the first, whose log-probabilities are sent; the first token has none."""
    isolate_until_num_tokens: int = 0
    """Not 0: the request is a suspect, and runs isolated until its output has that many tokens."""
    isolation_group: int = 0
    """Names the suspects of the same client in whose steps this suspect may run."""
    after_pause: bool = False
    """The client knew of a pause when it first sent the request."""
    is_replay: bool = False
    """The client has sent the request to an earlier core, or in an earlier connection."""
    adapter: "CachedAdapter | None" = None
    """The LoRA adapter that changes the model for this request; None for the base model."""
    arrival_time: float = 0.0
    """When the request arrived at the client, by the client's clock: the order among waiting requests of the same
    client and priority. It counts for nothing else, so that no client can get ahead of another by it."""
    owner: str = ""
    """The process, or the key, that the request's client belongs to."""
    tenant: int = 0
    """The party of the client for which the request runs."""
    max_drafts: int = 0
    """Maximum number of draft tokens in a step; 0: the request gets none."""
    draft_pool: bytes = b""
    """Requests with the same pool may get drafts from one another's answers."""
    drafts: "RequestDrafts | None" = None
    """What the request keeps for its drafts; None until it first may have one."""
    row: int = NO_ROW
    """Row of the batch; `NO_ROW` while the request waits."""

    @property
    def key(self) -> RequestKey:
        return self.client, self.slot

    @property
    def line(self) -> Line:
        return self.client, self.tenant

    @property
    def task(self) -> OutsideTask:
        """The request as the status page names it while the core does something outside of steps for it."""
        num_output_tokens = self.num_output_tokens
        return OutsideTask(self.client, self.slot, num_output_tokens or -self.num_prompt_tokens)

    @property
    def isolation(self) -> GroupKey:
        """The group of a suspect."""
        return self.client, self.isolation_group

    @property
    def sampling(self) -> SamplingParams:
        """The parameters of a request that generates; raises RuntimeError for a pooling request."""
        if isinstance(self.params, PoolingParams):
            raise RuntimeError(f"request {self.request_id!r} is a pooling request and has no sampling parameters")
        return self.params

    @property
    def pooling(self) -> PoolingParams | None:
        """The parameters of a pooling request; None for a request that generates."""
        return self.params if isinstance(self.params, PoolingParams) else None

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens; up to date only while the request waits."""
        return len(self.tokens) - self.num_prompt_tokens
