"""The requests of a blocking caller's batch: made of its inputs, and run in the loop of a thread."""

import functools
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import Any

from vllm_mp.client.blocking.batch_inputs import BatchInputs
from vllm_mp.client.blocking.progress_bar import ProgressBar, UseTqdm
from vllm_mp.client.blocking.prompt_batch import Batch, BatchRequest, Output
from vllm_mp.client.engine.adapters import checked_adapter
from vllm_mp.client.engine.input_processor import check_priority
from vllm_mp.client.engine.tokenization_options import tokenization_options
from vllm_mp.client.threads.loop_thread import LoopThread
from vllm_mp.config import VllmConfig
from vllm_mp.outputs import RequestFailure
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.validation.request_validation import validate_pooling_params, validate_sampling

_LIVE_PER_SEQ = 2
"""Live completions of a batch for each request of a step: while a step runs, the next requests wait in the core."""


class BatchRunner:
    """Makes and runs the batches of an engine of one configuration."""

    def __init__(self, vllm_config: VllmConfig, thread: LoopThread) -> None:
        """`thread` has the loop in which the engine is used."""
        self._config = vllm_config
        self._thread = thread
        self._request_ids = map(str, itertools.count())

    def inputs(self, prompts: Iterable[Any], params: Any, lora_request: Any, priority: Any) -> BatchInputs:
        """Return the inputs of a batch.

        Raises ValueError or TypeError for lists of different lengths, and for parameters, adapters and priorities that
        no request to this engine can have.
        """
        inputs = BatchInputs(prompts, params, lora_request, priority)
        for each in inputs.values("params"):
            self._check_params(each)
        for lora in inputs.values("lora_request"):
            checked_adapter(lora, self._config)
        for number in inputs.values("priority"):
            check_priority(number, self._config)
        return inputs

    def _check_params(self, params: SamplingParams | PoolingParams) -> None:
        """Raise ValueError for parameters that suit no prompt, so that not every prompt of a batch fails by itself."""
        if isinstance(params, SamplingParams):
            validate_sampling(params, self._config.model_config)
        else:
            validate_pooling_params(params, self._config.model_config)

    def requests(
        self, call: Callable[..., AsyncGenerator[Output, None]], inputs: BatchInputs, **arguments: Any
    ) -> Iterator[BatchRequest[Output]]:
        """Yield a request for each of `inputs`: a call of `call`, a method of `AsyncLLM`, with further `arguments`.

        Raises what `tokenization_options` raises for `tokenization_kwargs` among them.
        """
        tokenization_options(arguments.get("tokenization_kwargs"))
        for each in inputs:
            request_id = next(self._request_ids)
            start = functools.partial(
                call,
                each.prompt,
                each.params,
                request_id,
                lora_request=each.lora_request,
                priority=each.priority,
                **arguments,
            )
            yield BatchRequest(each.prompt_index, request_id, getattr(each.params, "n", 1), start)

    def run(
        self, requests: Iterable[BatchRequest[Output]], total: int | None, use_tqdm: UseTqdm
    ) -> list[Output | RequestFailure]:
        """Run `requests`, `total` in number if it is known; return the last output of each."""
        self._thread.check()
        max_live = _LIVE_PER_SEQ * self._config.scheduler_config.max_num_seqs
        return Batch[Output](self._thread, max_live, ProgressBar(use_tqdm, total), total).run(requests)
