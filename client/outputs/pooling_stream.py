"""One pooling request as its consumer sees it."""

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.errors import EngineGenerateError
from vllm_mp.outputs import PoolingOutput, PoolingRequestOutput
from vllm_mp.pooling_params import PoolingParams
from vllm_mp.sampling_params import RequestOutputKind, SamplingParams


class PoolingStream(RequestStream):
    """A stream without tokens, whose only output is a vector."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: PoolingParams,
        arrival_time: float,
    ) -> None:
        no_tokens = Completion(0, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))
        super().__init__(request_id, prompt, prompt_token_ids, [no_tokens], arrival_time)
        self.pooling = params
        self._vector: npt.NDArray[np.float32] | None = None

    def take_in_vector(self, data: bytes) -> None:
        """Note the vector, little-endian float32, whose end will follow, unless there was an end already.

        Raises ValueError if the length does not fit.
        """
        if not self.is_over:
            self._vector = np.frombuffer(data, "<f4").astype(np.float32)

    def _output(self) -> Any:
        """A PoolingRequestOutput; raises EngineGenerateError where there is no vector: the request was aborted."""
        if self._vector is None:
            finish = self.answers[0].finish
            why = "was aborted" if finish and finish.reason == "abort" else "ended without its vector"
            raise EngineGenerateError(f"request {self.request_id} {why}")
        return PoolingRequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=PoolingOutput(self._vector),
            metrics=self._metrics,
            num_cached_tokens=self.num_cached_tokens,
        )
