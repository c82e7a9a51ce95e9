"""A sleeping engine frees memory, generates nothing, loses no request and still answers calls."""

import asyncio
import re
import signal

import psutil
import pytest
from support.engine_fixtures import SLOW_STEPS
from transformers import LlamaConfig

from vllm_mp import AsyncLLM, EngineDeadError, EngineError, PoolingParams, SamplingParams
from vllm_mp.testing.engines import (
    answer,
    eventually,
    greedy,
    is_empty,
    num_waiting_is,
    rest,
    running_engine,
    standalone_core,
)
from vllm_mp.testing.random_models import save_config

pytestmark = pytest.mark.usefixtures("forked_programs")

PROMPT = "The quick brown fox"
MIB = 2**20


@pytest.fixture
def engine(llm):
    yield llm
    asyncio.run(llm.wake_up())
    asyncio.run(llm.resume_generation())
    asyncio.run(eventually(lambda: is_empty(llm)))


def streaming(llm, max_tokens=60, request_id=None, **params):
    return llm.generate(PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params), request_id)


@pytest.mark.essential
@pytest.mark.parametrize("level", [1, 2])
def test_streams_continue_unchanged_after_wake_up(engine, level):
    kinds = ({"temperature": 0}, {"temperature": 0.9, "seed": 7, "presence_penalty": 0.5})

    async def run():
        expected = [(await rest(streaming(engine, **kind))).token_ids for kind in kinds]
        streams = [streaming(engine, **kind) for kind in kinds]
        for stream in streams:
            await anext(stream)
        await engine.sleep(level, mode="keep")
        status = await engine.core_status()
        assert (status["is_sleeping"], status["sleep_level"], status["is_paused"]) == (True, level, False)
        assert status["free_blocks"] == status["total_blocks"]
        later = [asyncio.create_task(rest(streaming(engine, **kind))) for kind in kinds]
        (vector,) = [asyncio.create_task(anext(engine.encode(PROMPT, PoolingParams())))]
        await eventually(num_waiting_is(engine, 5))
        assert (await engine.core_status())["step"] == status["step"]
        assert not await engine.wake_up(["weights"])
        assert await engine.is_sleeping()
        assert await engine.wake_up(["kv_cache"])
        assert not await engine.is_sleeping()
        assert (await engine.core_status())["total_blocks"] == status["total_blocks"]
        assert [(await rest(stream)).token_ids for stream in streams] == expected
        assert [(await task).token_ids for task in later] == expected
        assert (await vector).finished

    asyncio.run(run())


def test_sleeping_engine_carries_out_aborts_pauses_and_other_calls(engine):
    async def run():
        stream = streaming(engine, request_id="held")
        await anext(stream)
        await engine.sleep(mode="keep")
        await engine.check_health()
        await engine.reset_prefix_cache()
        late = await engine.add_request("late", PROMPT, greedy(5))
        await eventually(num_waiting_is(engine, 2))
        await engine.pause_generation("keep")
        await engine.resume_generation()
        assert await engine.is_sleeping()
        assert (await engine.core_status())["num_waiting"] == 2
        await engine.abort(["held", "late"])
        assert (await rest(stream)).finish_reason == "abort"
        assert (await rest(late)).finish_reason == "abort"
        await engine.sleep(mode="abort")
        await engine.wake_up()
        await engine.wake_up()
        assert len((await answer(engine, PROMPT, greedy(5, ignore_eos=True))).outputs[0].token_ids) == 5

    asyncio.run(run())


def test_encoder_returns_the_same_vectors_after_a_sleep(encoder):
    async def run():
        expected = await anext(encoder.encode(PROMPT))
        await encoder.sleep(2, mode="keep")
        held = asyncio.create_task(anext(encoder.encode(PROMPT)))
        await eventually(num_waiting_is(encoder, 1))
        await encoder.wake_up()
        assert (await held).outputs.data.tolist() == expected.outputs.data.tolist()

    asyncio.run(run())


