"""Requests of a manager: their tasks, statuses and results, over a stand-in for an engine."""

import asyncio
import gc
import logging

import pytest

from vllm_mp import (
    CompletionOutput,
    EngineGenerateError,
    PoolingParams,
    RequestManager,
    RequestOutput,
    RequestOutputKind,
    RequestStatus,
    SamplingParams,
)
from vllm_mp.client.compat import request_manager

WORDS = ("Once", " upon", " a", " time")


async def settle(turns=30):
    for _ in range(turns):
        await asyncio.sleep(0)


class StandInEngine:
    """Answers each request with `WORDS`, one for each `step`."""

    def __init__(self):
        self.calls = {}
        """By id: prompt, parameters and other arguments of `generate`."""
        self.steps = asyncio.Semaphore(0)
        self.aborted = set()
        self._wake = asyncio.Event()

    async def generate(self, prompt, params, request_id, **arguments):
        self.calls[request_id] = prompt, params, arguments
        if prompt == "bad":
            raise ValueError("the prompt is bad")
        for count in range(1, len(WORDS) + 1):
            await self.steps.acquire()
            reason = "abort" if request_id in self.aborted else "length" if count == len(WORDS) else None
            if prompt == "breaks" and count == 3:
                raise EngineGenerateError("the request broke")
            num_tokens = count - 1 if reason == "abort" else count
            completion = CompletionOutput(0, "".join(WORDS[:num_tokens]), list(range(num_tokens)), finish_reason=reason)
            yield RequestOutput(request_id, "prompt", [1, 2], None, [completion], reason is not None)
            if reason is not None:
                await settle(5)  # consumers see the last output before the end
                return

    async def abort(self, request_id):
        self.aborted.add(request_id)
        self.steps.release()

    def step(self, count=1):
        for _ in range(count):
            self.steps.release()


def run(test):
    """Run `test(manager, engine)` in an event loop."""

    async def main():
        engine = StandInEngine()
        await test(RequestManager(engine), engine)

    asyncio.run(main())


PARAMS = SamplingParams(max_tokens=4)
DELTA = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.DELTA)
FINAL = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)


def test_request_runs_without_a_consumer_from_waiting_to_completed():
    async def test(manager, engine):
        await manager.add_request("a", "prompt", PARAMS)
        assert await manager.get_request_status("a") == RequestStatus.WAITING
        await settle()
        assert await manager.get_request_status("a") == RequestStatus.WAITING
        engine.step()
        await settle()
        assert await manager.get_request_status("a") == RequestStatus.RUNNING
        engine.step(3)
        await settle()
        assert await manager.get_request_status("a") == RequestStatus.COMPLETED
        assert (await manager.get_result("a")).outputs[0].text == "Once upon a time"
        assert await manager.get_request_status("a") == RequestStatus.COMPLETED

    run(test)


def test_statuses_are_strings():
    assert RequestStatus.CANCELLED == "cancelled"
    assert [status.value for status in RequestStatus] == ["waiting", "running", "completed", "cancelled", "failed"]


@pytest.mark.parametrize("params", [PARAMS, DELTA, FINAL])
def test_result_is_whole_whatever_the_kind_of_output(params):
    async def test(manager, engine):
        await manager.add_request("a", "prompt", params)
        result = asyncio.create_task(manager.result("a"))
        engine.step(4)
        completion = (await result).outputs[0]
        assert (completion.text, completion.token_ids) == ("Once upon a time", [0, 1, 2, 3])

    run(test)


def test_caller_s_parameters_are_left_as_they_are():
    async def test(manager, engine):
        params = DELTA.clone()
        await manager.add_request("a", "prompt", params)
        engine.step(4)
        await manager.get_result("a")
        assert params == DELTA
        assert engine.calls["a"][1].output_kind == RequestOutputKind.CUMULATIVE

    run(test)


def test_arguments_reach_the_engine_and_those_left_out_do_not():
    async def test(manager, engine):
        await manager.add_request("a", "prompt", PARAMS, [5, 6], 12.5, "adapter")
        await manager.add_request("b", "prompt", PARAMS)
        await settle()
        prompt, _, arguments = engine.calls["a"]
        assert prompt == {"prompt": "prompt", "prompt_token_ids": [5, 6]}
        assert arguments == {"arrival_time": 12.5, "lora_request": "adapter"}
        assert engine.calls["b"][0] == "prompt"
        assert engine.calls["b"][2] == {}

    run(test)


async def streamed(manager, engine, params, before=0):
    """Return the text and the number of tokens of each output of a stream that starts after `before` steps."""
    await manager.add_request("a", "prompt", params)
    engine.step(before)
    await settle()

    async def consume():
        return [
            (output.outputs[0].text, len(output.outputs[0].token_ids), output.finished)
            async for output in manager.stream("a")
        ]

    consumer = asyncio.create_task(consume())
    for _ in range(len(WORDS) - before):
        await settle()
        engine.step()
    return await consumer


def test_stream_repeats_everything_by_default():
    async def test(manager, engine):
        assert await streamed(manager, engine, PARAMS) == [
            ("Once", 1, False),
            ("Once upon", 2, False),
            ("Once upon a", 3, False),
            ("Once upon a time", 4, True),
        ]

    run(test)


def test_stream_of_kind_delta_has_only_what_is_new():
    async def test(manager, engine):
        assert await streamed(manager, engine, DELTA) == [
            ("Once", 1, False),
            (" upon", 1, False),
            (" a", 1, False),
            (" time", 1, True),
        ]

    run(test)


