"""The options of an engine: a flat dataclass that also gives the flags of the shell commands and their help.

An option is declared here once, with its type, default, range and help. `config_resolution` copies it into the section
of the configuration that has a field of its name.
"""

import dataclasses
from typing import Any, ClassVar

from vllm_mp.config import VllmConfig
from vllm_mp.config_resolution import DEFAULT_TIMEOUT_S, MIN_TIMEOUT_S, TIMEOUT_VARIABLE, resolve_config
from vllm_mp.fault_injection.faults import parse_faults
from vllm_mp.model_store import DEFAULT_MODEL, PACKAGED_MODELS
from vllm_mp.options import MAX_INTEGER, Options, option
from vllm_mp.processor_registration import as_specs, registered
from vllm_mp.usage_context import UsageContext

_DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of dtypes."""
_ATTENTION_BACKENDS = {"FLASH_ATTN": "flash_attn", "TRITON_ATTN": "triton", "TORCH_SDPA": "torch"}
"""vLLM's names of attention backends."""
_ONE_DEVICE = "one device computes the model"
_NO_RAY = "the core is a process of its own on the machine of the client"


@dataclasses.dataclass
class EngineArgs(Options):
    """The options of an engine, each also a flag of the shell commands (`--max-model-len`, ...).

    Construction raises TypeError for an unknown field or a value of the wrong type, ValueError for a value out
    of range, and NotImplementedError for a value that this version does not serve. The message names the field, the
    value and what is allowed.
    """

    CLI_GROUP = "engine options"

    model: str = option(
        DEFAULT_MODEL,
        "Model to serve: a hub id, a local folder, a .gguf file, or an alias of a model from a Python package: "
        f"{', '.join(PACKAGED_MODELS)}",
        subject="model",
    )
    tokenizer: str | None = option(
        None, "Hub id or folder of the tokenizer; by default the tokenizer in the model's folder is used"
    )
    tokenizer_mode: str = option(
        "auto",
        "Implementation of the tokenizer; auto: the fast tokenizer if the model has one, slow: the Python tokenizer",
        choices=("auto", "slow"),
    )
    skip_tokenizer_init: bool = option(False, "Load no tokenizer, so that prompts and completions are token ids")
    revision: str | None = option(
        None,
        "Branch, tag or commit of the model on the hub; by default the main branch is used",
    )
    hf_token: str | None = option(
        None,
        "Access token for the hub; by default HF_TOKEN or the token of `hf auth login` is used",
        subject="model",
    )
    trust_remote_code: bool = option(False, "Allow Python code that comes with a tokenizer to run")
    download_dir: str | None = option(
        None,
        "Folder for downloads and converted models; by default the hub's cache for downloads and the cache that "
        "`vllm-mp env` prints for converted models",
        subject="model",
    )
    load_format: str = option(
        "auto",
        "Format of the weights; auto: safetensors, or GGUF for a .gguf file and for a folder that has no config.json; "
        "gguf: a .gguf file even beside safetensors; dummy: random weights",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    dtype: str = option(
        "auto",
        "Type of weights and activations; auto: the checkpoint's 16-bit type, or bfloat16 for a float32 checkpoint",
        choices=("auto", "float32", "float16", "bfloat16", "half", "float"),
        subject="model",
    )
    seed: int | None = option(
        None,
        "Seed from which requests without a seed of their own draw theirs, so that a repeated run gives the same "
        "answers, and seed of the random weights of load_format=dummy; by default each run gives other answers, and "
        "the weights have seed 0",
        low=0,
        high=MAX_INTEGER,
        subject="model",
    )
    max_model_len: int | None = option(
        None,
        "Maximum number of tokens of a request, prompt and completion together; by default the context of the model",
        low=2,
        subject="memory and load",
    )
    served_model_name: str | None = option(
        None, "Name of the model that is shown to users; by default the value of `model`"
    )
    device: str = option(
        "auto", "Device for the model; auto: cuda if there is a GPU", choices=("auto", "cpu", "cuda"), subject="device"
    )
    enforce_eager: bool = option(False, "Never capture CUDA graphs")
    attention_backend: str = option(
        "auto",
        "Implementation of attention; auto: on GPUs FlashAttention if it is installed and serves the model, else "
        "Triton; on CPUs C++",
        choices=("auto", "triton", "flash_attn", "torch", *_ATTENTION_BACKENDS),
    )
    num_threads: int = option(
        0,
        "Threads of the core's CPU kernels; 0: one thread for each available processor core",
        low=0,
        high=1024,
        subject="device",
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Share of the device's memory that the core may use, 0 to 1",
        low=0.01,
        high=1.0,
        subject="memory and load",
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Size of the KV cache in bytes; by default the memory that gpu_memory_utilization leaves, or on a CPU a "
        "quarter of the free memory up to 4 GiB",
        low=1,
        subject="memory and load",
    )
    swap_space: float = option(
        0.0,
        "GiB of host memory for evicted KV blocks",
        unserved="evicted requests are computed again; to evict less, raise kv_cache_memory_bytes",
    )
    block_size: int = option(16, "Tokens per block of the KV cache", low=1, high=1024)
    kv_cache_dtype: str = option(
        "auto",
        "Type of the KV cache; auto: as dtype; fp8: 8-bit floats, on GPUs of compute capability 8.9 or higher",
        choices=("auto", "fp8", "fp8_e4m3"),
    )
    enable_prefix_caching: bool | None = option(
        None, "Compute the common beginning of prompts only once; on by default, except for encoders"
    )
    max_num_seqs: int | None = option(
        None,
        "Maximum number of requests in one step; by default 256",
        low=1,
        high=65_536,
        subject="memory and load",
    )
    max_num_batched_tokens: int | None = option(
        None, "Maximum number of tokens in one step; by default 2048, or 512 on a CPU", low=1, high=2**20
    )
    max_num_partial_prefills: int = option(
        1, "Maximum number of prompts in one step that are computed only in part", low=1
    )
    enable_chunked_prefill: bool | None = option(
        None, "Let a long prompt take several steps; on by default, except for encoders"
    )
    scheduling_policy: str = option(
        "fcfs",
        "Order of waiting requests; fcfs: first come, first served; priority: lower `priority` first",
        choices=("fcfs", "priority"),
    )
    async_scheduling: bool | None = option(
        None, "Schedule the next step while the current step is computed; by default on for CUDA only"
    )
    stream_interval: int = option(
        1, "Tokens between two outputs of a stream; the first and the last output come at once", low=1
    )
    check_invariants: bool = option(
        False, "For debugging: check the state of scheduler and KV cache after each step, which is slow"
    )
    tensor_parallel_size: int = option(1, "Number of devices that share each layer", low=1, unserved=_ONE_DEVICE)
    pipeline_parallel_size: int = option(
        1, "Number of groups of layers, each on its own device", low=1, unserved=_ONE_DEVICE
    )
    data_parallel_size: int = option(
        1,
        "Number of replicas of the model",
        low=1,
        unserved="an engine has one core; start an engine for each replica, each on its own device",
    )
    distributed_executor_backend: str | None = option(
        None, "Implementation that runs several devices", choices=("mp", "ray"), unserved=_ONE_DEVICE
    )
    worker_use_ray: bool = option(False, "Run workers with Ray", unserved=_NO_RAY)
    engine_use_ray: bool = option(False, "Run the engine with Ray", unserved=_NO_RAY)
    enable_lora: bool = option(False, "Serve LoRA adapters")
    max_loras: int = option(1, "Maximum number of LoRA adapters in one step", low=1, high=1024)
    max_cpu_loras: int | None = option(
        None, "Maximum number of LoRA adapters in host memory; by default max_loras", low=1, high=65_536
    )
    max_lora_rank: int = option(16, "Maximum rank of a LoRA adapter", low=1, high=512)
    lora_modules: tuple[str, ...] = option(
        (),
        "LoRA adapters that are loaded at the start, each as NAME=FOLDER or as a JSON object with name and path; they "
        "get the ids 1, 2, ..., and a server serves each as the model NAME; by default none",
        takes_list=True,
    )
    quantization: str | None = option(
        None,
        "Make weights of 8 bits when the model is loaded, with a scale for each output; int8: integers, on CPUs; fp8: "
        "floats, on GPUs of compute capability 8.9 or higher; by default weights stay as they are in the checkpoint, "
        "FP8 included",
        choices=("int8", "fp8"),
        subject="model",
    )
    generation_config: str = option(
        "auto",
        "Folder of generation_config.json, which sets default sampling parameters; auto: the model's folder, and what "
        "its makers recommend if the model is an alias; vllm: neither",
    )
    override_generation_config: dict[str, Any] | None = option(
        None, "JSON object whose values replace those in generation_config.json; by default nothing is replaced"
    )
    max_logprobs: int = option(
        20,
        "Maximum number of log-probabilities per position that a request may ask for; -1: the whole vocabulary",
        low=-1,
    )
    enable_prompt_embeds: bool = option(
        False, "Accept prompts that are given as embeddings (`prompt_embeds`), each of up to 56 MiB"
    )
    logits_processors: tuple[str, ...] | None = option(
        (),
        "Logits processor that the core loads, as MODULE:CLASS or the name of an entry point; it applies to every "
        "request, or with NAME= before it to requests that name it; may be repeated, by default there are none",
    )
    chat_template: str | None = option(
        None,
        "Chat template: its text, or a file that holds it; by default the model's own template is used",
        subject="model",
    )
    disable_log_stats: bool = option(False, "Write no statistics to the log")
    engine_iteration_timeout_s: float | None = option(
        None,
        "Seconds without progress after which a core with work counts as hung and is replaced; by default the value of "
        f"the environment variable {TIMEOUT_VARIABLE}, or {DEFAULT_TIMEOUT_S:g}",
        low=MIN_TIMEOUT_S,
    )
    start_timeout_s: float = option(
        600.0, "Seconds without progress after which a core that starts or loads is ended", low=1.0
    )
    recovery: bool = option(True, "When the core dies, start another core and continue every stream")
    max_core_restarts: int = option(16, "Maximum number of restarts of the core within core_restart_window_s", low=0)
    core_restart_window_s: float = option(
        300.0, "Length in seconds of the period in which max_core_restarts counts restarts", low=1.0
    )
    warm_standby: bool = option(
        False, "Keep a standby process that has imported everything, so that it replaces a dead core sooner"
    )
    fault_injection: str = option(
        "", "For tests: faults that the core injects into itself, such as exit@step=3; by default no fault"
    )

    def __post_init__(self) -> None:
        self.logits_processors = as_specs(self.logits_processors)
        super().__post_init__()
        registered(self.logits_processors)
        parse_faults(self.fault_injection, self.device)
        self.dtype = _DTYPES.get(self.dtype, self.dtype)
        self.attention_backend = _ATTENTION_BACKENDS.get(self.attention_backend, self.attention_backend)
        self.kv_cache_dtype = self.kv_cache_dtype.replace("fp8_e4m3", "fp8")

    def create_engine_config(self, usage_context: UsageContext | None = None) -> VllmConfig:
        """Find the model, fetching and converting it if need be, and return the engine's configuration.

        `usage_context` is accepted for callers of vLLM and has no effect.

        Raises ValueError, naming field, value and remedy, for a model that cannot be found or read, an
        architecture that is not known, or settings that contradict each other or the model. Raises what
        `resolve_model` raises.
        """
        return resolve_config(self)


@dataclasses.dataclass
class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` and the options that concern only the asyncio client."""

    CLIENT_OPTIONS: ClassVar[tuple[str, ...]] = (
        "tokenizer",
        "trust_remote_code",
        "disable_log_requests",
        "max_log_len",
        "otlp_traces_endpoint",
        "seed",
    )
    """The options that a client of a running core has too, as arguments of `AsyncLLM.connect`."""

    disable_log_requests: bool = option(
        True,
        "Write no lines to the log about requests; else each has a line when it is added and one when it ends, with id "
        "and number of tokens",
    )
    enable_log_requests: bool | None = option(
        None, "The opposite of disable_log_requests, which it sets; by default disable_log_requests stays as it is"
    )
    max_log_len: int | None = option(
        None,
        "Number of characters of each prompt that a line of disable_log_requests=False shows, with the request's "
        "parameters; by default none, because those who read a log need not be the authors of prompts",
        low=0,
    )
    otlp_traces_endpoint: str | None = option(
        None, "URL of the OpenTelemetry collector to which traces of requests are sent; by default there are no traces"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_log_requests is not None:
            self.disable_log_requests = not self.enable_log_requests

    def client_options(self) -> dict[str, Any]:
        """Return the options of `CLIENT_OPTIONS` by name."""
        return {name: getattr(self, name) for name in self.CLIENT_OPTIONS}
