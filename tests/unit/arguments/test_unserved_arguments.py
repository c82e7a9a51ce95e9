"""Every argument of vLLM is served, accepted without effect, or refused by name; none is an unexpected keyword."""

import argparse
import asyncio
import dataclasses
import inspect
import logging
from pathlib import Path

import pytest

from vllm_mp import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, LoRARequest, PoolingParams, SamplingParams
from vllm_mp.arguments import unserved_arguments
from vllm_mp.arguments.unserved_table import (
    CALL_ARGUMENTS,
    ENGINE_ARGUMENTS,
    POOLING_ARGUMENTS,
    SAMPLING_ARGUMENTS,
    TOKENIZATION_ARGUMENTS,
)

ENGINE_NAMES = """
model model_weights served_model_name tokenizer hf_config_path runner convert skip_tokenizer_init enable_prompt_embeds
tokenizer_mode trust_remote_code allowed_local_media_path allowed_media_domains download_dir safetensors_load_strategy
safetensors_prefetch_num_threads safetensors_prefetch_block_size load_format config_format dtype kv_cache_dtype seed
max_model_len cudagraph_capture_sizes max_cudagraph_capture_size ir_op_priority distributed_executor_backend
pipeline_parallel_size master_addr master_port nnodes node_rank distributed_timeout_seconds
cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus device_ids tensor_parallel_size
prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size
cp_kv_cache_interleave_size data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local
data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb
data_parallel_multi_port_external_lb data_parallel_backend enable_expert_parallel enable_batch_sharded_sampling
enable_ep_weight_filter moe_backend linear_backend all2all_backend enable_elastic_ep enable_dbo ubatch_size
dbo_decode_token_threshold dp_sync_interval dbo_prefill_token_threshold disable_nccl_for_dp_synchronization eplb_config
enable_eplb expert_placement_strategy _api_process_count _api_process_rank max_parallel_loading_workers block_size
enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval disable_sliding_window
disable_cascade_attn offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group
offload_prefetch_step offload_params gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens
max_num_scheduled_tokens long_prefill_token_threshold max_num_seqs max_num_queued_reqs max_num_queued_tokens
max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay disable_log_stats aggregate_engine_logging revision
code_revision hf_token hf_overrides model_class_overrides tokenizer_revision quantization quantization_config
allow_deprecated_quantization enforce_eager disable_custom_all_reduce language_model_only limit_mm_per_prompt
enable_mm_embeds interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type
mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
io_processor_plugin renderer_num_workers skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc
mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize enable_lora max_loras max_lora_rank default_mm_loras
fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules enable_tower_connector_lora specialize_active_lora
enable_mixed_moe_lora_format enable_moe_shared_loras ray_workers_use_nsight num_gpu_blocks_override
model_loader_extra_config ignore_patterns enable_chunked_prefill disable_chunked_mm_input scheduler_reserve_full_isl
prefill_schedule_interval watermark disable_hybrid_kv_cache_manager structured_outputs_config reasoning_parser
reasoning_parser_plugin speculative_config spec_method spec_model spec_tokens diffusion_config
show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces per_request_spec_decode_metrics
kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats scheduling_policy
scheduler_cls pooler_config compilation_config attention_config mamba_config kernel_config enable_flashinfer_autotune
enable_bf16x3_router_gemm worker_cls worker_extension_cls profiler_config kv_transfer_config kv_events_config
ec_transfer_config ec_manager_config reasoning_config generation_config enable_sleep_mode enable_cumem_allocator
enable_nccl_comm_suspend override_generation_config model_impl attention_backend kv_cache_dtype_skip_layers
mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size prefix_match_unit mamba_cache_mode replayssm_buffer_len
use_replayssm mamba_backend mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
additional_config use_tqdm_on_load pt_load_map_location logits_processors async_scheduling stream_interval
kv_sharing_fast_prefill optimization_level performance_mode fault_tolerance_config enable_fault_tolerance
kv_offloading_size kv_offloading_backend tokens_only shutdown_timeout weight_transfer_config
fail_on_environ_validation gdn_prefill_backend kda_prefill_backend enable_return_routed_experts return_sampling_mask
enable_log_requests disable_log_requests max_log_len
task swap_space rope_scaling rope_theta max_seq_len_to_capture cuda_graph_sizes disable_mm_preprocessor_cache
enable_lora_bias lora_extra_vocab_size long_lora_scaling_factors num_scheduler_steps multi_step_stream_outputs
num_lookahead_slots preemption_mode scheduler_delay_factor guided_decoding_backend guided_decoding_disable_fallback
guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties logits_processor_pattern
speculative_model num_speculative_tokens disable_async_output_proc override_neuron_config override_pooler_config
enable_prompt_adapter max_prompt_adapters max_prompt_adapter_token calculate_kv_scales enable_reasoning
qlora_adapter_name_or_path use_v2_block_manager tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config
max_num_partial_prefills max_long_partial_prefills enable_microbatching num_redundant_experts eplb_window_size
eplb_step_interval eplb_log_balancedness device worker_use_ray engine_use_ray
"""
"""The options of `EngineArgs` and `AsyncEngineArgs` in vLLM 0.33, then those of earlier versions."""

