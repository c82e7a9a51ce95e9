"""The methods of a core's worker that operators may call by name (`AsyncLLM.collective_rpc`)."""

import inspect
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from vllm_mp.arguments.unserved_names import WEIGHT_CALLS
from vllm_mp.arguments.worker_arguments import unpack_arguments
from vllm_mp.config import VllmConfig
from vllm_mp.core.worker.memory.plan import available_memory
from vllm_mp.core.worker.model_runner import ModelRunner

_NOT_SERVED: Final = WEIGHT_CALLS | {
    "reload_weights": "wake_up() reads the weights again after sleep(level=2), also those of changed files"
}
"""Methods of vLLM's worker that are not here, and what to use instead."""


class Worker:
    """Answers questions about the model and the memory of a device; no method changes anything.

    The methods also answer while the core sleeps. Their results are plain data.
    """

    METHODS: Final = (
        "check_health",
        "get_cache_block_size_bytes",
        "get_kv_cache_bytes",
        "get_memory_info",
        "get_model_info",
        "get_num_parameters",
        "get_supported_tasks",
    )
    """The methods that may be called by name."""

    def __init__(self, config: VllmConfig, device: torch.device, runner: ModelRunner) -> None:
        self._config = config
        self._device = device
        self._runner = runner

    def call(self, method: Any, arguments: Any) -> Any:
        """Return the result of the method with this name; `arguments` are packed by `pack_arguments`.

        Raises ValueError for a name that is not in `METHODS`, for arguments that the method does not take, if the
        method fails, and for a result that is not plain data.
        """
        if not isinstance(method, str) or method not in self.METHODS:
            remedy = _NOT_SERVED.get(method) if isinstance(method, str) else None
            remedy = remedy or f"it has {', '.join(self.METHODS)}"
            raise ValueError(f"the worker has no public method {method!r:.100}; {remedy}")
        args, kwargs = unpack_arguments(arguments)
        run = getattr(self, method)
        try:
            inspect.signature(run).bind(*args, **kwargs)
        except TypeError as error:
            raise ValueError(f"{method}: {error}") from error
        try:
            result = run(*args, **kwargs)
            msgspec.msgpack.encode(result)
        except Exception as error:  # whatever the caller asks for, the core goes on
            raise ValueError(f"{method} failed: {error}") from error
        return result

    def check_health(self) -> None:
        """Return if the worker answers."""

    def get_cache_block_size_bytes(self) -> int:
        """Return the bytes of one block of the KV cache, of all layers and of a draft model's; 0 for an encoder."""
        return self._runner.token_bytes() * self._config.cache_config.block_size

    def get_kv_cache_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the blocks that a request of `num_tokens` tokens takes in the KV cache."""
        if type(num_tokens) is not int or num_tokens < 0:
            raise ValueError(f"num_tokens must be an integer of at least 0, got {num_tokens!r:.100}")
        return -(-num_tokens // self._config.cache_config.block_size) * self.get_cache_block_size_bytes()

    def get_memory_info(self) -> dict[str, Any]:
        """Return the device and, in bytes, the KV cache, the process, and what is free.

        `process_bytes` is the resident memory of the core. `free_bytes` is the memory of the device, on a CPU that of
        the host, which others can still allocate. A GPU also has `total_bytes` and `allocated_bytes`, of this core's
        tensors.
        """
        num_blocks = self._config.cache_config.num_blocks if self._runner.memory.kv_caches else 0
        info = {
            "device": str(self._device),
            "kv_cache_bytes": num_blocks * self.get_cache_block_size_bytes(),
            "process_bytes": _resident_bytes(),
        }
        if self._device.type != "cuda":
            return info | {"free_bytes": available_memory()}
        free, total = torch.cuda.mem_get_info(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        return info | {"free_bytes": free, "total_bytes": total, "allocated_bytes": allocated}

    def get_model_info(self) -> dict[str, Any]:
        """Return name, architecture, dtype, quantization, sizes and number of parameters of the model."""
        model, architecture = self._config.model_config, self._config.model_config.architecture
        return {
            "model": model.model,
            "architecture": architecture.name,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "vocab_size": architecture.vocab_size,
            "hidden_size": architecture.hidden_size,
            "max_model_len": model.max_model_len,
            "num_parameters": self.get_num_parameters(),
        }

    def get_num_parameters(self) -> int:
        """Return the number of parameters of the model, of weights that are used twice once."""
        return self._runner.memory.num_parameters

    def get_supported_tasks(self) -> list[str]:
        """Return what requests may ask of the model: "generate", "embed", "classify" and "score", as far as it can."""
        return self._config.model_config.supported_tasks


def _resident_bytes() -> int:
    """Return the resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
