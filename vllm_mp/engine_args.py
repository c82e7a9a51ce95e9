"""The options of an engine: one flat dataclass, from which the shell's flags and their help are made too."""

import argparse
import dataclasses
import json
import logging
import types
import typing
from typing import Any

from vllm_mp.config import (
    AttentionConfig,
    CacheConfig,
    DecodingConfig,
    DeviceConfig,
    LivenessConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm_mp.fault_injection.faults import parse_faults
from vllm_mp.model_config.architecture import Architecture, NativeArchitecture
from vllm_mp.model_config.generation import default_sampling_params, eos_token_ids, read_generation_config
from vllm_mp.model_config.json_file import read_json
from vllm_mp.model_config.pooling import read_max_seq_length, read_pooling_config
from vllm_mp.model_config.registry import FP8_ARCHITECTURES, read_architecture
from vllm_mp.model_store.package import PACKAGED_MODELS
from vllm_mp.model_store.resolve import DEFAULT_MODEL, resolve_model

logger = logging.getLogger(__name__)

_DTYPES = {"half": "float16", "float": "float32"}
_ATTENTION_BACKENDS = {"FLASH_ATTN": "flash_attn", "TRITON_ATTN": "triton", "TORCH_SDPA": "torch"}
_LARGEST = 2**63 - 1
"""The largest number that reaches the core as it is."""
_DEFAULT_MAX_NUM_SEQS = 256


def _option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    served: bool = True,
) -> Any:
    """A field with what its flag, its help and its validation need. `served=False`: only the default works."""
    return dataclasses.field(
        default=default,
        metadata={"help": help, "choices": choices, "low": low, "high": high, "served": served},
    )


