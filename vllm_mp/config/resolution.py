"""The options of an engine become its configuration: find the model, read its folder, resolve each setting.

An option that has a field of the same name in a section of `VllmConfig` is copied by `_section`. Only settings that
depend on the model or on other options are worked out here.
"""

import copy
import dataclasses
import math
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vllm_mp.arguments.options import MAX_INTEGER
from vllm_mp.config import (
    AttentionConfig,
    CacheConfig,
    DecodingConfig,
    DeviceConfig,
    LivenessConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm_mp.config.draft_model import check_draft, check_one_process, check_same_vocabulary, naming_draft
from vllm_mp.config.engine_options import DEFAULT_TIMEOUT_S, MIN_TIMEOUT_S, TIMEOUT_VARIABLE, EngineOptions
from vllm_mp.config.nodes import check_nodes, node_key_file
from vllm_mp.config.speculation import DRAFT_MODEL, read_speculative_config
from vllm_mp.machine.host_cpus import parse_cpus
from vllm_mp.machine.installation import require_engine
from vllm_mp.model_config.architecture import Architecture, NativeArchitecture
from vllm_mp.model_config.end_tokens import end_token_ids, unnamed_end_token_id
from vllm_mp.model_config.families.registry import FP8_ARCHITECTURES, read_architecture
from vllm_mp.model_config.generation import default_sampling_params, read_generation_config
from vllm_mp.model_config.pipeline_parallel import check_pipeline_parallel
from vllm_mp.model_config.pooling import read_max_seq_length, read_pooling_config
from vllm_mp.model_config.tensor_parallel import check_tensor_parallel
from vllm_mp.model_store import recommended_generation_config, resolve_model
from vllm_mp.model_store.gguf import is_of_gguf
from vllm_mp.model_store.hf_config import read_hf_config
from vllm_mp.requests.lora_request import parse_adapter
from vllm_mp.requests.processor_registration import import_folders

_DEFAULT_MAX_NUM_SEQS = 256
_MIN_NODES_TIMEOUT_S = 2.0

Section = TypeVar("Section", bound=msgspec.Struct)


def resolve_config(args: EngineOptions) -> VllmConfig:
    """Find the model, fetching and converting it if need be, and return the configuration that `args` ask for.

    Raises ValueError, naming field, value and remedy, for a model that cannot be found or read, an unknown
    architecture, settings that contradict each other or the model, or an installation without the engine. Raises what
    `resolve_model` raises.
    """
    require_engine(f"model={args.model!r}")
    if args.cpus:
        parse_cpus(args.cpus)
    check_nodes(args, uses_ray=_backends(args)[0] == "ray")
    folder = resolve_model(
        args.model,
        revision=args.revision,
        hf_token=args.hf_token,
        download_dir=args.download_dir,
        load_format=args.load_format,
        mmproj=args.mmproj,
    )
    tokenizer = folder
    if args.tokenizer is not None or args.tokenizer_revision is not None:
        tokenizer = resolve_model(
            args.tokenizer or args.model,
            revision=args.tokenizer_revision,
            hf_token=args.hf_token,
            download_dir=args.download_dir,
            load_format="tokenizer",
        )
    hf_config = read_hf_config(folder, args.load_format)
    architecture = read_architecture(hf_config)
    is_encoder = architecture.is_encoder
    if is_encoder:
        _check_encoder_options(args)
    if args.prefix_cache_file is not None:
        _check_prefix_cache_file(args)
    check_tensor_parallel(_with_blocks(args, architecture), args.tensor_parallel_size, args.model)
    check_pipeline_parallel(architecture, args.pipeline_parallel_size, args.model)
    max_model_len = _max_model_len(args, architecture, read_max_seq_length(folder))
    overrides = args.override_generation_config or {}
    recommended = recommended_generation_config(args.model) if args.generation_config == "auto" else {}
    generation = recommended | read_generation_config(args.generation_config, folder) | overrides
    end_tokenizer = None if args.skip_tokenizer_init else tokenizer
    eos_token_ids = end_token_ids(
        folder, end_tokenizer, generation, hf_config, overrides.get("eos_token_id"), architecture.vocab_size
    )
    return VllmConfig(
        model_config=_section(
            ModelConfig,
            args,
            path=str(folder),
            tokenizer=str(tokenizer),
            served_model_name=args.served_model_name or args.model,
            chat_template=None if args.chat_template is None else _read_chat_template(args.chat_template),
            quantization=_quantization(args, architecture, folder),
            max_model_len=max_model_len,
            hf_config=hf_config,
            eos_token_ids=eos_token_ids,
            unnamed_eos_token_id=unnamed_end_token_id(end_tokenizer, eos_token_ids),
            logits_processors=list(args.logits_processors or ()),
            logits_processor_folders=import_folders(args.logits_processors or ()),
            default_sampling_params=default_sampling_params(generation, overrides),
            pooling=read_pooling_config(folder, is_encoder),
        ),
        cache_config=_section(
            CacheConfig,
            args,
            block_size=max_model_len if is_encoder else args.block_size,
            cache_dtype=args.kv_cache_dtype,
            enable_prefix_caching=args.enable_prefix_caching is not False and not is_encoder,
        ),
        scheduler_config=_scheduler_config(args, max_model_len, is_encoder),
        parallel_config=_parallel_config(args),
        device_config=_section(DeviceConfig, args),
        attention_config=AttentionConfig(backend=args.attention_backend),
        decoding_config=DecodingConfig(
            backend=args.guided_decoding_backend,
            disable_any_whitespace=args.guided_decoding_disable_any_whitespace,
            disable_additional_properties=args.guided_decoding_disable_additional_properties,
            whitespace_pattern=args.guided_whitespace_pattern or "",
        ),
        observability_config=_section(ObservabilityConfig, args),
        liveness_config=_section(LivenessConfig, args, engine_iteration_timeout_s=_iteration_timeout(args)),
        lora_config=_lora_config(args, architecture),
        speculative_config=_speculative_config(args, architecture, tokenizer, max_model_len),
        multimodal_config=_section(
            MultiModalConfig, args, allowed_media_domains=[host.lower() for host in args.allowed_media_domains]
        ),
    )


def _speculative_config(
    args: EngineOptions, architecture: Architecture, tokenizer: Path, max_model_len: int
) -> SpeculativeConfig | None:
    """Return the section of speculation, with the draft model if there is one; None: no tokens are drafted.

    `architecture` and the folder `tokenizer` are those of the model that verifies the drafts. Raises what
    `resolve_model` raises, and ValueError or NotImplementedError for a draft model that cannot serve.
    """
    speculation = read_speculative_config(args.speculative_config or {})
    if speculation is None or speculation.method != DRAFT_MODEL:
        return speculation
    assert speculation.model is not None
    check_one_process(args, _backends(args)[0])
    draft = copy.copy(args)
    draft.mmproj = None  # a draft model does not see images
    draft.model, draft.revision, draft.quantization = (
        speculation.model,
        speculation.revision,
        speculation.quantization,
    )
    with naming_draft(draft.model):
        folder = resolve_model(
            draft.model,
            revision=draft.revision,
            hf_token=draft.hf_token,
            download_dir=draft.download_dir,
            load_format=draft.load_format,
        )
        hf_config = read_hf_config(folder, draft.load_format)
        found = read_architecture(hf_config)
        quantization = _quantization(draft, found, folder)
    check_draft(draft.model, found, _why_not_native(found))
    check_same_vocabulary(
        draft.model, args.model, found, architecture, None if args.skip_tokenizer_init else (folder, tokenizer)
    )
    speculation.draft_model_config = _section(
        ModelConfig,
        draft,
        path=str(folder),
        tokenizer=str(folder),
        served_model_name=draft.model,
        chat_template=None,
        quantization=quantization,
        max_model_len=min(max_model_len, found.max_position),
        hf_config=hf_config,
        eos_token_ids=[],
        logits_processors=[],
        pooling=read_pooling_config(folder, False),
    )
    return speculation


def _backends(args: EngineOptions) -> tuple[str, str]:
    """Return `data_parallel_backend` and `distributed_executor_backend`.

    Raises ValueError if options contradict each other, or decide what Ray decides.
    """
    executor = args.distributed_executor_backend or ("ray" if args.worker_use_ray else "mp")
    if args.worker_use_ray and executor != "ray":
        raise ValueError(f"worker_use_ray=True contradicts distributed_executor_backend={executor!r}; leave one out")
    uses_ray = args.engine_use_ray or executor == "ray"
    backend = args.data_parallel_backend or ("ray" if uses_ray else "mp")
    if uses_ray and backend != "ray":
        asks = "engine_use_ray=True" if args.engine_use_ray else "distributed_executor_backend='ray'"
        raise ValueError(f"{asks} contradicts data_parallel_backend={backend!r}; leave one out")
    if backend == "ray":
        _check_ray_decides(args)
    return backend, executor


def _check_ray_decides(args: EngineOptions) -> None:
    """Raise ValueError if `args` name CPUs or nodes, which Ray chooses."""
    if args.cpus:
        raise ValueError(
            f"cpus={args.cpus!r} is not served on Ray, which chooses the node; leave it empty, and give num_threads, "
            "the number of CPUs to reserve for each core"
        )
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name in ("node_rank", "master_addr", "master_port", "node_key_file"):
        if (value := getattr(args, name)) != defaults[name]:
            raise ValueError(
                f"{name}={value!r} is not served on Ray, which chooses the nodes; leave it out, and give nnodes alone"
            )


def _parallel_config(args: EngineOptions) -> ParallelConfig:
    backend, executor = _backends(args)
    return _section(
        ParallelConfig,
        args,
        data_parallel_backend=backend,
        distributed_executor_backend=executor,
        node_key_file=node_key_file(args),
    )


def _with_blocks(args: EngineOptions, architecture: Architecture) -> Architecture:
    """Return `architecture` with the blocks into which the quantization that `args` ask for rounds its weights."""
    if args.quantization == "int4" and isinstance(architecture, NativeArchitecture):
        return msgspec.structs.replace(architecture, blocks="int4")
    return architecture


def _iteration_timeout(args: EngineOptions) -> float:
    """Return the option, or else the value of the environment variable.

    Raises ValueError if the variable is not a number in the option's range, or if the time is too short for `nnodes`.
    """
    seconds = args.engine_iteration_timeout_s
    if seconds is None:
        seconds = _timeout_of_environment()
    if args.nnodes > 1 and seconds < _MIN_NODES_TIMEOUT_S:
        raise ValueError(
            f"engine_iteration_timeout_s={seconds:g} is too short for nnodes={args.nnodes}, because the other machines "
            f"report progress every 0.5 s; set it to at least {_MIN_NODES_TIMEOUT_S:g}"
        )
    return seconds


def _timeout_of_environment() -> float:
    """Return the environment variable or its default. Raises ValueError unless it is a number in range."""
    text = os.environ.get(TIMEOUT_VARIABLE, "").strip()
    try:
        seconds = float(text) if text else DEFAULT_TIMEOUT_S
    except ValueError:
        seconds = math.nan
    if not MIN_TIMEOUT_S <= seconds <= MAX_INTEGER:  # this form refuses NaN too
        raise ValueError(
            f"{TIMEOUT_VARIABLE} must be a number of seconds, at least {MIN_TIMEOUT_S:g}, got {text!r}; correct the "
            "environment variable, or unset it"
        )
    return seconds


def _read_chat_template(chat_template: str) -> str:
    """Return the template that is given as text or as a path.

    The configuration holds its text, so that no client opens a path that a core names.
    """
    if any(mark in chat_template for mark in ("{{", "{%", "{#", "\n")):
        return chat_template
    try:
        return Path(os.path.expanduser(chat_template)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"chat_template={chat_template!r} is neither a Jinja template nor a file that can be read ({error}): "
            "give the text of a template, or the path of one"
        ) from error


def _section(kind: type[Section], args: EngineOptions, **settings: Any) -> Section:
    """Return a section with `settings`; fields that are not in `settings` come from the options of the same name."""
    options = {name: value for name, value in vars(args).items() if name in kind.__struct_fields__}
    return kind(**(options | settings))


def _quantization(args: EngineOptions, architecture: Architecture, folder: Path) -> str | None:
    """Return the quantization of the weights in `folder`, including the checkpoint's own; None for a GGUF file's own.

    Raises ValueError if the option contradicts the architecture, the checkpoint or another option.
    """
    if args.quantization == "gguf":
        if not is_of_gguf(folder):
            raise ValueError(
                f"quantization='gguf' needs a GGUF file, and {args.model} is none; name a .gguf file, or leave it out"
            )
        return None
    in_checkpoint = _checkpoint_quantization(architecture)
    quantization = args.quantization or in_checkpoint
    if quantization is None:
        return None
    wanted = f"quantization={quantization!r}"
    if in_checkpoint not in (None, quantization):
        raise ValueError(f"{wanted} needs another checkpoint: {args.model} is {in_checkpoint.upper()}; leave it out")
    if quantization in ("awq", "gptq") and in_checkpoint is None:
        raise ValueError(f"{wanted} needs a checkpoint of that kind, which {args.model} is not; leave it out")
    if quantization == "fp8":
        if architecture.name not in FP8_ARCHITECTURES:
            raise ValueError(
                f"{wanted} is served for {', '.join(FP8_ARCHITECTURES)} and not for {architecture.name}; leave it out"
            )
        _check_is_native(wanted, architecture)
        return "fp8"
    if args.device == "cuda":
        raise ValueError(f"{wanted} is computed on CPUs only, but device='cuda'; leave out one of them")
    if args.dtype == "float16":
        raise ValueError(f"{wanted} needs dtype float32 or bfloat16, got {args.dtype!r}; change one of them")
    _check_is_native(wanted, architecture)
    return quantization


def _check_is_native(wanted: str, architecture: Architecture) -> None:
    """Raise ValueError, which names the option `wanted`, unless the model has a native module."""
    if not isinstance(architecture, NativeArchitecture):
        raise ValueError(
            f"{wanted} needs an architecture with a native model, and {architecture.name} runs on the transformers "
            f"backend{_why_not_native(architecture)}; leave it out"
        )


def _why_not_native(architecture: Architecture) -> str:
    """Return the reason in brackets if the architecture has a native module, and its configuration has not."""
    return f" ({architecture.reason_not_native})" if architecture.reason_not_native else ""


def _checkpoint_quantization(architecture: Architecture) -> str | None:
    """Return the name of the quantization that the checkpoint has; None for plain floats."""
    if not isinstance(architecture, NativeArchitecture):
        return None
    return "fp8" if architecture.fp8 else architecture.blocks


def _check_encoder_options(args: EngineOptions) -> None:
    """Raise ValueError for an option that an encoder cannot serve."""
    for name in ("enable_prefix_caching", "enable_chunked_prefill"):
        if getattr(args, name):
            raise ValueError(
                f"{name}=True: {args.model} is an encoder, where each token attends to the whole prompt, so that no "
                "part of a prompt can be computed before the rest; leave it None"
            )
    for name in ("enable_prompt_embeds", "logits_processors", "prefix_cache_file", "speculative_config"):
        if value := getattr(args, name):
            raise ValueError(f"{name}={value!r}: {args.model} is an encoder, which generates no text; leave it out")
    if args.kv_cache_dtype != "auto":
        raise ValueError(
            f"kv_cache_dtype={args.kv_cache_dtype!r}: {args.model} is an encoder, which has no cache; leave it 'auto'"
        )


def _check_prefix_cache_file(args: EngineOptions) -> None:
    """Raise ValueError if `args` ask for a prefix cache file and for what it does not work with."""
    file = f"prefix_cache_file={args.prefix_cache_file!r}"
    if not args.prefix_cache_file:
        raise ValueError(f"{file} is no path; name a file, or leave it out")
    if args.enable_prefix_caching is False:
        raise ValueError(f"{file} needs the prefix cache, but enable_prefix_caching=False; leave out one of them")
    if args.device == "cuda":
        raise ValueError(f"{file} is served on CPUs only, but device='cuda'; leave out one of them")
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(args, name)) > 1:
            raise ValueError(f"{file} needs a core with one rank, but {name}={size}; leave out one of them")


