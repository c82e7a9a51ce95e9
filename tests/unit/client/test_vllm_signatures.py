"""`AsyncLLM` has the methods and arguments of vLLM's class, except for differences that are listed with reasons."""

import ast
import inspect
from collections.abc import AsyncGenerator

from vllm_mp import AsyncLLM, EngineClient, UsageContext

NAMES = {"ENGINE_CONTEXT": UsageContext.ENGINE_CONTEXT}

TODAY = """
classmethod from_vllm_config(vllm_config, start_engine_loop=True, usage_context=ENGINE_CONTEXT, stat_loggers=None, \
enable_log_requests=False, aggregate_engine_logging=False, disable_log_stats=False, client_addresses=None, \
client_count=1, client_index=0)
classmethod from_engine_args(engine_args, start_engine_loop=True, usage_context=ENGINE_CONTEXT, stat_loggers=None)
sync shutdown(timeout=None)
async get_supported_tasks()
async add_request(request_id, prompt, params, arrival_time=None, lora_request=None, tokenization_kwargs=None, \
trace_headers=None, priority=0, data_parallel_rank=None, session_id=None, prompt_text=None, reasoning_ended=None, \
reasoning_parser_kwargs=None, kv_hints=None)
generator generate(prompt, sampling_params, request_id, *, prompt_text=None, lora_request=None, \
tokenization_kwargs=None, trace_headers=None, priority=0, data_parallel_rank=None, session_id=None, \
kv_hints=None, reasoning_ended=None, reasoning_parser_kwargs=None)
generator encode(prompt, pooling_params, request_id, lora_request=None, trace_headers=None, priority=0, \
tokenization_kwargs=None, reasoning_ended=None)
async abort(request_id, internal=False)
async notify_kv_transfer_request_rejected(request_id, kv_transfer_params, *, data_parallel_rank=None)
async pause_generation(*, mode="abort", wait_for_inflight_requests=None, clear_cache=True)
async resume_generation()
async is_paused()
property tokenizer
sync get_tokenizer()
async is_tracing_enabled()
async do_log_stats()
async check_health()
async start_profile(profile_prefix=None)
async stop_profile()
async reset_mm_cache()
async reset_prefix_cache(reset_running_requests=False, reset_connector=False)
async reset_encoder_cache()
async sleep(level=1, mode="abort")
async wake_up(tags=None)
async is_sleeping()
async checkpoint_prepare()
async checkpoint_restore()
async add_lora(lora_request)
async remove_lora(lora_id)
async list_loras()
async pin_lora(lora_id)
async collective_rpc(method, timeout=None, args=(), kwargs=None)
async wait_for_requests_to_drain(drain_timeout=300)
async scale_elastic_ep(new_data_parallel_size, drain_timeout=300)
async get_external_elastic_ep_phase()
async handle_fault(fault_tolerance_request)
async get_status()
property is_running
property is_stopped
property errored
property dead_error
property should_keep_api_server_alive
async init_weight_transfer_engine(request)
async start_weight_update()
async start_draft_weight_update()
async update_weights(request)
async finish_weight_update(weight_version=None)
async update_weight_version(new_version)
async get_weight_version()
"""
"""The public names of `vllm.v1.engine.async_llm.AsyncLLM` in vLLM 0.32, without types."""

EARLIER = """
async get_vllm_config()
async get_model_config()
async get_parallel_config()
async get_scheduler_config()
async get_decoding_config()
async get_lora_config()
async get_input_preprocessor()
async get_num_unfinished_requests()
either get_tokenizer(lora_request=None)
either start_background_loop()
either shutdown_background_loop()
either add_logger(logger_name, logger)
either remove_logger(logger_name)
async do_log_stats(scheduler_outputs=None, model_output=None)
async abort_request(request_id)
"""
"""The names of `AsyncLLMEngine` in earlier versions that are no longer in vLLM, or were different."""

