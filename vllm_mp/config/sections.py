"""The resolved configuration of an engine, in sections that vLLM's users know.

The configuration is plain data that crosses to the core process as JSON. `EngineArgs.create_engine_config` makes it
and validates it. A field with the name of an option holds the option's value.
"""

from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from vllm_mp.model_config.architecture import Architecture, NativeArchitecture
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.model_config.images import ImageConfig, read_image_config
from vllm_mp.model_config.pooling import PoolingConfig
from vllm_mp.requests.images import MAX_IMAGES
from vllm_mp.requests.lora_request import LoRARequest

QUANTIZATIONS: Final = ("int8", "int4", "fp8", "awq", "gptq", "gguf")
"""What the option `quantization` may say."""


class ModelConfig(msgspec.Struct, kw_only=True, dict=True):
    """The model, the folders of its files, and how it is loaded."""

    model: str
    """The name that the user gave."""
    path: str
    """The local folder that holds config.json, weights and tokenizer."""
    mmproj: str | None = None
    """The GGUF file with the image parts that the user gave; None: none, or the one in the model's folder."""
    tokenizer: str
    """The local folder that holds the tokenizer."""
    revision: str | None = None
    """The branch, tag or commit of a model of the hub; None: the main branch."""
    download_dir: str | None = None
    """The folder of downloads and converted models; None: the default caches."""
    tokenizer_mode: str
    skip_tokenizer_init: bool
    trust_remote_code: bool
    served_model_name: str
    chat_template: str | None
    """The text of a template that replaces the tokenizer's own."""
    load_format: str
    dtype: str
    """"auto" until the core chooses the dtype for its device; then "float32", "float16" or "bfloat16"."""
    quantization: str | None = None
    """"int8", "int4", made at load; "fp8", stored in the checkpoint or made at load; or None for weights of `dtype`."""
    seed: int | None
    """The seed of the draws of seeds for requests that have none; None: each run draws others."""
    max_model_len: int
    """Maximum number of tokens of a request, prompt and completion together."""
    batch_invariant: bool = True
    """Whether kernels must give a row the same result in any number of rows."""
    enforce_eager: bool
    max_cudagraph_capture_size: int = 512
    """Maximum number of tokens of a step that is captured; a step of decodes has one for each row."""
    hf_config: dict[str, Any]
    """The content of config.json, completed as `model_store.hf_config.read_hf_config` does."""
    eos_token_ids: list[int]
    unnamed_eos_token_id: int | None = None
    """The one of `eos_token_ids` that `stop_reason` does not name: the tokenizer's own."""
    max_logprobs: int = 20
    """Maximum number of log-probabilities per position that a request may ask for; -1: the whole vocabulary."""
    enable_prompt_embeds: bool = False
    """Requests may give their prompt as embeddings."""
    logits_processors: list[str] = []
    """The logits processors that the core loads, as `processor_registration.registered` reads them."""
    logits_processor_folders: list[str] = []
    """Folders in which the core looks for their modules after all others."""
    default_sampling_params: dict[str, Any] = {}
    """Fields of `SamplingParams` that the model's generation_config.json or its alias sets, for requests that do not
    set them."""
    pooling: PoolingConfig
    """Pooling of requests that do not set it."""

    @property
    def weights_seed(self) -> int:
        """The seed of the random weights of load_format=dummy."""
        return self.seed or 0

    @cached_property
    def architecture(self) -> Architecture:
        """The architecture that `hf_config` describes, with weights as `quantization` says."""
        architecture = read_architecture(self.hf_config)
        if self.quantization == "fp8" and isinstance(architecture, NativeArchitecture) and architecture.fp8 is None:
            return msgspec.structs.replace(architecture, fp8="channel")
        if self.quantization == "int4" and isinstance(architecture, NativeArchitecture):
            return msgspec.structs.replace(architecture, blocks="int4")
        return architecture

    @cached_property
    def images(self) -> ImageConfig | None:
        """How the model takes images; None: it takes none."""
        return read_image_config(self.hf_config)

    @property
    def folder(self) -> Path:
        """`path` as a `Path`."""
        return Path(self.path)

    @property
    def supported_tasks(self) -> list[str]:
        """What requests may ask of the model: "generate", "embed", "classify" and "score", as far as it can."""
        architecture = self.architecture
        can = {
            "generate": not architecture.is_encoder and architecture.has_head,
            "embed": True,
            "classify": architecture.num_classes > 0,
            "score": architecture.num_classes == 1,
        }
        return [task for task in can if can[task]]

    def get_vocab_size(self) -> int:
        return self.architecture.vocab_size

    def get_hidden_size(self) -> int:
        return self.architecture.hidden_size