def _max_model_len(args: EngineOptions, architecture: Architecture, max_seq_length: int | None) -> int:
    """Return the maximum number of tokens of a request; `max_seq_length` is the recommendation of the model's folder.

    Raises ValueError if the option exceeds the model's context.
    """
    if args.max_model_len is None:
        return min(architecture.max_position, max_seq_length or architecture.max_position)
    if args.max_model_len > architecture.max_position:
        rope = architecture.rope if isinstance(architecture, NativeArchitecture) else None
        is_dynamic = rope is not None and rope.type == "dynamic"
        also = " (dynamic rotary scaling beyond it is not served: it changes keys that are already cached)"
        raise ValueError(
            f"max_model_len={args.max_model_len} is longer than the context of {args.model}, "
            f"{architecture.max_position} tokens{also if is_dynamic else ''}; set it to at most that"
        )
    return args.max_model_len


def _lora_config(args: EngineOptions, architecture: Architecture) -> LoRAConfig | None:
    """Return the section of LoRA adapters; None without them.

    Raises ValueError for a model that takes none, and for options that contradict each other.
    """
    if not args.enable_lora:
        if args.lora_modules:
            raise ValueError(f"lora_modules={args.lora_modules!r} needs enable_lora=True; set it")
        return None
    if not isinstance(architecture, NativeArchitecture) or architecture.is_encoder:
        raise ValueError(
            f"enable_lora=True: adapters are served for decoders with a native model, and {args.model} "
            f"({architecture.name}) is none{_why_not_native(architecture)}; leave it False"
        )
    max_cpu_loras = args.max_loras if args.max_cpu_loras is None else args.max_cpu_loras
    if max_cpu_loras < args.max_loras:
        raise ValueError(
            f"max_cpu_loras={max_cpu_loras} is below max_loras={args.max_loras}; raise the first or lower the second"
        )
    modules = [parse_adapter(text, number, "lora_modules") for number, text in enumerate(args.lora_modules, 1)]
    names = [args.served_model_name or args.model, *(module.lora_name for module in modules)]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"lora_modules: the name {repeated[0]!r} is used twice; give each adapter a name of its own")
    return _section(LoRAConfig, args, max_cpu_loras=max_cpu_loras, lora_modules=modules)


