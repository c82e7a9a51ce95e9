"""An engine whose calls block: its thread, its end, and the operations that concern no single prompt."""

import functools
import itertools
import types
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from typing import Any, Self

from vllm_mp.arguments.unserved_arguments import check_unserved
from vllm_mp.arguments.unserved_names import refuse_attributes
from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.client.blocking.batch_inputs import BatchInputs
from vllm_mp.client.blocking.progress_bar import ProgressBar, UseTqdm
from vllm_mp.client.blocking.prompt_batch import Batch, BatchRequest, Output
from vllm_mp.client.engine.adapters import checked_adapter
from vllm_mp.client.engine.input_processor import check_priority
from vllm_mp.client.threads.loop_thread import LoopThread
from vllm_mp.config.engine_args import AsyncEngineArgs, EngineArgs
from vllm_mp.model_store import DEFAULT_MODEL
from vllm_mp.outputs import RequestFailure
from vllm_mp.requests.sampling_params import SamplingParams

_LIVE_PER_SEQ = 2
"""Live completions of a batch for each request of a step: while a step runs, the next requests wait in the core."""
_RUNNERS = ("auto", "generate", "pooling")
_CONVERSIONS = ("auto", "none", "embed")
_REFUSED = {
    "beam_search": "generate with n completions and logprobs, and choose by cumulative_logprob",
    "apply_model": "no code travels to the core; collective_rpc calls its methods by name",
    "enqueue_chat": "chat() runs conversations; enqueue() takes prompts",
    "reward": "models with reward heads are not served; classify() and score() are",
    "get_metrics": "stat_loggers of AsyncLLM and /metrics of `vllm-mp serve` have the figures",
    "set_tokenizer": "give the option tokenizer",
    "release_kv_cache_memory": "sleep() releases the KV cache",
    **dict.fromkeys(
        (
            "finish_weight_update",
            "get_weight_version",
            "init_weight_transfer_engine",
            "shutdown_weight_transfer_engine",
            "start_draft_weight_update",
            "start_weight_update",
            "update_weight_version",
            "update_weights",
        ),
        "weights come from files: change the files of the model's folder, then call sleep(level=2) and wake_up()",
    ),
}
"""Names of vLLM's class that this class lacks, and what to use instead."""


class LLMEngine:
    """The attributes of the inner engine of vLLM's `LLM` that programs read."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self.vllm_config = engine.vllm_config
        self.model_config = engine.vllm_config.model_config

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer; None with skip_tokenizer_init."""
        return self._engine.tokenizer

    def get_tokenizer(self) -> Any:
        """Return the Hugging Face tokenizer. Raises ValueError if the engine has none."""
        return self._engine.get_tokenizer()

    __getattr__ = refuse_attributes(
        dict.fromkeys(
            ("abort_request", "add_request", "engine_core", "has_unfinished_requests", "model_executor", "step"),
            "the core runs its own steps; use generate() of LLM, or AsyncLLM for single requests",
        )
    )


