"""Modules under the names that programs import from vLLM: what they have is what `vllm_mp` has."""

import importlib
import socket
import sys
import types
import uuid

import pytest

import vllm_mp
from vllm_mp import errors
from vllm_mp.arguments import unserved_names
from vllm_mp.client.prompts import tokenizer
from vllm_mp.model_store import cache_root

PUBLIC = {
    "engine.arg_utils": ["AsyncEngineArgs", "EngineArgs"],
    "engine.async_llm_engine": ["AsyncEngineArgs", "AsyncEngineDeadError", "AsyncLLMEngine"],
    "engine.protocol": ["EngineClient"],
    "entrypoints.llm": ["LLM"],
    "inputs": ["EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"],
    "inputs.preprocess": ["InputPreprocessor"],
    "logprobs": ["Logprob"],
    "sequence": ["Logprob", "RequestMetrics"],
    "inputs.data": ["EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"],
    "lora.request": ["LoRARequest"],
    "usage.usage_lib": ["UsageContext"],
    "utils.async_utils": ["AsyncMicrobatchTokenizer"],
    "v1.engine.async_llm": ["AsyncEngineArgs", "AsyncLLM"],
    "v1.metrics.loggers": ["LoggingStatLogger", "PrometheusStatLogger", "StatLoggerBase"],
    "v1.metrics.stats": ["IterationStats", "SchedulerStats"],
    "v1.engine.exceptions": ["EngineDeadError", "EngineGenerateError"],
    "version": ["__version__"],
    # Modules that have the same name in both packages.
    "config": ["CacheConfig", "LoRAConfig", "ModelConfig", "ParallelConfig", "SchedulerConfig", "VllmConfig"],
    "outputs": [
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "PoolingOutput",
        "PoolingRequestOutput",
        "RequestOutput",
    ],
    "pooling_params": ["PoolingParams"],
    "sampling_params": ["RequestOutputKind", "SamplingParams"],
}
"""The names of `vllm_mp` that each module has too."""
HELPERS = {
    "distributed": ["cleanup_dist_env_and_memory", "destroy_distributed_environment", "destroy_model_parallel"],
    "distributed.parallel_state": [
        "cleanup_dist_env_and_memory",
        "destroy_distributed_environment",
        "destroy_model_parallel",
    ],
    "engine.metrics_types": ["StatLoggerBase", "Stats"],
    "logger": ["init_logger"],
    "logits_processor": [
        "AdapterLogitsProcessor",
        "BatchUpdate",
        "LogitsProcessor",
        "MoveDirectionality",
        "RequestLogitsProcessor",
        "process_dict_updates",
    ],
    "entrypoints.chat_utils": ["apply_hf_chat_template", "load_chat_template", "resolve_hf_chat_template"],
    "exceptions": ["VLLMValidationError"],
    "reasoning": ["ReasoningParser"],
    "tasks": ["GenerationTask", "PoolingTask", "SupportedTask"],
    "tokenizers": ["TokenizerLike", "cached_get_tokenizer", "get_tokenizer"],
    "tool_parsers": ["ToolParser"],
    "transformers_utils.tokenizer": ["AnyTokenizer", "get_tokenizer"],
    "sampling_params": ["SamplingType"],
    "utils": [
        "Counter",
        "Device",
        "FlexibleArgumentParser",
        "collect_from_async_generator",
        "get_ip",
        "get_open_port",
        "in_loop",
        "make_async",
        "merge_async_iterators",
        "random_uuid",
    ],
    "utils.argparse_utils": ["FlexibleArgumentParser"],
    "utils.counter": ["Counter"],
    "utils.network_utils": ["get_ip", "get_open_port"],
    "utils.async_utils": [
        "P",
        "T",
        "cancel_task_threadsafe",
        "collect_from_async_generator",
        "in_loop",
        "make_async",
        "merge_async_iterators",
        "run_in_loop",
    ],
    "v1.sample.logits_processor": [
        "AdapterLogitsProcessor",
        "BatchUpdate",
        "LogitsProcessor",
        "MoveDirectionality",
        "RequestLogitsProcessor",
    ],
    "v1.sample.logits_processor.builtin": ["process_dict_updates"],
    "v1.sample.logits_processor.interface": ["BatchUpdate", "LogitsProcessor", "MoveDirectionality"],
    "v1.engine": ["FinishReason", "PauseMode"],
    "v1.metrics.loggers": ["AggregateStatLoggerBase", "StatLoggerFactory"],
    "v1.metrics.stats": ["FinishedRequestStats", "MultiModalCacheStats", "PrefixCacheStats"],
}
"""Names that `vllm_mp` itself does not have."""
REFUSED = [
    ("", "LLMEngine"),
    ("", "ModelRegistry"),
    ("", "StreamingInput"),
    ("config", "CompilationConfig"),
    ("config", "CUDAGraphMode"),
    ("config", "get_current_vllm_config"),
    ("config", "KVTransferConfig"),
    ("config", "PoolerConfig"),
    ("config", "WeightTransferConfig"),
    ("entrypoints.chat_utils", "parse_chat_messages"),
    ("exceptions", "VLLMNotFoundError"),
    ("reasoning", "ReasoningParserManager"),
    ("tool_parsers", "ToolParserManager"),
    ("v1.engine", "EngineCoreOutputs"),
    ("", "initialize_ray_cluster"),
    ("distributed", "get_tensor_model_parallel_rank"),
    ("engine.async_llm_engine", "AsyncStream"),
    ("engine.async_llm_engine", "ENGINE_ITERATION_TIMEOUT_S"),
    ("engine.async_llm_engine", "RequestTracker"),
    ("engine.async_llm_engine", "STOP_ITERATION"),
    ("engine.async_llm_engine", "_AsyncLLMEngine"),
    ("engine.llm_engine", "LLMEngine"),
    ("engine.protocol", "StreamingInput"),
    ("inputs", "SingletonPrompt"),
    ("inputs", "token_inputs"),
    ("logprobs", "FlatLogprobs"),
    ("sampling_params", "RepetitionDetectionParams"),
    ("sequence", "SequenceGroup"),
    ("utils", "cdiv"),
    ("utils", "is_list_of"),
    ("v1.engine", "EngineCoreRequest"),
    ("v1.engine.llm_engine", "LLMEngine"),
    ("v1.engine.output_processor", "OutputProcessor"),
    ("v1.engine.output_processor", "RequestOutputCollector"),
    ("v1.metrics.loggers", "AggregatedLoggingStatLogger"),
    ("v1.metrics.loggers", "PerEngineStatLoggerAdapter"),
]