@dataclasses.dataclass
class EngineArgs:
    """The options of an engine, each also a flag of the shell commands (`--max-model-len`, ...).

    Construction raises TypeError for an unknown field or a value of the wrong type, ValueError for a value out
    of range, and NotImplementedError for one that this version does not serve; the message names the field, the
    value and what is allowed.
    """

    model: str = _option(DEFAULT_MODEL, f"hub id, local folder, .gguf file, or an alias: {', '.join(PACKAGED_MODELS)}")
    tokenizer: str | None = _option(None, "hub id or folder of the tokenizer; the model's own by default")
    tokenizer_mode: str = _option("auto", "auto: the fast tokenizer if there is one", choices=("auto", "slow"))
    skip_tokenizer_init: bool = _option(False, "load no tokenizer: prompts and answers are token ids")
    revision: str | None = _option(None, "branch, tag or commit of the model on the hub")
    hf_token: str | None = _option(None, "token for the hub")
    trust_remote_code: bool = _option(False, "allow code that comes with a tokenizer to run")
    download_dir: str | None = _option(None, "folder for downloads from the hub")
    load_format: str = _option(
        "auto",
        "format of the weights; dummy: random ones",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    dtype: str = _option(
        "auto",
        "type of weights and activations; auto: the checkpoint's 16-bit type, or bfloat16 for float32 ones",
        choices=("auto", "float32", "float16", "bfloat16", "half", "float"),
    )
    seed: int = _option(0, "seed of random weights", low=0, high=2**63 - 1)
    max_model_len: int | None = _option(
        None, "most tokens of prompt and answer together; the model's context by default", low=2
    )
    served_model_name: str | None = _option(None, "name of the model in answers; `model` by default")
    device: str = _option("auto", "auto: cuda if there is one", choices=("auto", "cpu", "cuda"))
    enforce_eager: bool = _option(False, "never capture CUDA graphs")
    attention_backend: str = _option(
        "auto",
        "what computes attention; auto: FlashAttention where it is installed and serves, else Triton, on CPUs C++",
        choices=("auto", "triton", "flash_attn", "torch", *_ATTENTION_BACKENDS),
    )
    num_threads: int = _option(0, "threads of the core on a CPU; 0: one for each available core", low=0, high=1024)
    gpu_memory_utilization: float = _option(
        0.9, "share of the device's memory that the core may use", low=0.01, high=1.0
    )
    kv_cache_memory_bytes: int | None = _option(
        None,
        "bytes of KV cache; by default what gpu_memory_utilization leaves, on a CPU a quarter of the free "
        "memory up to 4 GiB",
        low=1,
    )
    swap_space: float = _option(0.0, "GiB of host memory for evicted KV blocks", served=False)
    block_size: int = _option(16, "tokens of one KV block", low=1, high=1024)
    kv_cache_dtype: str = _option(
        "auto",
        "type of the KV cache; auto: as dtype; fp8: 8-bit floats (on GPUs from compute capability 8.9 on)",
        choices=("auto", "fp8", "fp8_e4m3"),
    )
    enable_prefix_caching: bool | None = _option(
        None, "do not compute anew what requests have in common at their beginning (on by default)"
    )
    max_num_seqs: int | None = _option(None, "most requests in one step (256)", low=1, high=65_536)
    max_num_batched_tokens: int | None = _option(
        None, "most tokens in one step (2048, on a CPU 512)", low=1, high=2**20
    )
    max_num_partial_prefills: int = _option(1, "most prompts that may be in progress in one step", low=1)
    enable_chunked_prefill: bool | None = _option(None, "let a long prompt take several steps (on by default)")
    scheduling_policy: str = _option(
        "fcfs", "order of waiting requests; priority: lower values first", choices=("fcfs", "priority")
    )
    async_scheduling: bool | None = _option(
        None, "schedule the next step while the current one is computed (on CUDA by default)"
    )
    stream_interval: int = _option(
        1, "tokens between two outputs of a stream; the first and the last come at once", low=1
    )
    check_invariants: bool = _option(
        False, "for debugging: check the scheduler's and the cache's books after each step (slow)"
    )
    tensor_parallel_size: int = _option(1, "devices that share each layer", low=1, served=False)
    pipeline_parallel_size: int = _option(1, "groups of layers on devices of their own", low=1, served=False)
    data_parallel_size: int = _option(1, "replicas of the model", low=1, served=False)
    distributed_executor_backend: str | None = _option(
        None, "what runs several devices", choices=("mp", "ray"), served=False
    )
    worker_use_ray: bool = _option(False, "run workers with Ray", served=False)
    engine_use_ray: bool = _option(False, "run the engine with Ray", served=False)
    enable_lora: bool = _option(False, "serve LoRA adapters", served=False)
    max_loras: int = _option(1, "most adapters in one step", low=1, served=False)
    max_lora_rank: int = _option(16, "highest rank of an adapter", low=1, served=False)
    quantization: str | None = _option(
        None,
        "weights of 8 bits with a scale for each output, made at load; int8: integers (on CPUs), fp8: floats (on GPUs "
        "from compute capability 8.9 on); a checkpoint in FP8 needs no option",
        choices=("int8", "fp8"),
    )
    generation_config: str = _option(
        "auto", "where generation_config.json is: auto, the model's folder; vllm, ignore it; or a folder"
    )
    override_generation_config: dict[str, Any] | None = _option(
        None, "values that replace those of generation_config.json, as JSON"
    )
    max_logprobs: int = _option(
        20, "most log-probabilities a position that a request may ask for; -1: the whole vocabulary", low=-1
    )
    chat_template: str | None = _option(None, "chat template to use: the text, or a file that holds it")
    disable_log_stats: bool = _option(False, "write no statistics to the log")
    engine_iteration_timeout_s: float = _option(
        60.0, "seconds without progress after which the core counts as hung and is replaced", low=0.1
    )
    start_timeout_s: float = _option(600.0, "seconds that the core may take to come up", low=1.0)
    recovery: bool = _option(True, "when the core dies, start another and go on with every stream")
    max_core_restarts: int = _option(10, "most restarts of the core within core_restart_window_s", low=0)
    core_restart_window_s: float = _option(300.0, "seconds over which max_core_restarts counts", low=1.0)
    warm_standby: bool = _option(
        False, "keep a process at hand that has imported everything, to replace the core sooner"
    )
    fault_injection: str = _option("", "for tests: faults that the core brings about itself (see docs/faults.md)")

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
        """Add a flag for every option to `parser`."""
        group = parser.add_argument_group("engine options")
        hints = typing.get_type_hints(cls)
        for option in dataclasses.fields(cls):
            value_type = _value_type(hints[option.name])
            flag = "--" + option.name.replace("_", "-")
            text = option.metadata["help"] + ("" if option.metadata["served"] else " (not served yet)")
            if option.default is not None and option.default is not False:
                text += f" (default: {option.default})"
            text = text.replace("%", "%%")
            if value_type is bool:
                group.add_argument(flag, action=argparse.BooleanOptionalAction, default=option.default, help=text)
            else:
                parse = json.loads if value_type is dict else value_type
                group.add_argument(
                    flag, type=parse, default=option.default, choices=option.metadata["choices"], help=text
                )
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> "typing.Self":
        """The options from parsed flags; other attributes of `namespace` are left alone."""
        names = [option.name for option in dataclasses.fields(cls)]
        return cls(**{name: getattr(namespace, name) for name in names if hasattr(namespace, name)})

    def create_engine_config(self) -> VllmConfig:
        """Find the model (fetching and converting it if need be) and work out every setting.

        Raises ValueError, naming field, value and remedy, for a model that cannot be found or read, an
        architecture that is not known, or settings that contradict each other or the model.
        """
        folder = resolve_model(
            self.model,
            revision=self.revision,
            hf_token=self.hf_token,
            download_dir=self.download_dir,
            load_format=self.load_format,
        )
        tokenizer = folder
        if self.tokenizer is not None:
            tokenizer = resolve_model(
                self.tokenizer,
                hf_token=self.hf_token,
                download_dir=self.download_dir,
                load_format="tokenizer",
            )
        hf_config = read_json(folder / "config.json", dict)
        if hf_config is None:
            raise ValueError(f"{folder} has no config.json; fetch or save the model again")
        architecture = read_architecture(hf_config)
        is_encoder = architecture.is_encoder
        if is_encoder:
            self._check_encoder_options()
        max_model_len = self._resolve_max_model_len(architecture, read_max_seq_length(folder))
        overrides = self.override_generation_config or {}
        generation = read_generation_config(self.generation_config, folder) | overrides
        return VllmConfig(
            model_config=ModelConfig(
                model=self.model,
                path=str(folder),
                tokenizer=str(tokenizer),
                tokenizer_mode=self.tokenizer_mode,
                skip_tokenizer_init=self.skip_tokenizer_init,
                trust_remote_code=self.trust_remote_code,
                served_model_name=self.served_model_name or self.model,
                chat_template=self.chat_template,
                load_format=self.load_format,
                dtype=self.dtype,
                quantization=self._check_quantization(architecture),
                seed=self.seed,
                max_model_len=max_model_len,
                enforce_eager=self.enforce_eager,
                hf_config=hf_config,
                eos_token_ids=eos_token_ids(folder, generation, hf_config, architecture.vocab_size),
                max_logprobs=self.max_logprobs,
                default_sampling_params=default_sampling_params(generation, overrides),
                pooling=read_pooling_config(folder, is_encoder),
            ),
            cache_config=CacheConfig(
                block_size=max_model_len if is_encoder else self.block_size,
                kv_cache_memory_bytes=self.kv_cache_memory_bytes,
                gpu_memory_utilization=self.gpu_memory_utilization,
                cache_dtype=self.kv_cache_dtype,
                enable_prefix_caching=self.enable_prefix_caching is not False and not is_encoder,
            ),
            scheduler_config=self._scheduler_config(max_model_len, is_encoder),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig(device=self.device, num_threads=self.num_threads),
            attention_config=AttentionConfig(backend=self.attention_backend),
            decoding_config=DecodingConfig(),
            observability_config=self._observability_config(),
            liveness_config=LivenessConfig(
                engine_iteration_timeout_s=self.engine_iteration_timeout_s,
                start_timeout_s=self.start_timeout_s,
                recovery=self.recovery,
                max_core_restarts=self.max_core_restarts,
                core_restart_window_s=self.core_restart_window_s,
                warm_standby=self.warm_standby,
                fault_injection=self.fault_injection,
            ),
        )

    def _observability_config(self) -> ObservabilityConfig:
        return ObservabilityConfig(
            disable_log_stats=self.disable_log_stats, disable_log_requests=True, max_log_len=None
        )

    def _check_quantization(self, architecture: Architecture) -> str | None:
        """What the weights are quantized by, the checkpoint's own quantization included."""
        in_checkpoint = architecture.fp8 if isinstance(architecture, NativeArchitecture) else None
        if self.quantization is None:
            return "fp8" if in_checkpoint else None
        wanted = f"quantization={self.quantization!r}"
        if self.quantization == "fp8":
            if architecture.name not in FP8_ARCHITECTURES:
                raise ValueError(
                    f"{wanted} is for {', '.join(FP8_ARCHITECTURES)}, and not for {architecture.name}; leave it out"
                )
            return "fp8"
        if self.device == "cuda":
            raise ValueError(f"{wanted} is computed on CPUs only, and device='cuda'; leave out one of them")
        if self.dtype in ("float16", "half"):
            raise ValueError(f"{wanted} goes with dtype float32 or bfloat16, got {self.dtype!r}")
        if not isinstance(architecture, NativeArchitecture):
            raise ValueError(
                f"{wanted} is for architectures with a native model, and {architecture.name} runs as transformers' "
                "own; leave it out"
            )
        if in_checkpoint:
            raise ValueError(
                f"{wanted} is made of weights that are plain floats, and {self.model} is FP8; leave it out"
            )
        return self.quantization

    def _check_encoder_options(self) -> None:
        for name in ("enable_prefix_caching", "enable_chunked_prefill"):
            if getattr(self, name):
                raise ValueError(
                    f"{name}=True: {self.model} is an encoder, whose tokens see the whole prompt, so that none can be "
                    "computed before the others; leave it None"
                )
        if self.kv_cache_dtype != "auto":
            raise ValueError(
                f"kv_cache_dtype={self.kv_cache_dtype!r}: {self.model} is an encoder, which has no cache; leave it "
                "'auto'"
            )

    def _resolve_max_model_len(self, architecture: Architecture, max_seq_length: int | None) -> int:
        """`max_seq_length` is what the model's folder advises for embeddings."""
        if self.max_model_len is None:
            return min(architecture.max_position, max_seq_length or architecture.max_position)
        if self.max_model_len > architecture.max_position:
            raise ValueError(
                f"max_model_len={self.max_model_len} is longer than the context of {self.model}, "
                f"{architecture.max_position} tokens; set it to at most that"
            )
        return self.max_model_len

    def _scheduler_config(self, max_model_len: int, is_encoder: bool) -> SchedulerConfig:
        chunked = self.enable_chunked_prefill is not False and not is_encoder
        max_num_batched_tokens = self.max_num_batched_tokens
        if max_num_batched_tokens is not None and not chunked and max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={max_num_batched_tokens} is below max_model_len={max_model_len}, and "
                + (
                    f"{self.model} is an encoder, which needs whole prompts to fit in a step; raise the first or lower "
                    "the second"
                    if is_encoder
                    else "enable_chunked_prefill=False needs whole prompts to fit in a step; raise the first, lower "
                    "the second, or allow chunked prefill"
                )
            )
        max_num_seqs = self.max_num_seqs
        if max_num_seqs is None:
            max_num_seqs = min(_DEFAULT_MAX_NUM_SEQS, max_num_batched_tokens or _DEFAULT_MAX_NUM_SEQS)
        if max_num_batched_tokens is not None and max_num_seqs > max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs={max_num_seqs} is above max_num_batched_tokens={max_num_batched_tokens}, so a "
                "step could not give every request a token; lower the first or raise the second"
            )
        return SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens or 0,
            max_num_partial_prefills=self.max_num_partial_prefills,
            enable_chunked_prefill=chunked,
            policy=self.scheduling_policy,
            stream_interval=self.stream_interval,
            async_scheduling=self.async_scheduling,
            check_invariants=self.check_invariants,
        )