SAMPLING_NAMES = """
n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids
ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start
logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output
output_kind stream_interval skip_clone output_text_buffer_length structured_outputs logit_bias allowed_token_ids
extra_args bad_words skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start
trace_decode_token_ids watermarking
best_of truncate_prompt_tokens guided_decoding logits_processors use_beam_search length_penalty early_stopping
"""
"""The fields of `SamplingParams` in vLLM 0.33, then those of earlier versions."""

POOLING_NAMES = """
truncate_prompt_tokens dimensions normalize softmax activation use_activation step_tag_id returned_token_ids task
requires_token_ids skip_reading_prefix_cache extra_kwargs output_kind hidden_states_cache late_interaction_params
"""
"""The fields of `PoolingParams` in vLLM 0.33 and earlier versions."""

CALL_NAMES = {
    AsyncLLM.generate: """prompt sampling_params request_id prompt_text lora_request tokenization_kwargs trace_headers
    priority data_parallel_rank session_id kv_hints reasoning_ended reasoning_parser_kwargs prompt_adapter_request""",
    AsyncLLM.encode: """prompt pooling_params request_id lora_request trace_headers priority tokenization_kwargs
    reasoning_ended truncate_prompt_tokens prompt_adapter_request""",
    LLM.generate: """prompts sampling_params use_tqdm lora_request priority tokenization_kwargs mm_processor_kwargs
    prompt_token_ids prompt_adapter_request guided_options_request""",
    LLM.chat: """messages sampling_params use_tqdm lora_request priority chat_template chat_template_content_format
    add_generation_prompt continue_final_message tools chat_template_kwargs tokenization_kwargs mm_processor_kwargs""",
    LLM.encode: """prompts pooling_params use_tqdm lora_request pooling_task tokenization_kwargs prompt_token_ids
    prompt_adapter_request""",
    LLM.embed: "prompts use_tqdm pooling_params lora_request tokenization_kwargs prompt_adapter_request",
    LLM.classify: "prompts pooling_params use_tqdm lora_request tokenization_kwargs prompt_adapter_request",
    LLM.score: """data_1 data_2 use_tqdm pooling_params lora_request tokenization_kwargs chat_template
    prompt_adapter_request""",
}
"""The arguments of calls in vLLM 0.33 and earlier versions."""

PAGE = Path(__file__).parents[3] / "docs/using/unserved_arguments.md"
FIELDS = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
TABLES = {AsyncEngineArgs: ENGINE_ARGUMENTS, SamplingParams: SAMPLING_ARGUMENTS, PoolingParams: POOLING_ARGUMENTS}
ENTRIES = [(kind, name) for kind, table in TABLES.items() for name in table if name not in FIELDS]
OF_CLIENTS = {"disable_log_requests", "enable_log_requests", "max_log_len", "otlp_traces_endpoint"}
"""Options of `AsyncEngineArgs` that are in the table for `EngineArgs`."""


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(unserved_arguments, "_told", set())


class Something:
    """A value that asks for something."""


def other_value(entry):
    """Return a value that asks for something."""
    return not entry.accepted[0] if isinstance(entry.accepted[0], bool) else Something()


def test_every_option_of_vllm_is_served_or_in_the_table():
    assert set(ENGINE_NAMES.split()) - {"model_weights"} <= FIELDS | set(ENGINE_ARGUMENTS)
    assert FIELDS & set(ENGINE_ARGUMENTS) == OF_CLIENTS, "options that are served need no entry"


def test_every_sampling_parameter_of_vllm_is_served_or_in_the_table():
    assert set(SAMPLING_NAMES.split()) <= {*SamplingParams.__struct_fields__, *SAMPLING_ARGUMENTS}
    assert not set(SamplingParams.__struct_fields__) & set(SAMPLING_ARGUMENTS)


def test_every_pooling_parameter_of_vllm_is_served_or_in_the_table():
    assert set(POOLING_NAMES.split()) <= {*PoolingParams.__struct_fields__, *POOLING_ARGUMENTS}
    assert not set(PoolingParams.__struct_fields__) & set(POOLING_ARGUMENTS)


@pytest.mark.parametrize("call", CALL_NAMES, ids=lambda call: call.__qualname__)
def test_every_argument_of_a_call_is_served_or_in_the_table(call):
    served = inspect.signature(call).parameters
    assert set(CALL_NAMES[call].split()) <= {*served, *CALL_ARGUMENTS}


