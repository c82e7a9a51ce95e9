"""The arguments of vLLM that this engine does not have, in one table for each call or class that takes them.

Each is accepted at vLLM's default. A harmless one, which changes no result here, is accepted with any value, and a line
in the log says why it has no effect. Any other value of the rest raises NotImplementedError, which names it.
`docs/using/unserved_arguments.md` shows the tables.
"""

from typing import Any, NamedTuple

from vllm_mp.arguments.unserved_names import NEW_WEIGHTS


class Unserved(NamedTuple):
    """An argument that this engine does not have."""

    accepted: tuple[Any, ...]
    """Values that ask for nothing; None, and empty lists, dicts and texts, never do."""
    reason: str
    """Why it has no effect, or what to use instead."""
    is_harmless: bool = False


SERVER_FLAGS = {
    "allowed-headers": "--cors-allow-origin lets pages of an origin send any header",
    "allowed-methods": "--cors-allow-origin lets pages of an origin send GET and POST",
    "allowed-origins": "give --cors-allow-origin ORIGIN",
    "allow-credentials": "keys are sent in headers, not in cookies",
    "chat-template-content-format": "a chat template gets texts as str, and images as parts; change the template",
    "disable-access-log-for-endpoints": "there is no access log without --access-log",
    "disable-fastapi-docs": "/docs and /openapi.json need a key if the server has one",
    "disable-frontend-multiprocessing": "--api-server-count 1 is the default",
    "disable-uvicorn-access-log": "there is no access log without --access-log",
    "enable-prompt-tokens-details": "every usage has prompt_tokens_details",
    "enable-request-id-headers": "every response has the header X-Request-Id",
    "enable-server-load-tracking": "/load has the number of live requests",
    "enable-ssl-refresh": "start the server again with the new certificate",
    "enable-tokenizer-info-endpoint": "/tokenizer_info is served",
    "h11-max-header-count": "give --max-header-bytes",
    "h11-max-incomplete-event-size": "give --max-header-bytes",
    "log-config-file": "give --log-format, or VLLM_MP_LOG_LEVEL in the environment",
    "middleware": "put a proxy before the server",
    "prompt-adapters": "vLLM has dropped prompt adapters; use LoRA adapters",
    "return-tokens-as-token-ids": "each request may set return_tokens_as_token_ids",
    "ssl-cert-reqs": "--ssl-ca-certs requires certificates of clients",
    "tool-server": "tools that the server itself runs are not served",
    "uvicorn-log-level": "set VLLM_MP_LOG_LEVEL in the environment",
}
"""Flags of vLLM's server, and what to use instead."""
COMMANDS = {
    "vllm-mp bench mm-processor": "`vllm-mp bench latency` measures an engine",
    "vllm-mp bench serve": "`vllm bench serve` of vLLM works with this server; docs/using/clients.md shows a line",
    "vllm-mp bench sweep": "`vllm-mp bench latency` measures an engine",
    "vllm-mp collect-env": "`vllm-mp env` prints versions, machine and settings",
    "vllm-mp complete": "`vllm-mp generate` continues a prompt",
    "vllm-mp run-batch": "`vllm-mp generate MODEL --prompts FILE` answers the prompts of a file",
}
"""Commands of vLLM, and what to use instead."""


def _refused(reason: str, **defaults: Any) -> dict[str, Unserved]:
    """Return the entries of arguments with these defaults; a default that is a tuple lists all accepted values."""
    return {name: Unserved(value if isinstance(value, tuple) else (value,), reason) for name, value in defaults.items()}


def _harmless(reason: str, **defaults: Any) -> dict[str, Unserved]:
    """Return the entries of harmless arguments with these defaults."""
    return {name: entry._replace(is_harmless=True) for name, entry in _refused(reason, **defaults).items()}