class BlockingEngine:
    """The part of `LLM` that concerns no kind of prompt."""

    def __init__(
        self, model: str = DEFAULT_MODEL, *, runner: str = "auto", convert: str = "auto", **options: Any
    ) -> None:
        """Start a core of `model`; `options` are fields of `AsyncEngineArgs`. Raises what `from_engine_args` raises.

        vLLM's `runner` and `convert` are accepted where they ask for what every model does: it generates, unless it is
        an encoder, and it embeds.
        """
        for name, value, allowed in (("runner", runner, _RUNNERS), ("convert", convert, _CONVERSIONS)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        self._start(AsyncEngineArgs(**{"model": model, "disable_log_stats": True, **options}))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Start a core with these options.

        Raises ValueError for options that cannot work and EngineStartError, with the cause, if the core does not start.
        """
        llm = cls.__new__(cls)
        llm._start(engine_args)
        return llm

    def _start(self, engine_args: EngineArgs) -> None:
        self._engine = AsyncLLM.from_engine_args(engine_args)
        self._thread = LoopThread()
        self._request_ids = map(str, itertools.count())
        self.vllm_config = self._engine.vllm_config
        self.model_config = self.vllm_config.model_config

    @property
    def llm_engine(self) -> LLMEngine:
        """The attributes of vLLM's inner engine that programs read: `vllm_config`, `model_config` and the tokenizer."""
        return LLMEngine(self._engine)

    def get_tokenizer(self) -> Any:
        """Return the Hugging Face tokenizer. Raises ValueError if the engine has none."""
        return self._engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that give none."""
        return SamplingParams(**self.model_config.default_sampling_params)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of devices that compute the model; `include_dp` counts the devices of replicas too."""
        parallel = self.vllm_config.parallel_config
        return parallel.world_size * (parallel.data_parallel_size if include_dp else 1)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache, and return True.

        Raises NotImplementedError for `reset_running_requests` and `reset_connector`.
        """
        self._thread.run(
            self._engine.reset_prefix_cache(
                reset_running_requests=reset_running_requests, reset_connector=reset_connector
            )
        )
        return True

    def reset_mm_cache(self) -> None:
        """Return at once, as `AsyncLLM.reset_mm_cache` does: there is no cache of images or sounds."""
        self._thread.run(self._engine.reset_mm_cache())

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Run a method of every worker by its name, as `AsyncLLM.collective_rpc` does."""
        return self._thread.run(self._engine.collective_rpc(method, timeout, args, kwargs))

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release the memory of the KV cache and of the weights until `wake_up`, as `AsyncLLM.sleep` does."""
        self._thread.run(self._engine.sleep(level, mode))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """End a sleep, as `AsyncLLM.wake_up` does; return whether everything is awake."""
        self._thread.run(self._engine.wake_up(tags))
        return not self._thread.run(self._engine.is_sleeping())

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Record the core's next steps, as `AsyncLLM.start_profile` does.

        Raises NotImplementedError for the arguments.
        """
        check_unserved(profile_prefix=profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations)
        self._thread.run(self._engine.start_profile())

    def stop_profile(self) -> str:
        """Write the trace of the profiler, as `AsyncLLM.stop_profile` does, and return its folder."""
        return self._thread.run(self._engine.stop_profile())

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core, by force after `timeout` seconds, and the thread; calls that wait fail. Idempotent."""
        self._engine.shutdown(timeout)
        self._thread.close()

    def __enter__(self) -> Self:
        self._thread.check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={self.model_config.model!r})"

    __getattr__ = refuse_attributes(_REFUSED)

    def _inputs(self, prompts: Iterable[Any], params: Any, lora_request: Any, priority: Any) -> BatchInputs:
        """Return the inputs of a batch.

        Raises ValueError or TypeError for lists of different lengths, and for adapters and priorities that no request
        to this engine can have.
        """
        inputs = BatchInputs(prompts, params, lora_request, priority)
        for lora in inputs.values("lora_request"):
            checked_adapter(lora, self.vllm_config)
        for number in inputs.values("priority"):
            check_priority(number, self.vllm_config)
        return inputs

    def _requests(
        self, call: Callable[..., AsyncGenerator[Output, None]], inputs: BatchInputs, **arguments: Any
    ) -> Iterator[BatchRequest[Output]]:
        """Yield a request for each of `inputs`: a call of a method of `AsyncLLM`, with further `arguments`."""
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

    def _run(
        self, requests: Iterable[BatchRequest[Output]], total: int | None, use_tqdm: UseTqdm
    ) -> list[Output | RequestFailure]:
        """Run `requests`, `total` in number if it is known; return the last output of each."""
        self._thread.check()
        max_live = _LIVE_PER_SEQ * self.vllm_config.scheduler_config.max_num_seqs
        return Batch[Output](self._thread, max_live, ProgressBar(use_tqdm, total), total).run(requests)
