"""The options of an engine: a flat dataclass that also gives the flags of the shell commands and their help.

An option is declared here once, with its type, default, range and help. `vllm_mp/config/resolution.py` copies it into
the section of the configuration that has a field of its name.
"""

import dataclasses
from typing import Any

from vllm_mp.arguments.options import MAX_INTEGER, Options, option
from vllm_mp.config.sections import QUANTIZATIONS
from vllm_mp.config.speculation import METHODS, read_speculative_config
from vllm_mp.fault_injection.faults import parse_faults
from vllm_mp.model_store import DEFAULT_MODEL, PACKAGED_MODELS
from vllm_mp.requests.image_options import check_processor_options
from vllm_mp.requests.images import MAX_IMAGES
from vllm_mp.requests.processor_registration import as_specs, registered
from vllm_mp.requests.structured_outputs import BACKEND_NAMES, StructuredOutputsParams

_DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's other names of dtypes."""
_CACHE_DTYPES = {"fp8_e4m3": "fp8", "int8_per_token_head": "int8"}
"""vLLM's other names of types of the KV cache."""
_ATTENTION_BACKENDS = {"FLASH_ATTN": "flash_attn", "TRITON_ATTN": "triton", "TORCH_SDPA": "torch"}
"""vLLM's names of attention backends."""

_EXECUTORS = {"uni": "mp"}
"""vLLM's other names of executors."""
_STRUCTURED_OUTPUTS = {
    "backend": "guided_decoding_backend",
    "disable_additional_properties": "guided_decoding_disable_additional_properties",
    "disable_any_whitespace": "guided_decoding_disable_any_whitespace",
    "whitespace_pattern": "guided_whitespace_pattern",
}
"""The option for each name in `structured_outputs_config`."""
_WITHOUT_EFFECT = frozenset({"disable_fallback"})
TIMEOUT_VARIABLE = "VLLM_ENGINE_ITERATION_TIMEOUT_S"
"""The environment variable that is the default of `engine_iteration_timeout_s`."""
MAX_VLLM_LIMIT = 999
"""The greatest value in `limit_mm_per_prompt`, which is vLLM's default; a prompt has at most `MAX_IMAGES` images."""
DEFAULT_TIMEOUT_S, MIN_TIMEOUT_S = 60.0, 0.1


_LIMIT_FIELDS = {
    "image": ("count", "width", "height"),
    "video": ("count", "num_frames", "width", "height"),
    "audio": ("count", "length"),
}
"""The fields of a limit in vLLM's form. All but the count are sizes for vLLM's first run, without effect here."""


