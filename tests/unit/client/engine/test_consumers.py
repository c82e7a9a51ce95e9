"""Consumers of a real client that is attached to a replay core: iterators and groups, early leaves, memory."""

import asyncio
import gc
import threading
import tracemalloc
from collections import defaultdict

import pytest

from vllm_mp import EngineGenerateError, PoolingParams, RequestFailure, RequestOutputKind, SamplingParams
from vllm_mp.client.prompts.microbatcher import LoopQueues
from vllm_mp.testing.engines import ENDLESS, eventually, greedy, is_empty


def prompts(count):
    return [{"prompt_token_ids": [number + 300, 300]} for number in range(count)]


async def text_of(llm, prompt, params):
    return "".join([output.outputs[0].text async for output in llm.generate(prompt, params)])


def delta(max_tokens):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


async def close(stream):
    await stream.aclose()


async def throw(stream):
    with pytest.raises(KeyError, match="own"):
        await stream.athrow(KeyError("own"))


async def throw_class(stream):
    with pytest.raises(KeyError):
        await stream.athrow(KeyError)


async def cancel(stream):
    async def read():
        while True:
            await anext(stream)

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [close, throw, throw_class, cancel])
def test_iterator_that_is_left_aborts_its_request_and_has_ended(llm, path, leave):
    async def run():
        stream = llm.generate(prompts(1)[0], ENDLESS)
        await anext(stream)
        await leave(stream)
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await stream.asend(None)
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


def test_iterator_that_ends_raises_stop_ever_after(llm, path):
    async def run():
        stream = await llm.add_request(None, prompts(1)[0], greedy(3, ignore_eos=True))
        assert len([output async for output in stream]) == 1
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await stream.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("params", [None, ENDLESS])
def test_iterator_that_is_closed_before_it_begins_sends_nothing(llm, params):
    async def run():
        stream = llm.generate(prompts(1)[0], params)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert await llm.get_num_unfinished_requests() == 0

    asyncio.run(run())


def test_error_of_a_request_is_raised_once_and_ends_the_iterator(llm, path):
    async def run():
        stream = llm.generate([5], greedy(3, prompt_logprobs=1))
        with pytest.raises(EngineGenerateError, match="no log-probabilities"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(run())


def test_iterator_can_be_awaited_with_a_timeout_and_ends_with_it(llm, path):
    async def run():
        await llm.pause_generation("keep")
        stream = await llm.add_request(None, prompts(1)[0], ENDLESS)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        await llm.resume_generation()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


def test_second_consumer_of_an_iterator_is_refused(llm, path):
    async def run():
        await llm.pause_generation("keep")
        stream = await llm.add_request(None, prompts(1)[0], delta(3))

        async def read():
            return await anext(stream)

        first = asyncio.create_task(read())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="has a consumer that waits"):
            await anext(stream)
        first.cancel()
        await llm.resume_generation()
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


def test_iterator_that_another_thread_drops_aborts_its_request(llm):
    async def run():
        held = [await llm.add_request(None, prompts(1)[0], ENDLESS)]
        await asyncio.to_thread(held.clear)
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


def test_iterator_that_is_dropped_after_its_event_loop_aborts_its_request(llm):
    async def begin():
        stream = llm.generate(prompts(1)[0], ENDLESS)
        await anext(stream)
        return stream

    async def wait_until_empty():
        await eventually(lambda: is_empty(llm))

    stream = asyncio.run(begin())
    del stream
    asyncio.run(wait_until_empty())


@pytest.mark.parametrize("kind", ["generate", "add_request", "group"])
def test_outputs_are_read_on_in_another_event_loop_after_the_first(llm, path, kind):
    params = delta(200)

    async def begin():
        if kind == "generate":
            stream = llm.generate(prompts(1)[0], params)
        elif kind == "add_request":
            stream = await llm.add_request(None, prompts(1)[0], params)
        else:
            stream = llm.stream_group()
            await stream.add(prompts(1)[0], params)
        return stream, as_list(await anext(stream))

    def as_list(outputs):
        return outputs if kind == "group" else [outputs]

    async def read_on(stream):
        async with asyncio.timeout(60):
            return [output async for outputs in stream for output in as_list(outputs)]

    stream, outputs = asyncio.run(begin())
    outputs += asyncio.run(read_on(stream))
    assert outputs[-1].finished
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 200


