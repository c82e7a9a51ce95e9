"""The engine under its older name, where programs for vLLM import it from."""

from vllm_mp import AsyncEngineArgs, AsyncEngineDeadError, AsyncLLMEngine
from vllm_mp.arguments.unserved_names import refuse

__all__ = ["AsyncEngineArgs", "AsyncEngineDeadError", "AsyncLLMEngine"]

__getattr__ = refuse(
    __name__,
    {
        "AsyncStream": "iterate over what AsyncLLM.generate returns",
        "ENGINE_ITERATION_TIMEOUT_S": "set the option engine_iteration_timeout_s, or VLLM_ENGINE_ITERATION_TIMEOUT_S",
        "RequestTracker": "AsyncLLM tracks its requests itself; use RequestManager to keep their results",
        "STOP_ITERATION": "iterate over what AsyncLLM.generate returns",
        "_AsyncLLMEngine": "derive from AsyncLLM",
    },
)
