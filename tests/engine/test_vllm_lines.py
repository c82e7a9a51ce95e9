"""Lines of programs that were written for vLLM, under its name: each works, or says what to use instead."""

import ast
import asyncio
import importlib
import inspect
import logging
import sys
import types

import pytest

import vllm_mp
from vllm_mp import AsyncEngineArgs, AsyncLLM, as_vllm
from vllm_mp.model_store import DEFAULT_MODEL
from vllm_mp.testing.engines import ENGINE

pytestmark = pytest.mark.usefixtures("forked_cores")


@pytest.fixture(scope="module")
def names(small_model):
    """The names that the lines use: those of vLLM, and an engine of each kind."""
    finders = list(sys.meta_path)
    as_vllm.install()
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(str(small_model), **ENGINE)
    unstarted = AsyncLLM.from_engine_args(AsyncEngineArgs(str(small_model), **ENGINE), start_engine_loop=False)
    found = {name: getattr(vllm, name) for name in vllm_mp.__all__}
    found |= {"vllm": vllm, "llm": llm, "engine": llm.async_llm, "unstarted": unstarted, "logging": logging}
    found |= {"last": _last, "inspect": inspect}
    yield found
    llm.shutdown()
    unstarted.shutdown()
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


async def _last(stream):
    """Return the last output of a stream."""
    return [output async for output in stream][-1]


def result_of(code, names):
    """Run statements, of which the last may be an expression that awaits, and return its value."""
    *statements, last = ast.parse(code).body
    scope = dict(names)
    exec(compile(ast.Module(statements, []), "<line>", "exec"), scope)
    if not isinstance(last, ast.Expr):
        exec(compile(ast.Module([last], []), "<line>", "exec"), scope)
        return None
    value = eval(compile(ast.Expression(last.value), "<line>", "eval", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), scope)
    if not inspect.iscoroutine(value):
        return value
    if "unstarted" in code:
        return asyncio.run(value)
    return names["llm"].thread.run(value)


PARSED = (
    "from vllm.utils import FlexibleArgumentParser\n"
    "EngineArgs(**vars(EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([])))"
)
CREATED = 'SamplingParams(max_tokens=2), "an id"'
SERVED = [
    ("from vllm.utils.async_utils import cancel_task_threadsafe\ncancel_task_threadsafe(None)", None),
    (
        "preprocessor = engine.get_input_preprocessor()\n"
        'list(await (await preprocessor).preprocess_async("a", lora_request=None, prompt_adapter_request=None))',
        ["type", "prompt_token_ids", "prompt"],
    ),
    ("AsyncEngineArgs(disable_log_requests=False).disable_log_requests", False),
    ("AsyncEngineArgs(enable_log_requests=True).disable_log_requests", False),
    (f'engine.shutdown_background_loop()\n(await last(engine.generate("a", {CREATED}))).finished', True),
    ('await unstarted.abort("an id")', None),
    ("await unstarted.check_health()", None),
    ('import torch\nlen(torch.from_numpy((await last(engine.encode("a"))).outputs.data).shape)', 1),
    (f'(await last(engine.generate("a", {CREATED}, None))).prompt', "a"),
    ("inspect.signature(engine.sleep).parameters['mode'].default", "abort"),
    ("await engine.reset_prefix_cache(True, True)", True),
    ("await engine.reset_prefix_cache(vllm.utils.Device.CPU)", True),
    (f"{PARSED}.model == EngineArgs().model", True),
    ("EngineArgs(tokenizer_revision='main', revision='main').revision", "main"),
    ("EngineArgs(enable_sleep_mode=True, max_seq_len_to_capture=8192, optimization_level=2).model", DEFAULT_MODEL),
    ("EngineArgs(task='generate', runner='generate', convert='none').model", DEFAULT_MODEL),
    ("EngineArgs(compilation_config=3, disable_custom_all_reduce=True).model", DEFAULT_MODEL),
    ("EngineArgs(limit_mm_per_prompt={'image': 0}, swap_space=4).model", DEFAULT_MODEL),
    ("EngineArgs(block_size=None, hf_overrides={}, rope_scaling={}).model", DEFAULT_MODEL),
    ("EngineArgs(distributed_executor_backend='uni').distributed_executor_backend", "mp"),
    ("EngineArgs(served_model_name=['a']).served_model_name", "a"),
    ("SamplingParams(thinking_token_budget=None, flat_logprobs=False, skip_clone=True).n", 1),
    (
        "from vllm.distributed import cleanup_dist_env_and_memory, destroy_distributed_environment\n"
        "from vllm.distributed.parallel_state import destroy_model_parallel\n"
        "(destroy_model_parallel(), destroy_distributed_environment(), cleanup_dist_env_and_memory())",
        (None, None, None),
    ),
    ("from vllm.entrypoints.chat_utils import resolve_hf_chat_template, apply_hf_chat_template", None),
    ("from vllm.logprobs import Logprob\nfrom vllm.sequence import Logprob as older\nLogprob is older", True),
    ("from vllm.exceptions import VLLMValidationError\nissubclass(VLLMValidationError, ValueError)", True),
    ("from vllm.tasks import SupportedTask", None),
    ("from vllm.reasoning import ReasoningParser\nfrom vllm.tool_parsers import ToolParser", None),
    ("from vllm.inputs.preprocess import InputPreprocessor as found\nfound is InputPreprocessor", True),
    ("from vllm.transformers_utils.tokenizer import AnyTokenizer, get_tokenizer", None),
    ("from vllm.v1.engine import PauseMode\nfrom typing import get_args\nget_args(PauseMode)[0]", "abort"),
    ("llm.llm_engine.model_config.max_model_len", 1024),
    ("llm.llm_engine.vllm_config is llm.vllm_config", True),
    ("llm.llm_engine.tokenizer is llm.llm_engine.get_tokenizer() is llm.get_tokenizer()", True),
]
"""(what a program says, the value of its last line)."""