def test_sleep_in_mode_abort_ends_the_streams(engine):
    async def run():
        stream = streaming(engine)
        await anext(stream)
        await engine.sleep(mode="abort")
        assert (await rest(stream)).finish_reason == "abort"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.sleep(0), "level must be 1, .* or 2, .* got 0"),
        (lambda llm: llm.sleep(True), "level must be 1, .* got True"),
        (lambda llm: llm.sleep("1"), "level must be 1, .* got '1'"),
        (
            lambda llm: llm.sleep(1, "wait"),
            r"mode must be one of keep, abort, got 'wait'; .*pause_generation\('wait'\)",
        ),
        (lambda llm: llm.wake_up("weights"), "tags must be a list of weights and kv_cache, or None .*'weights'"),
        (lambda llm: llm.wake_up([]), r"tags must be a list .* got \[\]"),
        (lambda llm: llm.wake_up(["weights", "scheduling"]), "tags must be a list .*'scheduling'"),
        (lambda llm: llm.wake_up([["weights"]]), r"tags must be a list .* got \['weights'\]"),
    ],
    ids=[
        *("level 0", "level True", "level of a wrong type", "unknown mode"),
        *("tags of a wrong type", "no tags", "unknown tag", "tag of a wrong type"),
    ],
)
def test_wrong_arguments_are_refused_by_name_and_change_nothing(engine, call, words):
    async def run():
        with pytest.raises(ValueError, match=words):
            await call(engine)
        assert not await engine.is_sleeping()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("sleep", [], "missing a required argument: 'level'"),
        ("sleep", [3, "keep"], "level must be 1, which keeps the weights in host memory, or 2"),
        ("sleep", [1.0], "got 1.0"),
        ("sleep", [1, None], "mode must be one of keep, abort, got None"),
        ("sleep", [1, "keep", 1], "too many positional arguments"),
        ("wake_up", ["weights", "all"], "tags must be a list of weights and kv_cache, or None for both, got 'all'"),
        ("wake_up", [None], "got None"),
    ],
)
def test_core_answers_a_call_with_wrong_arguments_with_an_error(engine, name, args, words):
    async def run():
        engine.cores.attach()
        with pytest.raises(EngineError, match=re.escape(words)):
            await engine.cores.call(name, None, *args)
        assert not await engine.is_sleeping()

    asyncio.run(run())


@pytest.mark.slow
def test_each_level_of_sleep_frees_the_memory_that_it_names(tmp_path):
    config = LlamaConfig(
        vocab_size=32 * 1024,  # large weights, of which a step uses few
        hidden_size=1024,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    weights, cache = 2 * 128 * MIB, 4000 * 4 * 2 * 1024 * 4
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096}
    with running_engine(save_config(config, tmp_path), **options, kv_cache_memory_bytes=256 * MIB) as engine:

        async def run():
            core = psutil.Process((await engine.core_status())["pid"])

            def resident():
                return core.memory_info().rss

            def start():
                return engine.generate({"prompt_token_ids": [5] * 4000}, greedy(8, ignore_eos=True))

            expected = (await anext(start())).outputs[0].token_ids
            full = resident()
            await engine.sleep(1, mode="keep")
            without_cache = resident()
            assert without_cache < full - 0.8 * cache
            stream = asyncio.create_task(anext(start()))
            await eventually(num_waiting_is(engine, 1))
            await engine.sleep(2, mode="keep")
            assert resident() < without_cache - 0.8 * weights
            await engine.wake_up()
            assert (await stream).outputs[0].token_ids == expected
            assert resident() > full - 0.2 * weights

        asyncio.run(run())


def test_sleep_holds_for_all_clients_and_does_not_delay_a_core_told_to_stop(small_model, operators, tmp_path):
    address = f"ipc://{tmp_path}/core.sock"
    with standalone_core(small_model, address, "--fault-injection", SLOW_STEPS, *operators) as process:
        first, second = (
            AsyncLLM.connect(address, operator_key_file=operators[1]),
            AsyncLLM.connect(address, operator_key_file=operators[1], reconnect_timeout=0),
        )

        async def run():
            await first.sleep(2, mode="keep")
            assert await second.is_sleeping()
            first.shutdown()
            held = asyncio.create_task(rest(streaming(second, 5)))
            await eventually(num_waiting_is(second, 1))
            await second.wake_up()
            assert len((await held).token_ids) == 5
            stream = streaming(second, 400)
            await anext(stream)
            await second.sleep(mode="keep")
            process.send_signal(signal.SIGINT)
            with pytest.raises(EngineDeadError):
                await rest(stream)

        asyncio.run(asyncio.wait_for(run(), 120))
        second.shutdown()
        assert process.wait(30) == 0