@dataclasses.dataclass
class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` and what concerns the asyncio client alone."""

    disable_log_requests: bool = _option(False, "do not log each request")
    max_log_len: int | None = _option(None, "most characters of a prompt in the log", low=0)
    otlp_traces_endpoint: str | None = _option(None, "where traces are sent", served=False)

    def _observability_config(self) -> ObservabilityConfig:
        return ObservabilityConfig(
            disable_log_stats=self.disable_log_stats,
            disable_log_requests=self.disable_log_requests,
            max_log_len=self.max_log_len,
        )


def _check(option: "dataclasses.Field[Any]", hint: Any, value: Any) -> None:
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
        low = meta["low"] if meta["low"] is not None else -_LARGEST
        high = meta["high"] if meta["high"] is not None else _LARGEST
        # Written so that NaN is refused too.
        if not low <= value <= high:
            raise ValueError(f"{name} must be at least {low} and at most {high}, got {value}")
    if not meta["served"] and value != option.default:
        raise NotImplementedError(f"{name}={value!r} is not served yet; leave it at its default ({option.default!r})")


def _value_type(hint: Any) -> type:
    """`int` of `int | None`, `dict` of `dict[str, Any]`, and so on."""
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    origin = typing.get_origin(hint)
    result: type = origin or hint
    return result
