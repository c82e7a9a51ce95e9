"""A pooling request as its consumer sees it: a stream with one output, the vector."""

from collections.abc import Sequence

from vllm_mp import wire
from vllm_mp.client.outputs.pooled_vector import PooledVector
from vllm_mp.client.outputs.stream import Isolation, RequestStream
from vllm_mp.client.prompts.request import PoolingRequest
from vllm_mp.errors import EngineGenerateError
from vllm_mp.outputs import PoolingOutput, PoolingRequestOutput


class PoolingStream(RequestStream):
    """Waits for the vector of one prompt, which is its only output."""

    __slots__ = ("vector",)

    def __init__(self, request: PoolingRequest) -> None:
        super().__init__(request)
        self._request: PoolingRequest
        self.vector = PooledVector()

    @property
    def awaited(self) -> Sequence[PooledVector]:
        return (self.vector,)

    def add_message(self, index: int, incarnation: int, isolation: Isolation) -> wire.AddPooling:
        request = self._request
        return wire.AddPooling(
            incarnation=incarnation,
            slot=self.vector.slot,
            request_id=request.request_id,
            prompt=request.packed_prompt,
            params=request.params,
            priority=request.priority,
            cache_salt=request.cache_salt,
            isolate_until_num_tokens=isolation.until_num_tokens,
            isolation_group=isolation.group,
            after_pause=self.after_pause,
            arrival_time=request.arrival_time,
            lora=request.lora,
            is_replay=self.is_replay,
            tenant=request.tenant,
        )

    def has_news(self) -> bool:
        return self.is_over

    def _output(self) -> PoolingRequestOutput:
        """Return the vector. Raises EngineGenerateError if there is none, as for a request that was aborted."""
        vector, finish = self.vector.data, self.vector.finish
        if vector is None:
            why = "was aborted" if finish and finish.reason == "abort" else "ended without its vector"
            raise EngineGenerateError(f"request {self.request_id} {why}")
        return PoolingRequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=PoolingOutput(vector),
            metrics=self._metrics,
            num_cached_tokens=self.num_cached_tokens,
        )