@pytest.mark.parametrize(("kind", "name"), ENTRIES, ids=str)
def test_default_of_vllm_is_accepted_in_silence(kind, name, caplog):
    for value in (*TABLES[kind][name].accepted, None, {}, [], ""):
        kind(**{name: value})
    assert caplog.records == []


@pytest.mark.parametrize(("kind", "name"), ENTRIES, ids=str)
def test_other_value_is_refused_by_name_or_told_once(kind, name, caplog):
    entry = TABLES[kind][name]
    given = {name: other_value(entry)}
    if not entry.is_harmless:
        with pytest.raises(NotImplementedError, match=rf"^{name}=.* is not served: .{{10}}.*; leave it out$"):
            kind(**given)
        return
    with caplog.at_level(logging.WARNING):
        kind(**given)
        kind(**given)
    [record] = caplog.records
    assert record.message.startswith(f"{name}=")
    assert " has no effect: " in record.message


@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_defaults_of_the_parser_make_the_default_options(kind):
    parser = kind.add_cli_args(argparse.ArgumentParser())
    assert kind(**vars(parser.parse_args([]))) == kind()


@pytest.mark.parametrize("name", sorted(FIELDS - {"seed"}))  # without a seed, each run draws others
def test_none_stands_for_the_default_of_every_option(name):
    assert AsyncEngineArgs(**{name: None}) == AsyncEngineArgs()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"distributed_executor_backend": "uni"}, {"distributed_executor_backend": "mp"}),
        ({"served_model_name": ["mine"]}, {"served_model_name": "mine"}),
        ({"hf_token": True}, {}),
        ({"disable_log_requests": True, "enable_sleep_mode": True}, {"disable_log_requests": True}),
    ],
    ids=str,
)
def test_other_forms_of_values_that_vllm_takes_are_served(given, meant):
    assert AsyncEngineArgs(**given) == AsyncEngineArgs(**meant)


def test_dtype_of_torch_is_a_dtype():
    torch = pytest.importorskip("torch")
    assert AsyncEngineArgs(dtype=torch.float16).dtype == "float16"


def test_several_names_of_a_model_are_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"served_model_name=\['a', 'b'\] is not served"):
        AsyncEngineArgs(served_model_name=["a", "b"])


def test_swap_space_has_no_effect_and_the_log_says_so(caplog):
    AsyncEngineArgs(swap_space=4)
    [record] = caplog.records
    assert record.message.startswith("swap_space=4 has no effect: evicted requests are computed again")


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [(EngineArgs, "max_modle_len", "`max_model_len`"), (SamplingParams, "temprature", "`temperature`")],
)
def test_name_that_vllm_does_not_have_is_a_type_error_with_a_suggestion(kind, name, hint):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; did you mean {hint}"):
        kind(**{name: 1})


def rows_of(table):
    """Return the rows of the page for a table: the arguments by reason."""
    by_reason = {}
    for name, entry in table.items():
        by_reason.setdefault((entry.is_harmless, entry.reason), []).append(f"`{name}`")
    return [
        f"| {', '.join(names)} | {'no effect' if is_harmless else 'refused'}: {reason} |"
        for (is_harmless, reason), names in by_reason.items()
    ]


@pytest.mark.parametrize(
    "table", [ENGINE_ARGUMENTS, SAMPLING_ARGUMENTS, POOLING_ARGUMENTS, CALL_ARGUMENTS, TOKENIZATION_ARGUMENTS]
)
def test_page_lists_every_argument_with_what_happens(table):
    page = PAGE.read_text()
    assert [row for row in rows_of(table) if row not in page] == []


def test_arguments_of_older_calls_are_accepted_at_their_defaults_and_refused_by_name():
    llm = AsyncLLM.__new__(AsyncLLM)
    llm.encode("a", prompt_adapter_request=None)
    with pytest.raises(NotImplementedError, match=r"prompt_adapter_request='a' is not served: .*lora_request"):
        llm.encode("a", prompt_adapter_request="a")
    with pytest.raises(NotImplementedError, match=r"guided_options_request=.* is not served: give structured_outputs"):
        LLM.generate(object.__new__(LLM), ["a"], guided_options_request={"a": 1})


def test_adapter_in_the_fourth_place_of_generate_is_the_adapter():
    given = []

    class Recorder(AsyncLLM):
        def __init__(self):
            pass

        async def add_request(self, *args, **kwargs):
            given.append((args, kwargs))
            raise ValueError("recorded")

    adapter = LoRARequest("a", 1, "/a")
    for call in (lambda llm: llm.generate("p", None, "id", adapter), lambda llm: llm.generate("p", None, "id", "text")):
        with pytest.raises(ValueError, match="recorded"):
            asyncio.run(anext(call(Recorder())))
    named = [inspect.signature(AsyncLLM.add_request).bind(None, *args, **kwargs).arguments for args, kwargs in given]
    assert [(call["lora_request"], call["prompt_text"]) for call in named] == [(adapter, None), (None, "text")]