_MEDIA = "images are decoded and processed in one way, and prompts have no sounds or videos"
_ALONE = "the engine chooses that by itself"
_NO_GRAPHS_BY_HAND = "nothing is compiled, and CUDA graphs are captured for sizes up to max_cudagraph_capture_size"
_LAYOUT = "the ranks of a core share each layer, and its experts"
_ONE_SCHEDULER = "there is one scheduler, with one budget of tokens for all requests of a step"
_DEVICES = "set CUDA_VISIBLE_DEVICES, num_threads or cpus"
_CORES = "data_parallel_size starts the cores, and `vllm-mp engine --listen` one that is started apart"
_OTHER_DRAFTS = "give speculative_config, a dict of vLLM's names"
_NO_STATE_SPACES = "models with state-space layers are not served"
_FILES = "weights come from safetensors or GGUF files"
_CONFIG = "a model's configuration comes from its config.json; change that file"
_NO_TRANSFER = "a KV cache stays with its core"

ENGINE_ARGUMENTS: dict[str, Unserved] = {
    **_harmless("a model generates, unless it is an encoder, and embeds", task="auto", runner="auto"),
    **_refused("the model's architecture decides what it makes", convert=("auto", "none", "embed")),
    **_harmless("sleep() needs no option", enable_sleep_mode=False, enable_cumem_allocator=False)
    | _harmless("sleep() needs no option", enable_nccl_comm_suspend=False),
    **_harmless(
        _NO_GRAPHS_BY_HAND,
        compilation_config=None,
        optimization_level=None,
        performance_mode="balanced",
        cudagraph_capture_sizes=None,
        cuda_graph_sizes=None,
        max_seq_len_to_capture=8192,
        additional_config=None,
        attention_config=None,
        kernel_config=None,
        ir_op_priority=None,
        enable_flashinfer_autotune=None,
        enable_bf16x3_router_gemm=None,
        linear_backend="auto",
        moe_backend="auto",
        jit_monitor_mode="warn",
        jit_monitor_verbose=False,
        use_fp64_gumbel=False,
        disable_cascade_attn=False,
        gdn_prefill_backend=None,
        kda_prefill_backend=None,
    ),
    **_harmless(
        _LAYOUT,
        disable_custom_all_reduce=False,
        enable_expert_parallel=False,
        enable_ep_weight_filter=False,
        enable_batch_sharded_sampling=None,
        enable_eplb=False,
        eplb_config=None,
        num_redundant_experts=0,
        eplb_window_size=1000,
        eplb_step_interval=3000,
        eplb_log_balancedness=False,
        expert_placement_strategy="linear",
        all2all_backend="allgather_reducescatter",
        enable_microbatching=False,
        enable_dbo=False,
        ubatch_size=0,
        dbo_decode_token_threshold=32,
        dbo_prefill_token_threshold=512,
        dp_sync_interval=None,
        disable_nccl_for_dp_synchronization=None,
        fully_sharded_loras=False,
        ray_workers_use_nsight=False,
    ),
    **_harmless(
        _ONE_SCHEDULER,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=0,
        max_num_scheduled_tokens=None,
        scheduler_reserve_full_isl=None,
        prefill_schedule_interval=1,
        watermark=0.0,
        num_scheduler_steps=1,
        multi_step_stream_outputs=True,
        num_lookahead_slots=0,
        scheduler_delay_factor=0.0,
        preemption_mode=None,
        disable_async_output_proc=False,
        use_v2_block_manager=True,
        disable_hybrid_kv_cache_manager=None,
        prefix_caching_hash_algo="sha256",
        prefix_cache_retention_interval=None,
        prefix_match_unit=None,
        kv_sharing_fast_prefill=False,
    ),
    **_harmless(
        _MEDIA,
        language_model_only=False,
        interleave_mm_strings=False,
        media_io_kwargs=None,
        allowed_local_media_path="",
        mm_processor_cache_type="lru",
        mm_preprocessor_cache_gb=4,
        mm_hasher_algorithm="blake3",
        mm_shm_cache_max_object_size_mb=128,
        mm_encoder_tp_mode="weights",
        mm_encoder_attn_backend=None,
        mm_encoder_attn_dtype=None,
        mm_encoder_fp8_scale_path=None,
        mm_encoder_fp8_scale_save_path=None,
        mm_encoder_fp8_scale_save_margin=None,
        mm_tensor_ipc=None,
        mm_processor_device="auto",
        mm_ipc_gpu_memory_gb=None,
        mm_device_do_normalize=None,
        skip_mm_profiling=False,
        video_pruning_rate=None,
        video_pruning_method=None,
        disable_mm_preprocessor_cache=False,
        disable_chunked_mm_input=False,
        enable_mm_processor_stats=False,
        ec_manager_config=None,
    ),
    **_refused(
        _MEDIA,
        enable_mm_embeds=False,
        mm_encoder_only=False,
        default_mm_loras=None,
        enable_tower_connector_lora=False,
        io_processor_plugin=None,
        diffusion_config=None,
    ),
    **_harmless(
        _NO_STATE_SPACES,
        mamba_config=None,
        mamba_cache_dtype="auto",
        mamba_ssm_cache_dtype="auto",
        mamba_block_size=None,
        mamba_cache_mode=None,
        mamba_backend=None,
        mamba_ssu_algorithm=None,
        enable_mamba_cache_stochastic_rounding=False,
        mamba_cache_philox_rounds=0,
        replayssm_buffer_len=None,
        use_replayssm=False,
    ),
    **_harmless(
        _ALONE,
        max_parallel_loading_workers=None,
        safetensors_load_strategy=None,
        safetensors_prefetch_num_threads=None,
        safetensors_prefetch_block_size=None,
        use_tqdm_on_load=True,
        pt_load_map_location="cpu",
        distributed_timeout_seconds=None,
        cpu_distributed_timeout_seconds=None,
        tokenizer_pool_size=0,
        tokenizer_pool_type="ray",
        tokenizer_pool_extra_config=None,
        renderer_num_workers=1,
        intial_incremental_detokenization_offset=5,
        lora_extra_vocab_size=256,
        specialize_active_lora=False,
        guided_decoding_disable_fallback=False,
        shutdown_timeout=0,
        fail_on_environ_validation=False,
        _api_process_count=1,
        _api_process_rank=0,
    ),
    **_harmless(
        "loggers and /metrics have the figures of the engine",
        aggregate_engine_logging=False,
        show_hidden_metrics_for_version=None,
        collect_detailed_traces=None,
        per_request_spec_decode_metrics="none",
        kv_cache_metrics=False,
        kv_cache_metrics_sample=None,
        cudagraph_metrics=False,
        enable_layerwise_nvtx_tracing=False,
        enable_mfu_metrics=False,
        enable_logging_iteration_details=False,
    ),
    **_harmless("only AsyncEngineArgs has it, and only a client that streams writes such lines", max_log_len=None)
    | _harmless(
        "only AsyncEngineArgs has it, and only a client that streams writes such lines",
        disable_log_requests=None,
        enable_log_requests=None,
    ),
    **_refused("use AsyncEngineArgs", otlp_traces_endpoint=None),
    **_harmless("profiles are written to VLLM_TORCH_PROFILER_DIR", profiler_config=None),
    **_harmless("a core that dies is always replaced", fault_tolerance_config=None, enable_fault_tolerance=False),
    **_refused("give the hub's branch or commit as revision", code_revision=None),
    **_refused(
        _CONFIG,
        hf_overrides=None,
        hf_config_path=None,
        rope_scaling=None,
        rope_theta=None,
        model_class_overrides=None,
        disable_sliding_window=False,
        config_format=("auto", "hf"),
        model_impl=("auto", "vllm"),
        override_neuron_config=None,
        language_model_overrides=None,
    ),
    **_refused(_FILES, model_loader_extra_config=None, ignore_patterns=None, weights_path=None),
    **_refused("give PoolingParams, or change the model's folder", pooler_config=None, override_pooler_config=None),
    **_refused("logprobs are those of the model's own distribution", logprobs_mode="raw_logprobs"),
    **_refused("it is not known what the KV cache's scales would be", calculate_kv_scales=False)
    | _refused("all layers have one kv_cache_dtype", kv_cache_dtype_skip_layers=None),
    **_refused("give quantization", quantization_config=None, quantization_param_path=None)
    | _harmless("formats of checkpoints are either served or refused", allow_deprecated_quantization=False),
    **_refused(
        "weights and KV cache stay on the device",
        cpu_offload_gb=0,
        cpu_offload_params=None,
        offload_backend="auto",
        offload_group_size=0,
        offload_num_in_group=1,
        offload_prefetch_step=1,
        offload_params=None,
    ),
    **_refused(
        "prefix_cache_file and prefix_cache_file_bytes keep blocks in a file",
        kv_offloading_size=None,
        kv_offloading_backend="native",
    ),
    **_refused("set kv_cache_memory_bytes", num_gpu_blocks_override=None),
    **_refused("set the server's options of admission", max_num_queued_reqs=None, max_num_queued_tokens=None),
    **_refused(
        _NO_TRANSFER,
        kv_transfer_config=None,
        kv_events_config=None,
        ec_transfer_config=None,
        tokens_only=False,
    ),
    **_refused(NEW_WEIGHTS, weight_transfer_config=None),
    **_refused(
        _OTHER_DRAFTS,
        speculative_model=None,
        speculative_model_quantization=None,
        speculative_draft_tensor_parallel_size=None,
        num_speculative_tokens=None,
        speculative_disable_mqa_scorer=False,
        speculative_max_model_len=None,
        speculative_disable_by_batch_size=None,
        ngram_prompt_lookup_max=None,
        ngram_prompt_lookup_min=None,
        spec_decoding_acceptance_method="rejection_sampler",
        typical_acceptance_sampler_posterior_threshold=None,
        typical_acceptance_sampler_posterior_alpha=None,
        disable_logprobs_during_spec_decoding=None,
    ),
    **_refused(
        "`vllm-mp serve` has --reasoning-parser, and in Python vllm_mp.client.answer_parser splits answers",
        reasoning_parser="",
        reasoning_parser_plugin=None,
        reasoning_config=None,
        enable_reasoning=False,
    ),
    **_refused(_DEVICES, device_ids=None, numa_bind=False, numa_bind_nodes=None, numa_bind_cpus=None),
    **_refused(
        _CORES,
        data_parallel_rank=None,
        data_parallel_start_rank=None,
        data_parallel_size_local=None,
        data_parallel_address=None,
        data_parallel_rpc_port=None,
        data_parallel_hybrid_lb=False,
        data_parallel_external_lb=False,
        data_parallel_multi_port_external_lb=False,
        enable_elastic_ep=False,
    ),
    **_refused(
        "set tensor_parallel_size or pipeline_parallel_size",
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        dcp_comm_backend=(None, "ag_rs"),
        dcp_q_replicate=None,
        dcp_kv_cache_interleave_size=1,
        cp_kv_cache_interleave_size=1,
    ),
    **_refused(
        "no code of other engines runs in the core; logits_processors registers classes",
        worker_cls="auto",
        worker_extension_cls="",
        scheduler_cls=("vllm.core.scheduler.Scheduler", "vllm.v1.core.sched.scheduler.Scheduler"),
        logits_processor_pattern=None,
    ),
    **_refused(
        "LoRA adapters have the rank and type of their files, up to max_lora_rank",
        lora_dtype="auto",
        lora_target_modules=None,
        long_lora_scaling_factors=None,
        enable_lora_bias=False,
        qlora_adapter_name_or_path=None,
        enable_mixed_moe_lora_format=False,
        enable_moe_shared_loras=False,
    ),
    **_refused(
        "vLLM has dropped prompt adapters; use LoRA adapters",
        enable_prompt_adapter=False,
        max_prompt_adapters=1,
        max_prompt_adapter_token=0,
    ),
    **_refused(
        "steps return no such figures",
        enable_return_routed_experts=False,
        return_sampling_mask=False,
        enable_trace_replay=False,
    ),
}
"""The arguments of vLLM's `EngineArgs` and `AsyncEngineArgs`, up to 0.33, that have no option here."""

