"""The options of an engine: a flat dataclass that also gives the flags of the shell commands and their help.

An option is declared here once, with its type, default, range and help. `config_resolution` copies it into the section
of the configuration that has a field of its name.
"""

import argparse
import dataclasses
import json
import types
import typing
from typing import Any

from vllm_mp.config import VllmConfig
from vllm_mp.config_resolution import resolve_config
from vllm_mp.fault_injection.faults import parse_faults
from vllm_mp.model_store import DEFAULT_MODEL, PACKAGED_MODELS

_DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of dtypes."""
_ATTENTION_BACKENDS = {"FLASH_ATTN": "flash_attn", "TRITON_ATTN": "triton", "TORCH_SDPA": "torch"}
"""vLLM's names of attention backends."""
_MAX_INTEGER = 2**63 - 1
"""The largest integer that reaches the core unchanged."""


def _option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    served: bool = True,
) -> Any:
    """Declare an option, from which its flag, help and validation follow.

    `help` describes the default in words if it is None; any other default is added to the flag's help. `low` and `high`
    are the least and the greatest value. `served=False`: only the default is accepted.
    """
    return dataclasses.field(
        default=default,
        metadata={"help": help, "choices": choices, "low": low, "high": high, "served": served},
    )


@dataclasses.dataclass
class EngineArgs:
    """The options of an engine, each also a flag of the shell commands (`--max-model-len`, ...).

    Construction raises TypeError for an unknown field or a value of the wrong type, ValueError for a value out
    of range, and NotImplementedError for a value that this version does not serve. The message names the field, the
    value and what is allowed.
    """

    model: str = _option(
        DEFAULT_MODEL,
        "Model to serve: a hub id, a local folder, a .gguf file, or an alias of a model from a Python package: "
        f"{', '.join(PACKAGED_MODELS)}",
    )
    tokenizer: str | None = _option(
        None, "Hub id or folder of the tokenizer; by default the tokenizer in the model's folder is used"
    )
    tokenizer_mode: str = _option(
        "auto",
        "Implementation of the tokenizer; auto: the fast tokenizer if the model has one, slow: the Python tokenizer",
        choices=("auto", "slow"),
    )
    skip_tokenizer_init: bool = _option(False, "Load no tokenizer, so that prompts and completions are token ids")
    revision: str | None = _option(
        None, "Branch, tag or commit of the model on the hub; by default the main branch is used"
    )
    hf_token: str | None = _option(
        None, "Access token for the hub; by default HF_TOKEN or the token of `hf auth login` is used"
    )
    trust_remote_code: bool = _option(False, "Allow Python code that comes with a tokenizer to run")
    download_dir: str | None = _option(
        None,
        "Folder for downloads and converted models; by default the hub's cache for downloads and the cache that "
        "`vllm-mp env` prints for converted models",
    )
    load_format: str = _option(
        "auto",
        "Format of the weights; auto: safetensors, or GGUF for a .gguf file and for a folder that has no config.json; "
        "gguf: a .gguf file even beside safetensors; dummy: random weights",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    dtype: str = _option(
        "auto",
        "Type of weights and activations; auto: the checkpoint's 16-bit type, or bfloat16 for a float32 checkpoint",
        choices=("auto", "float32", "float16", "bfloat16", "half", "float"),
    )
    seed: int = _option(0, "Seed of the random weights of load_format=dummy", low=0, high=_MAX_INTEGER)
    max_model_len: int | None = _option(
        None,
        "Maximum number of tokens of a request, prompt and completion together; by default the context of the model",
        low=2,
    )
    served_model_name: str | None = _option(
        None, "Name of the model that is shown to users; by default the value of `model`"
    )
    device: str = _option("auto", "Device for the model; auto: cuda if there is a GPU", choices=("auto", "cpu", "cuda"))
    enforce_eager: bool = _option(False, "Never capture CUDA graphs")
    attention_backend: str = _option(
        "auto",
        "Implementation of attention; auto: on GPUs FlashAttention if it is installed and serves the model, else "
        "Triton; on CPUs C++",
        choices=("auto", "triton", "flash_attn", "torch", *_ATTENTION_BACKENDS),
    )
    num_threads: int = _option(
        0, "Threads of the core's CPU kernels; 0: one thread for each available processor core", low=0, high=1024
    )
    gpu_memory_utilization: float = _option(
        0.9, "Share of the device's memory that the core may use, 0 to 1", low=0.01, high=1.0
    )
    kv_cache_memory_bytes: int | None = _option(
        None,
        "Size of the KV cache in bytes; by default the memory that gpu_memory_utilization leaves, or on a CPU a "
        "quarter of the free memory up to 4 GiB",
        low=1,
    )
    swap_space: float = _option(0.0, "GiB of host memory for evicted KV blocks", served=False)
    block_size: int = _option(16, "Tokens per block of the KV cache", low=1, high=1024)
    kv_cache_dtype: str = _option(
        "auto",
        "Type of the KV cache; auto: as dtype; fp8: 8-bit floats, on GPUs of compute capability 8.9 or higher",
        choices=("auto", "fp8", "fp8_e4m3"),
    )
    enable_prefix_caching: bool | None = _option(
        None, "Compute the common beginning of prompts only once; on by default, except for encoders"
    )
    max_num_seqs: int | None = _option(
        None, "Maximum number of requests in one step; by default 256", low=1, high=65_536
    )
    max_num_batched_tokens: int | None = _option(
        None, "Maximum number of tokens in one step; by default 2048, or 512 on a CPU", low=1, high=2**20
    )
    max_num_partial_prefills: int = _option(
        1, "Maximum number of prompts in one step that are computed only in part", low=1
    )
    enable_chunked_prefill: bool | None = _option(
        None, "Let a long prompt take several steps; on by default, except for encoders"
    )
    scheduling_policy: str = _option(
        "fcfs",
        "Order of waiting requests; fcfs: first come, first served; priority: lower `priority` first",
        choices=("fcfs", "priority"),
    )
    async_scheduling: bool | None = _option(
        None, "Schedule the next step while the current step is computed; by default on for CUDA only"
    )
    stream_interval: int = _option(
        1, "Tokens between two outputs of a stream; the first and the last output come at once", low=1
    )
    check_invariants: bool = _option(
        False, "For debugging: check the state of scheduler and KV cache after each step, which is slow"
    )
    tensor_parallel_size: int = _option(1, "Number of devices that share each layer", low=1, served=False)
    pipeline_parallel_size: int = _option(1, "Number of groups of layers, each on its own device", low=1, served=False)
    data_parallel_size: int = _option(1, "Number of replicas of the model", low=1, served=False)
    distributed_executor_backend: str | None = _option(
        None, "Implementation that runs several devices", choices=("mp", "ray"), served=False
    )
    worker_use_ray: bool = _option(False, "Run workers with Ray", served=False)
    engine_use_ray: bool = _option(False, "Run the engine with Ray", served=False)
    enable_lora: bool = _option(False, "Serve LoRA adapters", served=False)
    max_loras: int = _option(1, "Maximum number of adapters in one step", low=1, served=False)
    max_lora_rank: int = _option(16, "Maximum rank of an adapter", low=1, served=False)
    quantization: str | None = _option(
        None,
        "Make weights of 8 bits when the model is loaded, with a scale for each output; int8: integers, on CPUs; fp8: "
        "floats, on GPUs of compute capability 8.9 or higher; by default weights stay as they are in the checkpoint, "
        "FP8 included",
        choices=("int8", "fp8"),
    )
    generation_config: str = _option(
        "auto",
        "Folder of generation_config.json, which sets default sampling parameters; auto: the model's folder; vllm: "
        "use no such file",
    )
    override_generation_config: dict[str, Any] | None = _option(
        None, "JSON object whose values replace those in generation_config.json; by default nothing is replaced"
    )
    max_logprobs: int = _option(
        20,
        "Maximum number of log-probabilities per position that a request may ask for; -1: the whole vocabulary",
        low=-1,
    )
    chat_template: str | None = _option(
        None, "Chat template: its text, or a file that holds it; by default the model's own template is used"
    )
    disable_log_stats: bool = _option(False, "Write no statistics to the log")
    engine_iteration_timeout_s: float = _option(
        60.0, "Seconds without progress after which a core with work counts as hung and is replaced", low=0.1
    )
    start_timeout_s: float = _option(600.0, "Seconds within which the core must start", low=1.0)
    recovery: bool = _option(True, "When the core dies, start another core and continue every stream")
    max_core_restarts: int = _option(10, "Maximum number of restarts of the core within core_restart_window_s", low=0)
    core_restart_window_s: float = _option(
        300.0, "Length in seconds of the period in which max_core_restarts counts restarts", low=1.0
    )
    warm_standby: bool = _option(
        False, "Keep a standby process that has imported everything, so that it replaces a dead core sooner"
    )
    fault_injection: str = _option(
        "", "For tests: faults that the core injects into itself, such as exit@step=3; by default no fault"
    )

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for option in dataclasses.fields(self):
            _check(option, hints[option.name], getattr(self, option.name))
        parse_faults(self.fault_injection, self.device)
        self.dtype = _DTYPES.get(self.dtype, self.dtype)
        self.attention_backend = _ATTENTION_BACKENDS.get(self.attention_backend, self.attention_backend)
        self.kv_cache_dtype = self.kv_cache_dtype.replace("fp8_e4m3", "fp8")

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every option to `parser` and return it."""
        group = parser.add_argument_group("engine options")
        hints = typing.get_type_hints(cls)
        for option in dataclasses.fields(cls):
            value_type = _value_type(hints[option.name])
            flag = "--" + option.name.replace("_", "-")
            if value_type is bool:
                action = group.add_argument(flag, action=argparse.BooleanOptionalAction, default=option.default)
            else:
                action = group.add_argument(
                    flag,
                    type=json.loads if value_type is dict else value_type,
                    default=option.default,
                    choices=option.metadata["choices"],
                )
            action.help = _help(option).replace("%", "%%")
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> "typing.Self":
        """Return the options from parsed flags; other attributes of `namespace` are ignored."""
        names = [option.name for option in dataclasses.fields(cls)]
        return cls(**{name: getattr(namespace, name) for name in names if hasattr(namespace, name)})

    def create_engine_config(self) -> VllmConfig:
        """Find the model, fetching and converting it if need be, and return the engine's configuration.

        Raises ValueError, naming field, value and remedy, for a model that cannot be found or read, an
        architecture that is not known, or settings that contradict each other or the model. Raises what
        `resolve_model` raises.
        """
        return resolve_config(self)


@dataclasses.dataclass
class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` and the options that concern only the asyncio client."""

    disable_log_requests: bool = _option(False, "Write no line to the log for each request")
    max_log_len: int | None = _option(
        None, "Maximum number of characters of a prompt in the log; by default prompts are not cut", low=0
    )
    otlp_traces_endpoint: str | None = _option(None, "Address to which traces are sent", served=False)


def _help(option: "dataclasses.Field[Any]") -> str:
    """Return the help of the option's flag, with its default."""
    parts = [option.metadata["help"]]
    if not option.metadata["served"]:
        parts.append("(not served yet)")
    if isinstance(option.default, bool):
        parts.append(f"(default: {'on' if option.default else 'off'})")
    elif option.default not in (None, ""):
        parts.append(f"(default: {option.default})")
    return " ".join(parts)


def _check(option: "dataclasses.Field[Any]", hint: Any, value: Any) -> None:
    """Raise the error that `EngineArgs` promises if `value` is not allowed for `option` of type `hint`."""
    name, meta = option.name, option.metadata
    if value is None and type(None) in typing.get_args(hint):
        return
    expected = _value_type(hint)
    allowed = (int, float) if expected is float else expected
    if not isinstance(value, allowed) or (isinstance(value, bool) and expected is not bool):
        raise TypeError(f"{name} must be of type {expected.__name__}, got {value!r}")
    if meta["choices"] and value not in meta["choices"]:
        raise ValueError(f"{name} must be one of {', '.join(meta['choices'])}, got {value!r}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} must be valid Unicode, got {value!r}") from error
    if isinstance(value, int | float) and not isinstance(value, bool):
        low = meta["low"] if meta["low"] is not None else -_MAX_INTEGER
        high = meta["high"] if meta["high"] is not None else _MAX_INTEGER
        # This form of the comparison refuses NaN too.
        if not low <= value <= high:
            raise ValueError(f"{name} must be at least {low} and at most {high}, got {value}")
    if not meta["served"] and value != option.default:
        raise NotImplementedError(f"{name}={value!r} is not served yet; leave it at its default ({option.default!r})")


def _value_type(hint: Any) -> type:
    """Return the type of a value that is not None: `int` for `int | None`, `dict` for `dict[str, Any]`."""
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    origin = typing.get_origin(hint)
    result: type = origin or hint
    return result
