"""Calls as programs for vLLM write them: arguments by position, integer ids, names of older and newer versions."""

import asyncio
import inspect
import logging
import os
import signal

import pytest

import vllm_mp
from vllm_mp import (
    AsyncLLM,
    DuplicateRequestIdError,
    EngineDeadError,
    EngineError,
    EngineGenerateError,
    EngineStartError,
    InputPreprocessor,
    LoRARequest,
    NotOperatorError,
    PoolingParams,
    SamplingParams,
)
from vllm_mp.arguments.worker_arguments import pack_arguments
from vllm_mp.testing.engines import answer, eventually, greedy, rest

pytestmark = pytest.mark.usefixtures("forked_cores")

PROMPT = "The capital of France is"
LAST = ["trace_headers", "priority", "data_parallel_rank", "session_id"]
POSITIONAL = {
    "generate": [
        *("prompt", "sampling_params", "request_id", "prompt_text", "lora_request", "tokenization_kwargs", *LAST),
        *("kv_hints", "reasoning_ended", "reasoning_parser_kwargs"),
    ],
    "encode": [
        *("prompt", "pooling_params", "request_id", "lora_request", "trace_headers", "priority"),
        *("tokenization_kwargs", "reasoning_ended"),
    ],
    "add_request": [
        *("request_id", "prompt", "params", "arrival_time", "lora_request", "tokenization_kwargs", *LAST),
        *("prompt_text", "reasoning_ended", "reasoning_parser_kwargs", "kv_hints"),
    ],
    "from_engine_args": ["engine_args", "start_engine_loop", "usage_context", "stat_loggers"],
    "from_vllm_config": [
        *("vllm_config", "start_engine_loop", "usage_context", "stat_loggers", "enable_log_requests"),
        *("aggregate_engine_logging", "disable_log_stats"),
    ],
    "collective_rpc": ["method", "timeout", "args", "kwargs"],
    "do_log_stats": ["scheduler_outputs", "model_output"],
}
"""The order of the arguments of vLLM 0.32's `AsyncLLM`; where that class takes one by name only, its place there."""


@pytest.mark.parametrize("name", POSITIONAL)
def test_arguments_come_by_position_in_the_order_of_vllm(name):
    parameters = [
        parameter.name
        for parameter in inspect.signature(getattr(AsyncLLM, name)).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.name != "self"
    ]
    assert parameters == POSITIONAL[name]


def test_later_arguments_have_the_same_effect_by_position_as_by_name(llm):
    ids = llm.get_tokenizer()(PROMPT).input_ids
    words = {"truncation": True, "max_length": 2}

    async def run():
        expected = await answer(llm, ids[:2], greedy(4))
        by_position = [
            output async for output in llm.generate(PROMPT, greedy(4), None, "its text", None, words, {}, 0, 0)
        ]
        assert by_position[-1].prompt_token_ids == ids[:2]
        assert by_position[-1].prompt == "its text"
        assert by_position[-1].outputs == expected.outputs
        added = await llm.add_request(None, PROMPT, greedy(4), 5.0, None, words, {}, 0, 0, None, "its text")
        output = [output async for output in added][-1]
        assert (output.prompt, output.prompt_token_ids, output.metrics.arrival_time) == ("its text", ids[:2], 5.0)
        vectors = [output async for output in llm.encode(PROMPT, PoolingParams(), None, None, {}, 0, words)]
        assert vectors[-1].prompt_token_ids == ids[:2]

    asyncio.run(run())


def test_integer_names_a_request_by_its_digits(llm):
    async def run():
        stream = llm.generate(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True), 0)
        assert (await anext(stream)).request_id == "0"
        for taken in (0, "0"):
            with pytest.raises(DuplicateRequestIdError, match="'0' is in use"):
                await answer(llm, PROMPT, greedy(2), taken)
        await llm.abort(0)
        assert (await rest(stream)).finish_reason == "abort"
        streams = [llm.generate(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True), number) for number in (1, 2)]
        for stream in streams:
            await anext(stream)
        await llm.abort_request([1, "2"])
        assert [(await rest(stream)).finish_reason for stream in streams] == ["abort", "abort"]
        async with llm.stream_group() as group:
            assert await group.add(PROMPT, greedy(2), 7) == "7"
            with pytest.raises(DuplicateRequestIdError):
                await group.add(PROMPT, greedy(2), "7")
            assert [[output.request_id for output in outputs] async for outputs in group] == [["7"]]
        for wrong in (True, 1.0, b"1"):
            with pytest.raises(TypeError, match="request_id must be a str or an int"):
                await llm.abort([wrong])

    asyncio.run(run())


@pytest.mark.parametrize(
    "error", [EngineError, EngineStartError, EngineDeadError, EngineGenerateError, NotOperatorError]
)
def test_errors_of_the_engine_are_runtime_errors(error):
    assert issubclass(error, RuntimeError)
    assert str(error("why")) == "why"