SAMPLING_ARGUMENTS: dict[str, Unserved] = {
    **_harmless("parameters are copied where they must be", skip_clone=False, output_text_buffer_length=0),
    **_harmless("set the engine's option stream_interval", stream_interval=None),
    **_harmless("it concerns beam search only", length_penalty=1.0, early_stopping=False),
    **_refused("ask for n completions with logprobs, and choose by cumulative_logprob", use_beam_search=False),
    **_refused("set max_tokens, or reasoning_effort over HTTP", thinking_token_budget=(None, -1)),
    **_refused("ask for logprobs=-1, or score() texts", logprob_token_ids=None, prompt_logprob_token_ids=None),
    **_refused("prompt_logprobs are of all tokens", prompt_logprob_start=(None, 0)),
    **_refused("logprobs are a list of dicts", flat_logprobs=False),
    **_refused("set repetition_penalty or frequency_penalty", repetition_detection=None),
    **_refused("give the prompt a cache_salt of its own", skip_reading_prefix_cache=False),
    **_refused("register a logits processor", watermarking=None, trace_decode_token_ids=None),
    **_refused("steps return no experts", routed_experts_prompt_start=0),
}
"""The fields of vLLM's `SamplingParams` that are not served."""

POOLING_ARGUMENTS: dict[str, Unserved] = {
    **_harmless("a request for a vector has one output", output_kind=2, hidden_states_cache=None),
    **_harmless("a prompt's vector needs all of its tokens", requires_token_ids=False),
    **_refused("give use_activation", softmax=None, activation=None),
    **_refused("models for steps are not served", step_tag_id=None, returned_token_ids=None),
    **_refused("give the prompt a cache_salt of its own", skip_reading_prefix_cache=False),
    **_refused("no plugin reads them", extra_kwargs=None),
    **_refused("queries and documents are compared with score()", late_interaction_params=None),
}
"""The fields of vLLM's `PoolingParams` that are not served."""