class CacheConfig(msgspec.Struct, kw_only=True):
    """The paged KV cache.

    An encoder's blocks take no memory. Each is as long as the context, so that a request needs exactly one block.
    """

    block_size: int
    """Cells of one block, each for one token."""
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    """Share of the device's memory that the core may use, 0 to 1."""
    cache_dtype: str
    """"fp8" or "int8", or "auto" for keys and values of the model's dtype."""
    enable_prefix_caching: bool
    prefix_cache_file: str | None = None
    """Path of the file with blocks for the engine after a restart; None: there is none."""
    prefix_cache_file_bytes: int = 4 * 2**30
    """Maximum size of that file."""
    num_blocks: int = 0
    """0 until the core has chosen the size of the cache."""


class SchedulerConfig(msgspec.Struct, kw_only=True):
    """Limits and policy of the scheduler."""

    max_num_seqs: int
    """Maximum number of requests in one step."""
    max_num_batched_tokens: int
    """Maximum number of tokens in one step; if the option is not given, 0 until the core chooses for its device."""
    num_cheap_tokens: int = 0
    """Tokens of a step up to which another token takes hardly any time; 0 until the core chooses for its device."""
    max_num_partial_prefills: int
    """Maximum number of prompts in one step that are computed in part."""
    enable_chunked_prefill: bool
    max_prefill_slowdown: float = 0.0
    """Factor by which a prompt may lengthen the steps of requests in decode; 0: no limit."""
    policy: str
    """"fcfs" or "priority"."""
    stream_interval: int
    """Tokens between two outputs of a stream; the first and the last output come at once."""
    async_scheduling: bool | None = None
    """Schedule and launch a step while the previous step is computed; None until the core chooses for its device."""
    check_invariants: bool = False
    """Check after each step that no block, row or request is lost or used twice; slow, and ends the core on a fault."""


class ParallelConfig(msgspec.Struct, kw_only=True):
    """How many devices work on the model: each rank of a core has one."""

    tensor_parallel_size: int = 1
    """Ranks that share each layer."""
    pipeline_parallel_size: int = 1
    """Stages that share out the layers; each has `tensor_parallel_size` ranks."""
    data_parallel_size: int = 1
    """Cores that the engine starts, each with the whole model."""
    data_parallel_rank: int = 0
    """The slot of the core among them, which decides its devices and CPUs. A core that replaces a removed one takes its
    slot."""
    data_parallel_backend: str = "mp"
    """"mp": the cores are processes of the client's machine; "ray": they run on the nodes of a Ray cluster."""
    distributed_executor_backend: str = "mp"
    """"ray" has an effect only on `data_parallel_backend`: no rank is a process of Ray's."""
    nnodes: int = 1
    """Machines that the ranks are shared out to; node 0 has the core."""
    node_rank: int = 0
    """The number of this machine."""
    master_addr: str = ""
    """The address of node 0 for the other machines."""
    master_port: int = 0
    """The port of the core for rank hosts."""
    node_key_file: str = ""
    """The key of this machine: on node 0 the server's, on others that of a client; empty with one machine."""

    @property
    def world_size(self) -> int:
        """The number of ranks of a core: rank r is rank r % tensor_parallel_size of stage r // tensor_parallel_size."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nnodes

    def ranks_of(self, node: int) -> range:
        """Return the ranks that a machine has."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)


class DeviceConfig(msgspec.Struct, kw_only=True):
    """The device that computes the model."""

    device: str
    """"auto" until the core chooses; then "cpu" or "cuda"."""
    num_threads: int
    """Threads of the core's CPU kernels; 0: as many as `host_cpus.default_threads` finds."""
    cpus: str = ""
    """CPUs that the core may use, as `host_cpus.parse_cpus` reads them; empty: all that the process may use."""


class AttentionConfig(msgspec.Struct, kw_only=True):
    """The implementation of attention."""

    backend: str = "auto"
    """"auto" until the core chooses; then "triton", "flash_attn", "torch", or "cpu" for the C++ kernels."""


class LoRAConfig(msgspec.Struct, kw_only=True):
    """LoRA adapters that requests may use."""

    max_loras: int
    """Number of slots on the device, each for one adapter: the maximum number of adapters in one step."""
    max_cpu_loras: int
    """Maximum number of adapters in host memory; at least `max_loras`."""
    max_lora_rank: int
    lora_modules: list[LoRARequest] = []
    """The adapters that the core loads before it serves."""