def test_stream_that_starts_late_begins_with_all_earlier_tokens():
    async def test(manager, engine):
        assert await streamed(manager, engine, DELTA, before=3) == [("Once upon a", 3, False), (" time", 1, True)]

    run(test)


def test_stream_of_an_ended_request_has_its_result():
    async def test(manager, engine):
        assert await streamed(manager, engine, DELTA, before=4) == [("Once upon a time", 4, True)]

    run(test)


def test_stream_of_kind_final_has_one_output():
    async def test(manager, engine):
        assert await streamed(manager, engine, FINAL) == [("Once upon a time", 4, True)]

    run(test)


def test_all_consumers_that_wait_get_the_result_and_later_ones_an_error():
    async def test(manager, engine):
        await manager.add_request("a", "prompt", PARAMS)
        waiting = [asyncio.create_task(manager.get_result("a")) for _ in range(3)]
        await settle()
        engine.step(4)
        results = await asyncio.gather(*waiting)
        assert all(result is results[0] for result in results)
        with pytest.raises(KeyError, match="taken"):
            await manager.get_result("a")

    run(test)


def test_leaving_a_stream_or_a_wait_does_not_end_the_request():
    async def test(manager, engine):
        await manager.add_request("a", "prompt", PARAMS)
        engine.step()
        async for _ in manager.stream("a"):
            break
        waiting = asyncio.create_task(manager.get_result("a"))
        await settle()
        waiting.cancel()
        engine.step(3)
        assert (await manager.get_result("a")).outputs[0].text == "Once upon a time"

    run(test)


def test_aborted_request_is_cancelled_and_keeps_its_text():
    async def test(manager, engine):
        await manager.add_request("a", "prompt", PARAMS)
        engine.step(2)
        await settle()
        await manager.abort_request("a")
        assert await manager.get_request_status("a") == RequestStatus.CANCELLED
        result = await manager.get_result("a")
        assert (result.outputs[0].text, result.outputs[0].finish_reason) == ("Once upon", "abort")
        await manager.abort_request("a")  # no-op for a request that has ended

    run(test)


def test_request_that_is_aborted_before_its_task_runs_never_reaches_the_engine():
    async def test(manager, engine):
        await manager.add_request("a", "prompt", PARAMS)
        await manager.abort_request("a")
        assert await manager.get_request_status("a") == RequestStatus.CANCELLED
        assert engine.calls == {}
        with pytest.raises(EngineGenerateError, match="aborted"):
            await manager.get_result("a")

    run(test)


@pytest.mark.parametrize(("prompt", "kind"), [("bad", ValueError), ("breaks", EngineGenerateError)])
def test_failure_is_reported_to_consumers_and_nowhere_else(prompt, kind, caplog):
    async def test(manager, engine):
        await manager.add_request("a", prompt, PARAMS)
        await manager.add_request("b", prompt, PARAMS)
        await manager.add_request("c", prompt, PARAMS)
        engine.step(12)
        await settle()
        assert await manager.get_request_status("a") == RequestStatus.FAILED
        with pytest.raises(kind):
            await manager.get_result("a")
        with pytest.raises(kind):
            async for _ in manager.stream("b"):
                pass

    with caplog.at_level(logging.ERROR):
        run(test)
        gc.collect()
    assert not caplog.records


def test_other_parameters_than_sampling_parameters_are_refused_at_once():
    async def test(manager, engine):
        with pytest.raises(TypeError, match="must be SamplingParams, got PoolingParams"):
            await manager.add_request("a", "prompt", PoolingParams())
        with pytest.raises(KeyError):
            await manager.get_request_status("a")

    run(test)


def test_unknown_id_is_a_key_error():
    async def test(manager, engine):
        for call in (manager.get_result, manager.get_request_status, manager.abort_request):
            with pytest.raises(KeyError, match="'unknown'"):
                await call("unknown")
        with pytest.raises(KeyError, match="'unknown'"):
            await anext(manager.stream("unknown"))

    run(test)


def test_id_of_a_live_request_is_refused_and_of_an_ended_request_is_free_again():
    async def test(manager, engine):
        await manager.add_request("a", "prompt", PARAMS)
        for kind in (ValueError, KeyError):
            with pytest.raises(kind):
                await manager.add_request("a", "prompt", PARAMS)
        engine.step(4)
        await settle()
        await manager.add_request("a", "other prompt", PARAMS)
        assert await manager.get_request_status("a") == RequestStatus.WAITING
        engine.step(4)
        await manager.get_result("a")
        assert engine.calls["a"][0] == "other prompt"

    run(test)


def test_manager_remembers_a_limited_number_of_ended_requests(monkeypatch):
    assert request_manager._MAX_ENDED == 10_000
    monkeypatch.setattr(request_manager, "_MAX_ENDED", 3)

    async def test(manager, engine):
        await manager.add_request("live", "prompt", PARAMS)
        await settle()
        for number in range(5):
            await manager.add_request(str(number), "bad", PARAMS)
            await settle()
        with pytest.raises(KeyError):
            await manager.get_request_status("1")
        with pytest.raises(KeyError):
            await manager.get_result("1")
        with pytest.raises(ValueError, match="bad"):
            await manager.get_result("4")
        for number in range(2, 5):
            assert await manager.get_request_status(str(number)) == RequestStatus.FAILED
        assert await manager.get_request_status("live") == RequestStatus.WAITING
        assert len(manager._requests) == 3
        assert len(manager._ended) == 3

    run(test)


def test_taken_result_is_not_held():
    async def test(manager, engine):
        await manager.add_request("a", "prompt", PARAMS)
        engine.step(4)
        await manager.get_result("a")
        assert manager._requests == {}

    run(test)