def _scheduler_config(args: EngineOptions, max_model_len: int, is_encoder: bool) -> SchedulerConfig:
    """Return the section of the scheduler. Raises ValueError for limits that contradict each other."""
    chunked = args.enable_chunked_prefill is not False and not is_encoder
    max_num_batched_tokens = args.max_num_batched_tokens
    if max_num_batched_tokens is not None and not chunked and max_num_batched_tokens < max_model_len:
        below = f"max_num_batched_tokens={max_num_batched_tokens} is below max_model_len={max_model_len}, and"
        if is_encoder:
            raise ValueError(
                f"{below} {args.model} is an encoder, so that a whole prompt must fit in one step; raise the first or "
                "lower the second"
            )
        raise ValueError(
            f"{below} with enable_chunked_prefill=False a whole prompt must fit in one step; raise the first, lower "
            "the second, or allow chunked prefill"
        )
    if args.async_scheduling and args.pipeline_parallel_size > 1:
        raise ValueError(
            f"async_scheduling=True: with pipeline_parallel_size={args.pipeline_parallel_size} as many steps are under "
            "way as there are stages, and a request gets its next token only after the token before it is known; leave "
            "it out"
        )
    if args.async_scheduling and args.speculative_config:
        raise ValueError(
            "async_scheduling=True: drafts follow the last token of a request, which must be known when the next step "
            "is scheduled; leave it out, or leave out speculative_config"
        )
    max_num_seqs = args.max_num_seqs
    if max_num_seqs is None:
        max_num_seqs = min(_DEFAULT_MAX_NUM_SEQS, max_num_batched_tokens or _DEFAULT_MAX_NUM_SEQS)
    if max_num_batched_tokens is not None and max_num_seqs > max_num_batched_tokens:
        raise ValueError(
            f"max_num_seqs={max_num_seqs} is above max_num_batched_tokens={max_num_batched_tokens}, so that a step "
            "cannot give every request a token; lower the first or raise the second"
        )
    return _section(
        SchedulerConfig,
        args,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or 0,
        enable_chunked_prefill=chunked,
        policy=args.scheduling_policy,
    )