class SpeculativeConfig(msgspec.Struct, kw_only=True):
    """How tokens are drafted."""

    method: str
    """"ngram", "suffix" or "draft_model"."""
    num_speculative_tokens: int
    """Maximum number of draft tokens of a request in a step."""
    prompt_lookup_min: int
    """Number of tokens of the shortest n-gram that is looked up."""
    prompt_lookup_max: int
    """The same of the longest."""
    suffix_decoding_max_tree_depth: int = 24
    """Maximum number of tokens of a match that count."""
    suffix_decoding_max_cached_requests: int = 1000
    """Number of the latest answers in which other requests look for matches; 0: each request looks in itself alone."""
    suffix_decoding_max_spec_factor: float = 2.0
    """Number of drafts for each token of a match."""
    suffix_decoding_min_token_prob: float = 0.1
    """Least share of the places of a match at which a draft has followed."""
    model: str | None = None
    """The name of the draft model, for the method "draft_model"."""
    revision: str | None = None
    """The branch, tag or commit of a draft model of the hub; None: the main branch."""
    quantization: str | None = None
    """The quantization of the draft model; None: that of its checkpoint."""
    draft_model_config: ModelConfig | None = None
    """The draft model, once it is found; None for other methods."""

    @property
    def max_step_drafts(self) -> int:
        """Maximum number of draft tokens in a step, of all requests: each has logits of the whole vocabulary."""
        return 128


class MultiModalConfig(msgspec.Struct, kw_only=True):
    """Images in prompts."""

    limit_mm_per_prompt: dict[str, int] | None = None
    """Maximum number of images of a prompt, under "image"; None: MAX_IMAGES."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the model's image processor; those of a request take precedence."""
    mm_processor_cache_gb: float = 4.0
    """Bound in GiB on the memory of a core for images, and their embeddings, that no live request needs."""
    allowed_media_domains: list[str] = []
    """Hosts from which a client fetches images that requests name by URL."""

    @property
    def max_images(self) -> int:
        """Maximum number of images of a prompt."""
        return min(MAX_IMAGES, (self.limit_mm_per_prompt or {}).get("image", MAX_IMAGES))


class DecodingConfig(msgspec.Struct, kw_only=True):
    """Structured output and reasoning."""

    backend: str = "auto"
    """The name that `guided_decoding_backend` gives, without effect: llguidance compiles all constraints."""
    reasoning_backend: str = ""
    """Empty: no reasoning parser."""
    disable_any_whitespace: bool = False
    """JSON has only the whitespace of a compact form, unless a request gives a `whitespace_pattern`."""
    disable_additional_properties: bool = False
    """Objects have only the properties that their schema names."""
    whitespace_pattern: str = ""
    """The regular expression of the whitespace in JSON for requests that give none; empty: a little whitespace."""


class ObservabilityConfig(msgspec.Struct, kw_only=True):
    """What the client writes to its log, and where it sends traces."""

    disable_log_stats: bool
    disable_log_requests: bool = True
    max_log_len: int | None = None
    """Number of characters of each prompt in the log, beside the parameters; None: neither is in the log."""
    otlp_traces_endpoint: str | None = None
    """URL of a collector of OpenTelemetry; None: no traces."""


class LivenessConfig(msgspec.Struct, kw_only=True):
    """How the client detects that the core is dead or hangs, and how it recovers. Times are in seconds."""

    engine_iteration_timeout_s: float
    """Longest time without progress of a core that has work; after it the supervisor kills the core."""
    start_timeout_s: float
    """Longest time without progress of a core that starts or loads."""
    recovery: bool = True
    """Start the next core after a death, and continue every stream."""
    max_core_restarts: int = 16
    """Maximum number of restarts within `core_restart_window_s`."""
    core_restart_window_s: float = 300.0
    core_template: bool = True
    """Keep template processes that fork the next core."""
    recover_kv_cache: str = "auto"
    """After which deaths the next core uses the KV cache of the core before: "auto", "always" or "never"."""
    fault_injection: str = ""
    """Faults that the core injects into itself, for tests; empty: no faults."""


class VllmConfig(msgspec.Struct, kw_only=True):
    """The whole configuration, on which client and core agree."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    device_config: DeviceConfig
    decoding_config: DecodingConfig
    observability_config: ObservabilityConfig
    liveness_config: LivenessConfig
    attention_config: AttentionConfig = msgspec.field(default_factory=AttentionConfig)
    lora_config: LoRAConfig | None = None
    """None: no request may use an adapter."""
    speculative_config: SpeculativeConfig | None = None
    """None: no tokens are drafted."""
    multimodal_config: MultiModalConfig = msgspec.field(default_factory=MultiModalConfig)

    @property
    def models(self) -> list[ModelConfig]:
        """The model, and the draft model if there is one."""
        draft = None if self.speculative_config is None else self.speculative_config.draft_model_config
        return [self.model_config] if draft is None else [self.model_config, draft]

    @property
    def images(self) -> ImageConfig | None:
        """How the model takes images; None: no prompt may have one."""
        return self.model_config.images if self.multimodal_config.max_images else None

    @property
    def num_excess_tokens(self) -> int:
        """Number of tokens by which a step may exceed `max_num_batched_tokens`, so that it need not divide an image."""
        images = self.images
        return images.tile_tokens - 1 if images is not None and images.attends_both_ways else 0