REFUSED = [
    ("AsyncLLM(vllm_config=1, executor_class=2, log_stats=True)", NotImplementedError, "from_vllm_config"),
    ('engine.add_logger("x", logging.getLogger())', TypeError, "derive from StatLoggerBase"),
    (f'await last(engine.generate("a", {CREATED}, LoRARequest("l", 1, "/l")))', ValueError, "LoRA is not enabled"),
    ('llm.generate("a", SamplingParams(stop_token_ids=[10**6]))', ValueError, r"stop_token_ids must be in \[0"),
    (f'await last(unstarted.generate("a", {CREATED}))', vllm_mp.EngineDeadError, "start_background_loop"),
    ("EngineArgs(hf_overrides={'a': 1})", NotImplementedError, "config.json"),
    ("EngineArgs(pooler_config={'pooling_type': 'MEAN'})", NotImplementedError, "pooling_type"),
    ("EngineArgs(code_revision='main')", NotImplementedError, "as revision"),
    ("EngineArgs(cpu_offload_gb=4)", NotImplementedError, "cpu_offload_gb=4 is not served: .{10}"),
    (
        "EngineArgs(speculative_config={'method': 'eagle'})",
        NotImplementedError,
        "'eagle' is not served: drafts come from",
    ),
    ("EngineArgs(num_gpu_blocks_override=4)", NotImplementedError, "kv_cache_memory_bytes"),
    ("EngineArgs(logprobs_mode='raw_logits')", NotImplementedError, "logprobs_mode='raw_logits' is not served: .{10}"),
    ("EngineArgs(reasoning_parser='qwen3')", NotImplementedError, "client.answer_parser"),
    ("EngineArgs(model_impl='terratorch')", NotImplementedError, "model_impl='terratorch' is not served: .{10}"),
    ("EngineArgs(kv_offloading_size=4)", NotImplementedError, "kv_offloading_size=4 is not served: .{10}"),
    ("EngineArgs(served_model_name=['a', 'b'])", NotImplementedError, "served_model_name"),
    ("SamplingParams(thinking_token_budget=5)", NotImplementedError, "max_tokens"),
    ("SamplingParams(use_beam_search=True)", NotImplementedError, "n completions"),
    ("SamplingParams(flat_logprobs=True)", NotImplementedError, "list of dicts"),
    ("SamplingParams(repetition_detection={'a': 1})", NotImplementedError, "repetition_penalty"),
    ("SamplingParams(skip_reading_prefix_cache=True)", NotImplementedError, "cache_salt"),
    ("from vllm.platforms import current_platform", ImportError, "the option device"),
    ("import vllm.envs as envs", ImportError, "os.environ"),
    ("from vllm import envs", ImportError, "os.environ"),
    ("from vllm.entrypoints.api_server import app", ImportError, "vllm-mp serve"),
    ("from vllm.entrypoints.openai.api_server import run_server", ImportError, "vllm-mp serve"),
    ("from vllm.entrypoints.chat_utils import parse_chat_messages", ImportError, "AsyncLLM.chat"),
    ("from vllm.utils.print_utils import print_embeddings", ImportError, r"print\(\)"),
    ("from vllm.v1.metrics.reader import Counter", ImportError, "/metrics"),
    ("llm.get_metrics()", NotImplementedError, "/metrics"),
    ("from vllm.executor.executor_base import ExecutorBase", ImportError, "the core runs the model"),
    ("from vllm.sequence import SequenceGroup", ImportError, "RequestOutput"),
    ("from vllm.reasoning import ReasoningParserManager", ImportError, "REASONING_PARSERS"),
    ("from vllm.tool_parsers import ToolParserManager", ImportError, "TOOL_PARSERS"),
    ("from vllm.engine.protocol import StreamingInput", ImportError, "one request for each part"),
    ("from vllm import LLMEngine", ImportError, "use LLM"),
    ("llm.llm_engine.step()", NotImplementedError, "AsyncLLM"),
    ("llm.beam_search(['a'], 1)", NotImplementedError, "cumulative_logprob"),
    *(
        (f"engine.{name}", NotImplementedError, f"AsyncLLM has no {name}: .{{10}}")
        for name in (
            *("set_errored", "engine_step", "process_request_outputs", "run_engine_loop", "log_requests"),
            *("start_engine_loop", "engine", "background_loop", "build_guided_decoding_logits_processor_async"),
        )
    ),
    *(
        (f"AsyncMicrobatchTokenizer(llm.get_tokenizer()).{name}", NotImplementedError, f"has no {name}: .{{10}}")
        for name in ("_loop", "_queues", "_batcher_tasks", "_queue_key")
    ),
]
"""(what a program says, the error, words of the message that say what to use)."""


@pytest.mark.parametrize(("code", "value"), SERVED, ids=[code for code, _ in SERVED])
def test_line_works(names, code, value):
    assert result_of(code, names) == value


@pytest.mark.parametrize(("code", "error", "remedy"), REFUSED, ids=[code for code, *_ in REFUSED])
def test_line_says_what_to_use(names, code, error, remedy):
    with pytest.raises(error, match=remedy):
        result_of(code, names)


def test_names_of_the_other_package_are_the_same_objects(names):
    assert isinstance(names["vllm"], types.ModuleType)
    assert all(names[name] is getattr(vllm_mp, name) for name in vllm_mp.__all__)