def test_loop_that_is_left_aborts_its_request_although_a_traceback_keeps_its_frame(llm, path):
    async def fail():
        async for _ in llm.generate(prompts(1)[0], ENDLESS):
            raise ValueError("in the loop")

    async def run():
        async for _ in llm.generate(prompts(1)[0], ENDLESS):
            break
        await eventually(lambda: is_empty(llm))
        with pytest.raises(ValueError, match="in the loop") as kept:
            await fail()
        await eventually(lambda: is_empty(llm))
        assert kept.value.__traceback__ is not None

    asyncio.run(run())


def test_generator_under_a_name_is_read_on_after_a_break_until_it_is_closed(llm, path):
    async def run():
        stream = llm.generate(prompts(1)[0], ENDLESS)
        for _ in range(2):
            async for _ in stream:
                break
            else:
                raise AssertionError("the stream has ended")
        await stream.aclose()
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


def test_iterators_in_a_reference_cycle_are_collected_in_any_thread(llm, path):
    async def run():
        cycle = [await llm.add_request(None, prompts(1)[0], ENDLESS)]
        cycle.append(cycle)
        del cycle
        collector = threading.Thread(target=gc.collect)
        collector.start()
        await asyncio.to_thread(collector.join)
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


def test_group_gives_each_request_what_generate_gives(llm, path):
    async def run():
        params, texts = delta(40), {}
        async with llm.stream_group() as group:
            for number, prompt in enumerate(prompts(20)):
                assert await group.add(prompt, params, str(number)) == str(number)
            assert "7" in group
            async for outputs in group:
                assert len({output.request_id for output in outputs}) == len(outputs)
                for output in outputs:
                    texts.setdefault(output.request_id, []).append(output.outputs[0].text)
            assert len(group) == 0
        alone = await asyncio.gather(*(text_of(llm, prompt, params) for prompt in prompts(20)))
        assert ["".join(texts[str(number)]) for number in range(20)] == alone

    asyncio.run(run())


def test_group_goes_on_with_requests_that_are_added_while_it_is_read_and_after(llm):
    async def run():
        group, ended = llm.stream_group(), []
        first, second, third = prompts(3)
        await group.add(first, greedy(3, ignore_eos=True), "first")
        for _ in range(2):
            async for outputs in group:
                ended += [output.request_id for output in outputs if output.finished]
                if ended == ["first"]:
                    await group.add(second, greedy(3, ignore_eos=True), "second")
            await group.add(third, greedy(3, ignore_eos=True), f"third {len(ended)}")
        await group.aclose()
        return ended

    assert asyncio.run(run()) == ["first", "second", "third 2"]


def test_group_that_is_closed_or_dropped_aborts_its_requests(llm):
    async def run():
        async with llm.stream_group() as group:
            for prompt in prompts(3):
                await group.add(prompt, ENDLESS)
            await anext(group)
        assert len(group) == 0
        with pytest.raises(StopAsyncIteration):
            await anext(group)
        await eventually(lambda: is_empty(llm))
        group = llm.stream_group()
        await group.add(prompts(1)[0], ENDLESS)
        del group
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