def module(name):
    return importlib.import_module(f"vllm_mp.{name}" if name else "vllm_mp")


@pytest.mark.parametrize("name", PUBLIC)
def test_module_has_the_names_of_the_package_itself(name):
    for each in PUBLIC[name]:
        assert getattr(module(name), each) is getattr(vllm_mp, each), each


@pytest.mark.parametrize("name", HELPERS)
def test_helper_is_the_same_in_every_module(name):
    for each in HELPERS[name]:
        others = [module(other) for other, names in HELPERS.items() if each in names]
        assert all(getattr(other, each) is getattr(module(name), each) for other in others), each


@pytest.mark.parametrize(("name", "refused"), REFUSED)
def test_name_that_is_not_served_says_what_to_use(name, refused):
    with pytest.raises(ImportError, match=f"{refused} of vLLM is not in vllm_mp: .{{10}}"):
        getattr(module(name), refused)


@pytest.mark.parametrize("name", [*unserved_names.MODULES, "entrypoints.openai.api_server", "model_executor.layers.x"])
def test_module_that_is_not_served_says_what_to_use(name):
    listed = name if name in unserved_names.MODULES else name.rpartition(".")[0]
    said = f"the module {listed.removesuffix('.layers')} of vLLM is not in vllm_mp: .{{8}}"
    with pytest.raises(ImportError, match=said):
        module(name)
    parent, _, last = f"vllm_mp.{name}".rpartition(".")
    if parent in sys.modules:
        with pytest.raises(ImportError, match=said):
            exec(f"from {parent} import {last}")
    assert f"vllm_mp.{name}" not in sys.modules


def test_module_that_vllm_does_not_have_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'vllm_mp\.no_such_module'"):
        module("no_such_module")


def test_functions_that_clean_up_can_be_called():
    distributed = module("distributed")
    assert distributed.cleanup_dist_env_and_memory(shutdown_ray=True) is None
    assert distributed.destroy_model_parallel() is distributed.destroy_distributed_environment() is None


REFUSED_ATTRIBUTES = [
    *((vllm_mp.AsyncLLM, name) for name in ("set_errored", "engine_step", "process_request_outputs", "engine")),
    *((vllm_mp.AsyncLLM, name) for name in ("run_engine_loop", "log_requests", "start_engine_loop", "background_loop")),
    (vllm_mp.AsyncLLM, "build_guided_decoding_logits_processor_async"),
    *((kind, name) for kind in (vllm_mp.AsyncLLM, vllm_mp.LLM) for name in ("renderer", *unserved_names.WEIGHT_CALLS)),
    (vllm_mp.AsyncLLM, "scale_elastic_ep"),
    *((vllm_mp.AsyncMicrobatchTokenizer, name) for name in ("_loop", "_queues", "_batcher_tasks", "_queue_key")),
]