SEPARATE_CORES = "each core has the whole model, and shares no layer, expert or cache with others"
NO_TRAINING = "weights are not sent to an engine; load_format and sleep(2) read them from the model's folder again"
DIFFERENCES = {
    "abort(internal)": "an argument for vLLM's own calls",
    "checkpoint_prepare": "a process is not frozen; a template process forks the next one",
    "checkpoint_restore": "a process is not frozen; a template process forks the next one",
    "finish_weight_update": NO_TRAINING,
    "from_vllm_config(client_addresses)": "connect() attaches to a core that runs",
    "from_vllm_config(client_count)": "connect() attaches to a core that runs",
    "from_vllm_config(client_index)": "connect() attaches to a core that runs",
    "from_vllm_config(disable_log_stats=None)": "None: as the configuration says",
    "from_vllm_config(enable_log_requests=None)": "None: as the configuration says",
    "get_external_elastic_ep_phase": SEPARATE_CORES,
    "get_num_unfinished_requests: sync": "the number can be used with and without await",
    "get_status": "core_status() and last_core_status()",
    "get_weight_version": NO_TRAINING,
    "handle_fault": "faults are handled without a call",
    "init_weight_transfer_engine": NO_TRAINING,
    "notify_kv_transfer_request_rejected": SEPARATE_CORES,
    "scale_elastic_ep": SEPARATE_CORES,
    "should_keep_api_server_alive": SEPARATE_CORES,
    "start_draft_weight_update": NO_TRAINING,
    "start_profile(profile_prefix)": "stop_profile() returns the folder of the trace",
    "start_weight_update": NO_TRAINING,
    "update_weight_version": NO_TRAINING,
    "update_weights": NO_TRAINING,
    "wait_for_requests_to_drain(drain_timeout): place": "by keyword; the first argument has the same meaning",
}
"""What a caller of vLLM does not find as it is there, and why."""


def declared(line):
    """Return kind, name and parameters of a line of the tables."""
    kind, _, signature = line.partition(" ")
    if kind == "property":
        return kind, signature, None
    function = ast.parse(f"def {signature}: pass").body[0]
    args = function.args

    def value(node):
        return NAMES[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)

    defaults = [inspect.Parameter.empty] * (len(args.args) - len(args.defaults)) + list(map(value, args.defaults))
    parameters = [
        inspect.Parameter(arg.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for arg, default in zip(args.args, defaults, strict=True)
    ]
    parameters += [
        inspect.Parameter(arg.arg, inspect.Parameter.KEYWORD_ONLY, default=value(default))
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return kind, function.name, parameters


def kind_of(member):
    """Return the kind of an attribute of a class, as the tables call it."""
    if isinstance(member, property):
        return "property"
    if isinstance(member, classmethod):
        return "classmethod"
    if inspect.iscoroutinefunction(member):
        return "async"
    result = str(inspect.signature(member).return_annotation)
    return "generator" if AsyncGenerator.__name__ in result else "sync"


def differences(line):
    """Return what calls of the method in `line` would not find in `AsyncLLM`."""
    kind, name, expected = declared(line)
    member = inspect.getattr_static(AsyncLLM, name, None)
    if member is None:
        return [name]
    own_kind = kind_of(member)
    found = [] if own_kind == kind or (kind == "either" and own_kind == "sync") else [f"{name}: {own_kind}"]
    if expected is None or own_kind == "property":
        return found
    own = list(inspect.signature(getattr(AsyncLLM, name)).parameters.values())[kind != "classmethod" :]
    by_name = {parameter.name: parameter for parameter in own}
    for place, parameter in enumerate(expected):
        mine = by_name.get(parameter.name)
        if mine is None:
            found.append(f"{name}({parameter.name})")
        elif parameter.kind == parameter.POSITIONAL_OR_KEYWORD and (
            own.index(mine) != place or mine.kind == mine.KEYWORD_ONLY
        ):
            found.append(f"{name}({parameter.name}): place")
        elif mine.default != parameter.default and parameter.default is not parameter.empty:
            found.append(f"{name}({parameter.name}={mine.default!r})")
    known = {parameter.name for parameter in expected}
    found += [f"{name}({each.name}): required" for each in own if each.name not in known and each.default is each.empty]
    return found


def test_every_difference_from_vllm_is_listed_with_a_reason():
    found = [each for line in filter(None, (TODAY + EARLIER).splitlines()) for each in differences(line)]
    assert sorted(found) == sorted(DIFFERENCES)


def test_engine_client_asks_for_nothing_that_vllm_s_interface_does_not_have():
    known = {declared(line)[1] for line in TODAY.strip().splitlines()}
    assert known >= EngineClient.__abstractmethods__


def test_async_llm_is_an_engine_client():
    assert issubclass(AsyncLLM, EngineClient)
    assert not AsyncLLM.__abstractmethods__