@dataclasses.dataclass
class EngineOptions(Options):
    """The options of an engine; `EngineArgs` says how they are given and what it raises."""

    CLI_GROUP = "engine options"

    model: str = option(
        DEFAULT_MODEL,
        "Serve this model: a hub id, a local folder, a .gguf file, or the alias of a model from a Python package "
        f"({', '.join(PACKAGED_MODELS)}).",
        subject="model",
    )
    mmproj: str | None = option(
        None,
        "Read the image parts of a model in a .gguf file from this .gguf file. Default: for a folder, the mmproj file "
        "in it; for a file, none.",
    )
    tokenizer: str | None = option(
        None, "Use the tokenizer of this hub id or folder. Default: the tokenizer in the model's folder."
    )
    tokenizer_mode: str = option(
        "auto",
        "Use this kind of tokenizer; auto: the fast tokenizer if there is one; slow: the Python tokenizer.",
        choices=("auto", "slow"),
    )
    skip_tokenizer_init: bool = option(False, "Load no tokenizer, so that prompts and completions are token ids.")
    revision: str | None = option(
        None,
        "Fetch this branch, tag or commit of the model from the hub. Default: the main branch.",
    )
    tokenizer_revision: str | None = option(
        None,
        "Fetch this branch, tag or commit of the tokenizer from the hub. Default: the model's own, or the main branch "
        "of another repository.",
    )
    hf_token: str | None = option(
        None,
        "Send this access token to the hub. Default: HF_TOKEN, or the token of `hf auth login`.",
    )
    trust_remote_code: bool = option(False, "Allow Python code that comes with a tokenizer to run.")
    download_dir: str | None = option(
        None,
        "Keep downloads and converted models in this folder. Default: the hub's cache for downloads, and the cache "
        "that `vllm-mp env` prints for converted models.",
    )
    load_format: str = option(
        "auto",
        "Read weights of this format; auto: safetensors, or GGUF for a .gguf file and for a folder that has no "
        "config.json; gguf: a .gguf file even beside safetensors; dummy: random weights.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    dtype: str = option(
        "auto",
        "Compute in this type; auto: the checkpoint's 16-bit type, or bfloat16 for a float32 checkpoint; on CPUs "
        "bfloat16, and without instructions for it float32, unless the C++ kernels read a bfloat16 checkpoint.",
        choices=("auto", "float32", "float16", "bfloat16", "half", "float"),
        subject="model",
    )
    seed: int | None = option(
        0,
        "Draw from this seed the seeds of requests that have none, so that the same command gives the same answers, "
        "and the random weights of load_format=dummy.",
        low=0,
        high=MAX_INTEGER,
        subject="model",
    )
    max_model_len: int | None = option(
        None,
        "Allow a request at most N tokens, prompt and completion together. Default: the context of the model.",
        low=2,
        subject="memory and load",
        unserved={
            -1: "the longest context that fits into the memory is not computed before the start; give a number, or "
            "leave it out: if the context of the model does not fit, the error says how many tokens do"
        },
    )
    served_model_name: str | None = option(None, "Show users this name of the model. Default: the value of `model`.")
    device: str = option(
        "auto",
        "Run the model on this device; auto: cuda if there is a GPU.",
        choices=("auto", "cpu", "cuda"),
        subject="device",
    )
    batch_invariant: bool = option(
        True,
        "Compute a request in the same way whatever else is in its batch. False: multiply weights in block types (GGUF "
        "files, int4) faster on CPUs with AMX, where steps have 24 tokens or more.",
    )
    enforce_eager: bool = option(False, "Never capture CUDA graphs.")
    max_cudagraph_capture_size: int = option(512, "Capture CUDA graphs of steps with up to N tokens.", low=1)
    attention_backend: str = option(
        "auto",
        "Use this implementation of attention; auto: on GPUs FlashAttention if it is installed and serves the model, "
        "else Triton; on CPUs C++.",
        choices=("auto", "triton", "flash_attn", "torch", *_ATTENTION_BACKENDS),
    )
    num_threads: int = option(
        0,
        "Run the core's CPU kernels with N threads; 0: one for each CPU that it may use.",
        low=0,
        high=1024,
        subject="device",
    )
    cpus: str = option(
        "",
        "Let the core use only these CPUs: numbers, ranges and NUMA nodes, such as 0-15,32 or node0. Default: all that "
        "its process may use.",
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Let the core use this share of the GPU's memory, 0 to 1. A CPU does not use it.",
        low=0.01,
        high=1.0,
        subject="memory and load",
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Give the KV cache N bytes. Default: what gpu_memory_utilization leaves on a GPU, on a CPU a quarter of the "
        "free memory up to 4 GiB, and up to half of it if one request of max_model_len needs that.",
        low=1,
        subject="memory and load",
    )
    swap_space: float = option(
        0.0,
        "Keep evicted KV blocks in this many GiB of host memory.",
        without_effect="evicted requests are computed again; to evict less, raise kv_cache_memory_bytes",
    )
    block_size: int = option(16, "Divide the KV cache into blocks of N tokens.", low=1, high=1024)
    kv_cache_dtype: str = option(
        "auto",
        "Keep the KV cache in this type; auto: dtype; fp8: 8-bit floats, on GPUs of compute capability 8.9 or higher; "
        "int8: 8-bit integers with a scale for each token and head, on CPUs.",
        choices=("auto", "fp8", "int8", *_CACHE_DTYPES),
    )
    enable_prefix_caching: bool | None = option(
        None, "Compute the common beginning of prompts only once. Default: on, except for encoders."
    )
    prefix_cache_file: str | None = option(
        None,
        "Keep prompts and answers that were read in this file too, which outlives the engine: after a restart they are "
        "not read again. On CPUs, with one rank. Default: none.",
    )
    prefix_cache_file_bytes: int = option(
        4 * 2**30,
        "Let prefix_cache_file have at most N bytes; blocks that were not used for longest are replaced.",
        low=1,
    )
    max_num_seqs: int | None = option(
        None,
        "Run at most N requests in one step. Default: 256.",
        low=1,
        high=65_536,
        subject="memory and load",
    )
    max_num_batched_tokens: int | None = option(
        None, "Compute at most N tokens in one step. Default: 2048, or 512 on a CPU.", low=1, high=2**20
    )
    max_num_partial_prefills: int = option(1, "Compute at most N prompts in part in one step.", low=1)
    enable_chunked_prefill: bool | None = option(
        None, "Let a long prompt take several steps. Default: on, except for encoders."
    )
    max_prefill_slowdown: float = option(
        2.0,
        "Compute a prompt in chunks with which a step takes at most about X times as long as for the requests that "
        "run; 0: in chunks as long as a step may be.",
        low=0.0,
    )
    scheduling_policy: str = option(
        "fcfs",
        "Order waiting requests; fcfs: first come, first served; priority: lower `priority` first.",
        choices=("fcfs", "priority"),
    )
    async_scheduling: bool | None = option(
        None, "Schedule the next step while the current step is computed. Default: on for CUDA only."
    )
    stream_interval: int = option(
        1, "Collect N tokens between two outputs of a stream; the first and the last output come at once.", low=1
    )
    check_invariants: bool = option(
        False, "Check the state of scheduler and KV cache after each step, for debugging; this is slow."
    )
    tensor_parallel_size: int = option(
        1,
        "Share each layer among N ranks, each a process with a GPU of its own, or on a CPU with its share of the CPUs.",
        low=1,
        high=256,
    )
    pipeline_parallel_size: int = option(
        1,
        "Divide the layers into N stages, each on GPUs of its own, or on its share of the CPUs; with "
        "tensor_parallel_size, each stage has that many ranks.",
        low=1,
        high=256,
    )
    data_parallel_size: int = option(
        1,
        "Run N cores with the whole model, each on a GPU of its own, or on its share of the CPUs.",
        low=1,
        high=256,
    )
    data_parallel_backend: str | None = option(
        None,
        "Start the cores in this way; mp: processes of this machine; ray: on the nodes of a Ray cluster. Default: ray "
        "with engine_use_ray, worker_use_ray or distributed_executor_backend=ray, else mp.",
        choices=("mp", "ray"),
    )
    nnodes: int = option(1, "Share the ranks equally among N machines.", low=1, high=256)
    node_rank: int = option(
        0, "Run the ranks of this machine: 0 has the core, and each other needs --headless.", low=0, high=255
    )
    master_addr: str = option("127.0.0.1", "Find the machine with node_rank 0 at this address.")
    master_port: int = option(
        29_501, "Let the other machines connect to the core at this port of master_addr.", low=1, high=65_535
    )
    node_key_file: str | None = option(
        None,
        "Connect machines with the key in this file. Default: a file in the folder `nodes` of the cache that "
        "`vllm-mp env` prints, which node 0 makes.",
    )
    distributed_executor_backend: str | None = option(
        None,
        "Start the ranks of a core in this way; mp: processes of the core's machine, or of nnodes machines; ray: "
        "processes of a node of a Ray cluster that has room for all of them, or of nnodes nodes. Default: ray with "
        "worker_use_ray, else mp.",
        choices=("mp", "ray", *_EXECUTORS),
    )
    worker_use_ray: bool = option(False, "Do what distributed_executor_backend=ray does.")
    engine_use_ray: bool = option(False, "Do what data_parallel_backend=ray does, also with one core.")
    enable_lora: bool = option(False, "Serve LoRA adapters.")
    max_loras: int = option(1, "Run at most N LoRA adapters in one step.", low=1, high=1024)
    max_cpu_loras: int | None = option(
        None, "Keep at most N LoRA adapters in host memory. Default: max_loras.", low=1, high=65_536
    )
    max_lora_rank: int = option(16, "Accept LoRA adapters of at most this rank.", low=1, high=512)
    lora_modules: tuple[str, ...] = option(
        (),
        "Load these LoRA adapters at the start, each as NAME=FOLDER or as a JSON object with name and path; they get "
        "the ids 1, 2, ..., and a server serves each as the model NAME. Default: none.",
        takes_list=True,
    )
    quantization: str | None = option(
        None,
        "Make weights of fewer bits when the model is loaded; int8: integers of 8 bits, on CPUs; int4: blocks of "
        "4 bits, on CPUs; fp8: floats of 8 bits, on GPUs of compute capability 8.9 or higher; awq, gptq, "
        "gguf: those of the checkpoint, which need not be given. Default: the weights of the checkpoint.",
        choices=QUANTIZATIONS,
        subject="model",
    )
    generation_config: str = option(
        "auto",
        "Read default sampling parameters from generation_config.json in this folder; auto: the model's folder, and "
        "what its makers recommend if the model is an alias; vllm: neither.",
    )
    override_generation_config: dict[str, Any] | None = option(
        None, "Replace values of generation_config.json by those of this JSON object. Default: none."
    )
    max_logprobs: int = option(
        20,
        "Let a request ask for at most N log-probabilities per position; -1: the whole vocabulary.",
        low=-1,
    )
    enable_prompt_embeds: bool = option(
        False, "Accept prompts that a Python program gives as embeddings (`prompt_embeds`), each of up to 56 MiB."
    )
    limit_mm_per_prompt: dict[str, Any] | None = option(
        None,
        'Accept at most this many images in a prompt, as a JSON object such as {"image": 2} or, as in vLLM, '
        '{"image": {"count": 2}}. '
        f"Default: {MAX_IMAGES} images.",
    )
    mm_processor_kwargs: dict[str, Any] | None = option(
        None,
        "Pass these options to the model's image processor, as a JSON object; those of a request take precedence. "
        "Default: the options in the model's folder.",
    )
    mm_processor_cache_gb: float = option(
        4.0,
        "Keep images, and their embeddings, that no live request needs, in at most N GiB of memory of a core; 0: keep "
        "none. A client keeps processed images in at most a quarter of that, and at most 1 GiB.",
        low=0.0,
        high=4096.0,
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "Fetch images that a request names by an http or https URL from this host, and from no other. Default: such "
        "URLs are refused.",
        takes_list=True,
    )
    guided_decoding_backend: str = option(
        "auto",
        "Accepted for programs that name vLLM's libraries of structured output. Every name means llguidance, which "
        "compiles all constraints.",
        choices=BACKEND_NAMES,
    )
    guided_decoding_disable_any_whitespace: bool = option(
        False, "Let JSON have only the whitespace of a compact form, unless a request gives a whitespace pattern."
    )
    guided_decoding_disable_additional_properties: bool = option(
        False, "Let JSON objects have only the properties that their schema names."
    )
    guided_whitespace_pattern: str | None = option(
        None,
        "Let whitespace between the parts of JSON match this regular expression, unless a request gives another. "
        "Default: a space, or up to two line breaks with up to 32 spaces or tabs.",
    )
    structured_outputs_config: dict[str, Any] | None = option(
        None,
        "Set options of structured output by vLLM's newer names, as a JSON object: backend, disable_any_whitespace, "
        "disable_additional_properties, whitespace_pattern. Default: the options of these commands.",
    )
    speculative_config: dict[str, Any] | None = option(
        None,
        "Draft tokens that the model verifies several at a time, as this JSON object says by vLLM's names, such as "
        '{"method": "ngram"}. Default: no tokens are drafted.',
    )
    spec_method: str | None = option(
        None,
        "Draft tokens by this method; it sets `method` of speculative_config. ngram: from the request's own text; "
        "suffix: also from recent answers to other requests; draft_model: by a smaller model. Default: as "
        "speculative_config says.",
        choices=METHODS,
    )
    spec_model: str | None = option(
        None,
        "Draft tokens with this smaller model, which has the same vocabulary; it sets `model` of speculative_config. "
        "Default: as speculative_config says.",
    )
    spec_tokens: int | None = option(
        None,
        "Draft at most N tokens of a request in a step; it sets `num_speculative_tokens` of speculative_config. "
        "Default: as speculative_config says, or 8.",
        low=1,
        high=64,
    )
    logits_processors: tuple[str, ...] | None = option(
        (),
        "Load this logits processor, MODULE:CLASS or the name of an entry point; it applies to every request, or with "
        "NAME= before it to requests that name it. The option may be repeated. Default: none.",
    )
    chat_template: str | None = option(
        None,
        "Use this chat template: its text, or a file that holds it. Default: the model's own template.",
    )
    disable_log_stats: bool = option(False, "Write no statistics to the log.")
    engine_iteration_timeout_s: float | None = option(
        None,
        "Replace a core that has work and makes no progress for this many seconds, or earlier if its process stands "
        "still for far longer than such steps usually take. Default: the value of the "
        f"environment variable {TIMEOUT_VARIABLE}, or {DEFAULT_TIMEOUT_S:g}.",
        low=MIN_TIMEOUT_S,
    )
    start_timeout_s: float = option(
        600.0, "End a core that starts or loads and makes no progress for this many seconds.", low=1.0
    )
    recovery: bool = option(True, "Start another core when the core dies, and continue every stream.")
    max_core_restarts: int = option(16, "Restart the core at most N times within core_restart_window_s.", low=0)
    core_restart_window_s: float = option(
        300.0, "Count restarts for max_core_restarts over this many seconds.", low=1.0
    )
    core_template: bool = option(
        True,
        "Keep template processes that have imported everything and, for a core of one rank on a CPU, loaded the model, "
        "and fork the next core at once.",
    )
    recover_kv_cache: str = option(
        "auto",
        "Keep the KV cache outside of the core, and let the next core use what a dead one has computed. auto: unless "
        "the core died by itself, such as of an invalid address; always: after every death; never: the cache ends with "
        "the core.",
        choices=("auto", "always", "never"),
    )
    fault_injection: str = option(
        "", "Inject these faults into the core, for tests, such as exit@step=3. Default: none."
    )

    def __post_init__(self) -> None:
        self.logits_processors = as_specs(self.logits_processors)
        self._accept_other_types()
        super().__post_init__()
        registered(self.logits_processors)
        self._apply_structured_outputs_config()
        self._complete_speculative_config()
        self._check_images()
        parse_faults(self.fault_injection, self.device)
        self.dtype = _DTYPES.get(self.dtype, self.dtype)
        executor = self.distributed_executor_backend
        self.distributed_executor_backend = _EXECUTORS.get(executor or "", executor)
        self.attention_backend = _ATTENTION_BACKENDS.get(self.attention_backend, self.attention_backend)
        self.kv_cache_dtype = _CACHE_DTYPES.get(self.kv_cache_dtype, self.kv_cache_dtype)

    def _accept_other_types(self) -> None:
        """Replace values of types that vLLM takes too. Raises NotImplementedError for several names of the model."""
        name: Any = self.served_model_name
        if isinstance(name, list | tuple):
            if len(name) > 1:
                raise NotImplementedError(
                    f"served_model_name={name!r} is not served: a model has one name; give one, and lora_modules for "
                    "the names of adapters"
                )
            self.served_model_name = name[0] if name else None
        if str(self.dtype).startswith("torch."):
            self.dtype = str(self.dtype).removeprefix("torch.")
        token: Any = self.hf_token
        if token is True:  # the token that the hub's own programs use
            self.hf_token = None

    def _complete_speculative_config(self) -> None:
        """Put the options for single fields into `speculative_config`, and check it."""
        single = {
            "method": self.spec_method,
            "model": self.spec_model,
            "num_speculative_tokens": self.spec_tokens,
        }
        given = {name: value for name, value in single.items() if value is not None}
        if given:
            self.speculative_config = {**(self.speculative_config or {}), **given}
        read_speculative_config(self.speculative_config or {})

    def _check_images(self) -> None:
        """Check the options of images. Raises ValueError or NotImplementedError, naming the option and the value."""
        limits = {name: _count_of(name, limit) for name, limit in (self.limit_mm_per_prompt or {}).items()}
        self.limit_mm_per_prompt = limits or self.limit_mm_per_prompt
        for name, limit in limits.items():
            if type(limit) is not int or not 0 <= limit <= MAX_VLLM_LIMIT:
                raise ValueError(
                    f"limit_mm_per_prompt[{name!r}] must be an integer from 0 to {MAX_VLLM_LIMIT}, got {limit!r:.100}"
                )
            if name != "image" and limit:
                raise NotImplementedError(
                    f"limit_mm_per_prompt[{name!r}]={limit} is not served: prompts may have images only; leave it out, "
                    "or 0"
                )
        check_processor_options("mm_processor_kwargs", self.mm_processor_kwargs)
        for host in self.allowed_media_domains:
            if not host or any(mark in host for mark in "/:@ *"):
                raise ValueError(
                    f"allowed_media_domains must hold names of hosts, such as images.example.org, got {host!r:.100}"
                )

    def _apply_structured_outputs_config(self) -> None:
        """Set the options that `structured_outputs_config` names, and check their values."""
        for name, value in (self.structured_outputs_config or {}).items():
            if name in _STRUCTURED_OUTPUTS:
                setattr(self, _STRUCTURED_OUTPUTS[name], value)
            elif value and name not in _WITHOUT_EFFECT:
                raise NotImplementedError(
                    f"structured_outputs_config[{name!r}]={value!r} is not served; leave it out, or set one of "
                    f"{', '.join(_STRUCTURED_OUTPUTS)}"
                )
        if self.structured_outputs_config:
            super().__post_init__()
        StructuredOutputsParams(json_object=True, whitespace_pattern=self.guided_whitespace_pattern)


def _count_of(name: str, limit: Any) -> Any:
    """Return the value of `limit_mm_per_prompt[name]`, or its count if it is given as in vLLM, in an object.

    The count is not checked. Raises ValueError for fields that vLLM does not have, and for sizes that are no integers.
    """
    if not isinstance(limit, dict):
        return limit
    fields = _LIMIT_FIELDS.get(name, ("count",))
    for field, value in limit.items():
        if field not in fields:
            raise ValueError(
                f"limit_mm_per_prompt[{name!r}] has the unknown field {field!r:.100}; it may have {', '.join(fields)}"
            )
        if field != "count" and value is not None and (type(value) is not int or value < 1):
            raise ValueError(
                f"limit_mm_per_prompt[{name!r}][{field!r}] must be an integer from 1 on or None, got {value!r:.100}"
            )
    return limit.get("count", MAX_VLLM_LIMIT)