@pytest.mark.parametrize(("kind", "name"), REFUSED_ATTRIBUTES, ids=str)
def test_attribute_that_is_not_served_says_what_to_use(kind, name):
    owner = object.__new__(kind)
    assert not hasattr(owner, name)
    with pytest.raises(NotImplementedError, match=f"{kind.__name__} has no {name}: .{{10}}"):
        getattr(owner, name)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = owner.no_such_name


def test_constructor_of_vllm_s_class_says_what_to_call():
    with pytest.raises(NotImplementedError, match=r"AsyncLLM\(executor_class=\.\.\.\).*from_vllm_config"):
        vllm_mp.AsyncLLM(vllm_config=1, executor_class=2, log_stats=True)


def test_inner_engine_of_llm_has_its_configuration_and_says_what_to_use_for_the_rest():
    llm = object.__new__(vllm_mp.LLM)
    llm.async_llm = types.SimpleNamespace(
        vllm_config=types.SimpleNamespace(model_config="model"),
        tokenizer="tokenizer",
        get_tokenizer=lambda: "tokenizer",
    )
    inner = llm.llm_engine
    assert (inner.model_config, inner.tokenizer, inner.get_tokenizer()) == ("model", "tokenizer", "tokenizer")
    with pytest.raises(NotImplementedError, match="LLMEngine has no step: the core runs its own steps"):
        _ = inner.step


def test_parameters_of_beam_search_can_be_imported_but_not_made():
    with pytest.raises(NotImplementedError, match="ask for"):
        module("sampling_params").BeamSearchParams(3, 16)


@pytest.mark.parametrize("name", sorted({name for name, _ in REFUSED}))
def test_name_that_no_module_has_is_an_attribute_error(name):
    assert not hasattr(module(name), "no_such_name")


def test_dead_error_of_the_older_name_is_the_error_that_streams_raise():
    assert module("engine.async_llm_engine").AsyncEngineDeadError is errors.EngineDeadError


def test_ids_are_hexadecimal_and_differ():
    made = {vllm_mp.utils.random_uuid() for _ in range(100)}
    assert len(made) == 100
    assert all(uuid.UUID(hex=each).hex == each for each in made)


def test_counter_gives_numbers_in_order_until_it_is_reset():
    counter = vllm_mp.utils.Counter(5)
    assert [next(counter), next(counter)] == [5, 6]
    counter.reset()
    assert next(counter) == 0


def test_open_ports_differ_and_can_be_bound(monkeypatch):
    ports = module("utils.network_utils").get_open_ports_list(3)
    assert len(set(ports)) == 3
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", vllm_mp.utils.get_open_port()))
    assert len(vllm_mp.utils.get_ip().split(".")) == 4
    monkeypatch.setenv("VLLM_HOST_IP", "10.1.2.3")
    assert vllm_mp.utils.get_ip() == "10.1.2.3"


def test_sampling_type_says_how_tokens_are_chosen():
    kinds = module("sampling_params").SamplingType
    for fields, kind in (({"temperature": 0, "seed": 1}, "GREEDY"), ({}, "RANDOM"), ({"seed": 1}, "RANDOM_SEED")):
        assert vllm_mp.SamplingParams(**fields).sampling_type is kinds[kind]


def test_logger_has_the_name_of_the_module():
    assert module("logger").init_logger("my.module").name == "my.module"


def test_tokenizer_is_loaded_by_the_name_of_a_model(default_model):
    loaded = module("tokenizers").get_tokenizer(str(default_model))
    own = tokenizer.load_tokenizer(default_model, cache_dir=cache_root())
    assert loaded("Once upon a time").input_ids == own("Once upon a time").input_ids
    cached = module("tokenizers").cached_get_tokenizer
    assert cached(str(default_model)) is cached(str(default_model))


@pytest.mark.parametrize("flags", [["--max_model_len", "77"], ["--max-model-len=77"], ["--max_model_len=77"]])
def test_flags_may_be_spelled_with_underscores(flags):
    arg_utils, utils = module("engine.arg_utils"), module("utils")
    parser = arg_utils.AsyncEngineArgs.add_cli_args(utils.FlexibleArgumentParser())
    parser.add_argument("--own_flag")
    args = parser.parse_args([*flags, "--own_flag", "a_b", "--served_model_name=with_underscores"])
    assert (args.max_model_len, args.own_flag, args.served_model_name) == (77, "a_b", "with_underscores")
    assert arg_utils.AsyncEngineArgs.from_cli_args(args).max_model_len == 77


def test_parser_checks_that_a_flag_is_a_port(capsys):
    parser = module("utils").FlexibleArgumentParser()
    parser.add_argument("--port", type=parser.check_port, default=8000)
    assert [parser.parse_args(flags).port for flags in ([], ["--port", "8001"])] == [8000, 8001]
    for value in ("80", "65536", "-1", "http", "9" * 5000):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--port={value}"])
        assert "argument --port: a port must be an integer in [1024, 65536), got " in capsys.readouterr().err