def test_error_of_a_duplicate_id_is_a_value_error_and_a_key_error_and_shows_its_message_unquoted():
    error = DuplicateRequestIdError("it is in use")
    assert isinstance(error, ValueError)
    assert isinstance(error, KeyError)
    assert str(error) == "it is in use"


def test_calls_of_older_and_newer_versions_bind(llm, caplog):
    async def run():
        await llm.do_log_stats(object(), [])
        await llm.reset_mm_cache()
        await llm.reset_encoder_cache()
        assert await llm.reset_prefix_cache() is True
        assert await llm.wake_up() is True
        assert await llm.get_supported_tasks() == ("generate", "embed")
        assert not await llm.is_tracing_enabled()
        assert llm.get_num_unfinished_requests() == await llm.get_num_unfinished_requests() == 0
        await llm.wait_for_requests_to_drain(drain_timeout=60)

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    assert "live requests" in caplog.text


def test_method_of_the_worker_is_called_by_name_and_its_result_is_in_a_list(llm):
    async def run():
        (count,) = await llm.collective_rpc("get_num_parameters")
        assert count == 6_353_216
        (info,) = await llm.collective_rpc("get_model_info")
        assert info["num_parameters"] == count
        assert (info["hidden_size"], info["vocab_size"], info["max_model_len"]) == (64, 49152, 1024)
        (block,) = await llm.collective_rpc("get_cache_block_size_bytes")
        assert block == 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, dimensions, bytes
        assert await llm.collective_rpc("get_kv_cache_bytes", 10.0, (17,)) == [2 * block]
        assert await llm.collective_rpc("get_kv_cache_bytes", kwargs={"num_tokens": 16}) == [block]
        (memory,) = await llm.collective_rpc("get_memory_info")
        assert memory["kv_cache_bytes"] == (await llm.get_vllm_config()).cache_config.num_blocks * block
        assert min(memory["process_bytes"], memory["free_bytes"]) > 2**20
        assert await llm.collective_rpc("get_supported_tasks") == [["generate", "embed"]]
        assert await llm.collective_rpc("check_health") == [None]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "args", "words"),
    [
        ("no_such", (), "no public method 'no_such'.*get_num_parameters"),
        ("call", (), "no public method 'call'"),
        ("_config", (), "no public method '_config'"),
        ("__class__", (), "no public method '__class__'"),
        ("METHODS", (), "no public method"),
        ("x" * 10**6, (), "no public method 'xxx"),
        ("check_health", (1,), "check_health: too many positional arguments"),
        ("get_kv_cache_bytes", (), "get_kv_cache_bytes: missing a required argument: 'num_tokens'"),
        ("get_kv_cache_bytes", ("many",), "num_tokens must be an integer"),
        ("get_kv_cache_bytes", (-1,), "num_tokens must be an integer"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_call_of_a_worker_that_cannot_work_is_refused_by_name_and_the_core_goes_on(llm, method, args, words):
    async def run():
        pid = (await llm.core_status())["pid"]
        with pytest.raises(EngineError, match=words):
            await llm.collective_rpc(method, args=args)
        assert (await llm.core_status())["pid"] == pid

    asyncio.run(run())


def test_only_names_and_plain_data_reach_the_worker(llm):
    async def run():
        for method in (lambda worker: worker, len, 3):
            with pytest.raises(TypeError, match="method must be the name of a worker's method"):
                await llm.collective_rpc(method)
        for args in ((object(),), (b"x",), ({1, 2},), "text", 3):
            with pytest.raises(TypeError, match="args"):
                await llm.collective_rpc("check_health", args=args)
        with pytest.raises(TypeError, match="kwargs"):
            await llm.collective_rpc("check_health", kwargs=[1])
        with pytest.raises(ValueError, match="too large"):
            await llm.collective_rpc("check_health", args=("x" * 2**17,))
        with pytest.raises(ValueError, match="not JSON compliant"):
            await llm.collective_rpc("check_health", args=(float("nan"),))
        with pytest.raises(TimeoutError, match=r"collective_rpc\('check_health'\) has not .* timeout=1e-09 s; raise"):
            await llm.collective_rpc("check_health", 1e-9)
        for timeout in (0.0, -1, float("nan"), True, "1"):
            with pytest.raises(ValueError, match=f"timeout must be a number of seconds above 0.*got {timeout!r}"):
                await llm.collective_rpc("check_health", timeout)
        for packed in ("", "{}", "[[]]", "[[], []]", '[[], {"a": ' + "[" * 60_000, 3, None, pack_arguments((), {}) * 2):
            with pytest.raises(EngineError, match="the arguments must be JSON"):
                await llm.cores.call("collective_rpc", None, "check_health", packed)
        assert await llm.collective_rpc("check_health") == [None]

    asyncio.run(run())


def test_input_preprocessor_makes_a_prompt_that_has_the_token_ids_of_generate(llm):
    async def run():
        preprocessor = await llm.get_input_preprocessor()
        assert isinstance(preprocessor, InputPreprocessor)
        ids = (await answer(llm, PROMPT, greedy(3))).prompt_token_ids
        long = "word " * 500
        assert preprocessor.preprocess(PROMPT) == {"type": "token", "prompt_token_ids": ids, "prompt": PROMPT}
        salted = {"prompt": PROMPT, "cache_salt": "mine"}
        assert preprocessor.preprocess(salted)["cache_salt"] == "mine"
        assert preprocessor.preprocess(ids[:2]) == {"type": "token", "prompt_token_ids": ids[:2]}
        rare = {"truncation": True, "max_length": 2, "padding": False}
        for prompt, words in (
            (PROMPT, {}),
            (long, {}),
            (PROMPT, {"truncation": True, "max_length": 2}),
            (PROMPT, rare),
        ):
            made = preprocessor.preprocess(prompt, words)
            assert made == await preprocessor.preprocess_async(prompt, words)
            assert made["prompt_token_ids"] == llm.get_tokenizer()(prompt, **words).input_ids
            output = await answer(llm, made, greedy(1))
            assert (output.prompt, output.prompt_token_ids) == (prompt, made["prompt_token_ids"])
        for wrong, words in (
            ("word " * 5000, "max_model_len=1024"),
            ([1] * 1025, "too long"),
            ({}, "neither"),
            ({"prompt_embeds": [[0.0]]}, "no token ids"),
        ):
            with pytest.raises(ValueError, match=words):
                preprocessor.preprocess(wrong)
            with pytest.raises(ValueError, match=words):
                await preprocessor.preprocess_async(wrong)
        with pytest.raises(ValueError, match="LoRA is not enabled"):
            preprocessor.preprocess(PROMPT, None, LoRARequest("mine", 1, "/adapters/mine"))
        with pytest.raises(NotImplementedError, match="'multimodal'"):
            preprocessor.preprocess({"type": "multimodal", "prompt_token_ids": [1]})
        with pytest.raises(ValueError, match=r"truncate_prompt_tokens=2 is for generate\(\) and encode\(\)"):
            preprocessor.preprocess(PROMPT, {"truncate_prompt_tokens": 2})

    asyncio.run(run())


def test_waiting_requests_of_a_client_run_by_arrival_time_also_after_the_core_is_killed(make_small_engine):
    engine = make_small_engine(max_num_seqs=1, max_model_len=128)

    async def run():
        await engine.pause_generation("keep")
        ended = []

        async def use(arrival_time):
            stream = await engine.add_request(None, PROMPT, greedy(3), arrival_time)
            await rest(stream)
            ended.append(arrival_time)

        tasks = [asyncio.create_task(use(float(arrival_time))) for arrival_time in (5, 3, 9, 1)]

        async def wait_in_the_core():
            return (await engine.core_status())["num_waiting"] == 4

        await eventually(wait_in_the_core)
        os.kill((await engine.core_status())["pid"], signal.SIGKILL)
        await eventually(wait_in_the_core)
        await engine.resume_generation()
        await asyncio.gather(*tasks)
        assert ended == [1, 3, 5, 9]

    asyncio.run(run())


def test_every_public_name_can_be_imported():
    for name in vllm_mp.__all__:
        assert getattr(vllm_mp, name) is not None
    sections = {"ModelConfig", "CacheConfig", "SchedulerConfig", "ParallelConfig", "LoRAConfig", "DecodingConfig"}
    assert sections | {"TextPrompt", "TokensPrompt", "PromptType", "UsageContext"} <= set(vllm_mp.__all__)


def test_pause_waits_for_requests_under_its_older_argument_too(llm):
    async def run():
        request = asyncio.create_task(answer(llm, PROMPT, greedy(40, ignore_eos=True)))

        async def runs():
            return (await llm.core_status())["num_running"] == 1

        await eventually(runs)
        await llm.pause_generation(wait_for_inflight_requests=True)
        is_paused = await llm.is_paused()
        await llm.resume_generation()
        return is_paused, (await request).outputs[0].finish_reason

    assert asyncio.run(run()) == (True, "length")


def test_engine_says_what_its_model_can(llm, encoder):
    assert asyncio.run(llm.get_supported_tasks()) == ("generate", "embed")
    assert asyncio.run(encoder.get_supported_tasks()) == ("embed",)


def test_rank_beyond_the_only_core_is_out_of_range(llm):
    with pytest.raises(ValueError, match="data_parallel_rank=1: one core"):
        asyncio.run(answer_of_rank(llm, 1))
    assert asyncio.run(answer_of_rank(llm, 0)).finished


async def answer_of_rank(llm, rank):
    async for output in llm.generate(PROMPT, greedy(2), data_parallel_rank=rank):
        last = output
    return last