PARAMETER_TABLES = {"SamplingParams": SAMPLING_ARGUMENTS, "PoolingParams": POOLING_ARGUMENTS}
"""The table for each class of parameters."""

TOKENIZATION_ARGUMENTS: dict[str, Unserved] = {
    **_refused("call lower() on the text", do_lower_case=False),
    **_refused("a step computes prompts of different lengths without padding", pad_prompt_tokens=None),
    **_harmless("outputs have the text of the prompt", needs_detokenization=False),
}
"""vLLM's `tokenization_kwargs` that are not served."""

_NO_REASONING = "no reasoning parser runs in this engine"
CALL_ARGUMENTS: dict[str, Unserved] = {
    **_refused("pairs of texts are scored without a template", chat_template=None),
    **_refused("a profile begins with the next step", delay_iterations=None),
    **_refused("a profile has at most 256 steps; call stop_profile() earlier", max_iterations=None),
    **_refused("each profile has a folder of its own, which stop_profile() returns", profile_prefix=None),
    **_refused("the prefix cache chooses by itself which blocks it keeps", kv_hints=None),
    **_refused("give it in the prompt: a dict with multi_modal_data", multi_modal_uuids=None, multi_modal_data=None),
    **_refused(
        "prompt adapters are not served, and vLLM has dropped them; give a lora_request instead",
        prompt_adapter_request=None,
    ),
    **_refused(_NO_REASONING, reasoning_ended=None, reasoning_parser_kwargs=None),
    **_refused(
        "requests share cached prefixes by their tokens, not by session; give a cache_salt in the prompt to choose who "
        "shares",
        session_id=None,
    ),
    **_refused("give structured_outputs in the parameters", guided_options_request=None),
    **_refused("give the token ids as prompts", prompt_token_ids=None),
    **_harmless(_NO_TRANSFER, reset_connector=False),
}
"""The arguments of vLLM's `generate`, `encode`, `chat` and other calls that are not served."""