def test_group_reports_requests_that_fail_or_are_aborted_and_refuses_those_that_cannot_run(llm):
    async def run():
        async with llm.stream_group() as group:
            failing = await group.add([5], greedy(3, prompt_logprobs=1))
            aborted = await group.add([5], ENDLESS)
            await llm.abort(aborted)
            with pytest.raises(ValueError, match="is in use"):
                await group.add([5], ENDLESS, aborted)
            with pytest.raises(TypeError, match="call encode"):
                await group.add([5], PoolingParams())
            with pytest.raises(ValueError, match="too long"):
                await group.add([5] * 9000, ENDLESS)
            ends = {output.request_id: output async for outputs in group for output in outputs if output.finished}
        assert isinstance(ends[failing], RequestFailure)
        assert isinstance(ends[failing].error, EngineGenerateError)
        assert ends[aborted].outputs[0].finish_reason == "abort"

    asyncio.run(run())


def test_slow_reader_of_a_group_gets_one_merged_output_for_each_request(llm):
    async def run():
        async with llm.stream_group() as group:
            for prompt in prompts(5):
                await group.add(prompt, delta(60))
            await eventually(lambda: is_empty(llm))
            outputs = await anext(group)
            assert [len(output.outputs[0].token_ids) for output in outputs] == [60] * 5
            assert all(output.finished for output in outputs)
            with pytest.raises(StopAsyncIteration):
                await anext(group)

    asyncio.run(run())


def test_idle_live_stream_takes_less_than_10_kb(llm):
    async def run():
        await llm.pause_generation("keep")
        count, params, given = 1000, delta(100), prompts(1000)
        await llm.add_request(None, given[0], params)
        gc.collect()
        tracemalloc.start()
        try:
            streams = [await llm.add_request(None, prompt, params) for prompt in given]
            gc.collect()
            size, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        del streams
        await llm.resume_generation()
        await eventually(lambda: is_empty(llm))
        return size / count

    assert asyncio.run(run()) < 8000


def test_text_that_has_no_room_by_its_size_is_not_tokenized(llm, monkeypatch):
    max_model_len = llm.model_config.max_model_len

    async def run():
        assert await llm.has_room("one two three", max_model_len - 10)
        assert not await llm.has_room("one two three", max_model_len - 1)
        assert not await llm.has_room("", max_model_len + 1)
        monkeypatch.setattr(LoopQueues, "add", None)
        assert not await llm.has_room("x" * 10_000_000, 1)

    asyncio.run(run())


def test_relay_passes_on_what_generate_gives_and_returns_what_is_left(llm):
    async def run():
        texts, left = defaultdict(list), []

        def pass_on(outputs):
            for position, output in enumerate(outputs):
                if output.finished or (output.request_id == "7" and len(texts["7"]) == 2 and not left):
                    return outputs[position:]
                texts[output.request_id].append(output.outputs[0].text)
            return []

        async with llm.stream_group() as group:
            for number, prompt in enumerate(prompts(20)):
                await group.add(prompt, delta(40), str(number))
            while outputs := await group.relay(pass_on):
                left += outputs
                for output in outputs:
                    texts[output.request_id].append(output.outputs[0].text)
            assert len(group) == 0
        alone = await asyncio.gather(*(text_of(llm, prompt, delta(40)) for prompt in prompts(20)))
        assert ["".join(texts[str(number)]) for number in range(20)] == alone
        assert sum(output.finished for output in left) == 20
        assert any(output.request_id == "7" and not output.finished for output in left)

    asyncio.run(run())


def test_cancelled_relay_loses_no_output_and_a_failing_relay_raises(llm):
    async def run():
        [prompt], texts = prompts(1), []

        def pass_on(outputs):
            texts.extend(output.outputs[0].text for output in outputs)
            return []

        async with llm.stream_group() as group:
            await group.add(prompt, delta(60))
            relaying = asyncio.create_task(group.relay(pass_on))
            await eventually(lambda: as_result(len(texts) > 3))
            relaying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await relaying
            async for outputs in group:
                pass_on(outputs)
            assert await group.relay(pass_on) == []
            assert "".join(texts) == await text_of(llm, prompt, delta(60))
            await group.add(prompt, ENDLESS)
            with pytest.raises(ZeroDivisionError):
                await group.relay(lambda outputs: [1 / 0])
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


async def as_result(value):
    return value
