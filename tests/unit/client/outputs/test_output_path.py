"""The compiled output path and the one in Python do the same, and what reaches consumers is complete."""

import asyncio
import itertools
import logging
import random
import sys
import types

import numpy as np
import pytest

from vllm_mp import wire
from vllm_mp.client import outputs
from vllm_mp.client.engine.stream_group import StreamGroup
from vllm_mp.client.outputs import output_path
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.detokenizer import IncrementalDetokenizer
from vllm_mp.client.outputs.output_iterator import OutputIterator
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import GenerationStream
from vllm_mp.client.outputs.wake_ups import MAX_PER_TURN
from vllm_mp.client.prompts.request import GenerationRequest
from vllm_mp.client.prompts.tokenizer import load_awaitable_tokenizer
from vllm_mp.config.engine_args import EngineArgs
from vllm_mp.outputs import RequestFailure
from vllm_mp.replay_core.answers import Answers
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams

PROMPT = [300]


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return load_awaitable_tokenizer(EngineArgs().create_engine_config().model_config)


def request_of(request_id, params):
    return GenerationRequest(request_id, "text", PROMPT, wire.pack_ids(PROMPT), params, 1.0)


def stream_in(processor, request_id, tokenizer=None, n=1, interval=1, **fields):
    """Return the stream of a new request in the output processor."""
    params = SamplingParams(max_tokens=None, **fields)
    detokenizers = [tokenizer and IncrementalDetokenizer(tokenizer, PROMPT) for _ in range(n)]
    completions = [Completion(i, params, detokenizer) for i, detokenizer in enumerate(detokenizers)]
    stream = GenerationStream(request_of(request_id, params), completions, interval)
    processor.requests.reserve(request_id)
    processor.enter(stream)
    return stream


def group_of(*streams):
    """Return a group that has these streams, which nothing aborts."""
    waiting = iter(streams)

    class Detached:
        def detach(self):
            return next(waiting)

    async def add(*_, **__):
        return Detached()

    async def make():
        group = StreamGroup(add, lambda: None, lambda stream: None)
        for stream in streams:
            await group.add(None, None, stream.request_id)
        return group

    return asyncio.run(make())


def message(entries, finished=()):
    """Return a step output; an entry is (slot, token, position)."""
    slots, tokens, positions = np.asarray(entries, np.int64).reshape(-1, 3).T
    return wire.StepOutput(0, 1, *wire.pack_tokens(slots, tokens, positions), finished=list(finished))


async def take(group):
    """Return the next outputs of a group that has some."""
    return await asyncio.wait_for(anext(group), 10)


def play(tokenizer, seed):
    """Return all that consumers get from streams of many kinds, whose messages and readers come in random order."""
    chance = random.Random(seed)
    processor, answers = OutputProcessor(), Answers().tokens
    kinds = [
        {},
        {"output_kind": RequestOutputKind.DELTA},
        {"output_kind": RequestOutputKind.DELTA, "stop": [" the", "\n"]},
        {"output_kind": RequestOutputKind.FINAL_ONLY},
        {"output_kind": RequestOutputKind.DELTA, "n": 2},
        {"output_kind": RequestOutputKind.DELTA, "interval": 3},
        {"output_kind": RequestOutputKind.DELTA, "detokenize": False},
    ]
    streams = [
        stream_in(processor, f"{number}", tokenizer, **chance.choice([*kinds, kinds[1], kinds[1]]))
        for number in range(12)
    ]
    group = group_of(*streams)
    live = {
        completion.slot: (completion, chance.choice(answers), chance.randint(1, 60))
        for stream in streams
        for completion in stream.completions
    }
    seen = []

    async def run():
        while live or group:
            entries, finished = [], []
            for slot, (completion, tokens, length) in list(live.items()):
                for _ in range(chance.choice([0, 1, 1, 1, 3])):
                    position = len(completion.token_ids) + sum(entry[0] == slot for entry in entries)
                    if completion.is_live and position < length:
                        entries.append((slot, int(tokens[position]), position))
                done = len(completion.token_ids) + sum(entry[0] == slot for entry in entries)
                if done >= length or not completion.is_live:
                    finished.append(wire.Finished(slot, done, "length"))
                    del live[slot]
            chance.shuffle(entries)
            entries.sort(key=lambda entry: entry[2])
            assert len(processor.process(message(entries, finished))) <= len(streams)
            if chance.random() < 0.6 and len(group._ready):
                seen.extend(await take(group))

    asyncio.run(run())
    for output in seen:
        if output.metrics is not None:
            assert output.metrics.first_token_time <= output.metrics.last_token_time
            assert not output.finished or output.metrics.last_token_time <= output.metrics.finished_time
            output.metrics = None
    return seen


@pytest.mark.parametrize("seed", range(8))
def test_both_paths_give_the_same_outputs(tokenizer, seed, monkeypatch):
    if output_path.COMPILED is None:
        pytest.skip("the output path was not compiled: there was no C compiler")
    seen = []
    for functions in (output_path.PYTHON, output_path.COMPILED):
        monkeypatch.setattr(output_path, "current", functions)
        seen.append(play(tokenizer, seed))
    assert seen[0] == seen[1]
    assert len(seen[0]) > 50


def test_delta_texts_of_a_group_are_the_text_of_all_tokens(tokenizer, path):
    processor, answers = OutputProcessor(), Answers().tokens
    streams = [
        stream_in(processor, f"{number}", tokenizer, output_kind=RequestOutputKind.DELTA)
        for number in range(len(answers))
    ]
    group = group_of(*streams)
    texts = {stream.request_id: "" for stream in streams}

    async def run():
        for position in range(answers.shape[1]):
            last = position == answers.shape[1] - 1
            ends = [wire.Finished(stream.completions[0].slot, position + 1, "length") for stream in streams]
            entries = [
                (stream.completions[0].slot, tokens[position], position)
                for stream, tokens in zip(streams, answers, strict=True)
            ]
            processor.process(message(entries, ends if last else []))
            if position % 3 != 1:  # so some outputs are merged
                for output in await take(group):
                    texts[output.request_id] += output.outputs[0].text
                    assert output.finished == last
        with pytest.raises(StopAsyncIteration):
            await take(group)

    asyncio.run(run())
    for tokens, text in zip(answers, texts.values(), strict=True):
        assert text == tokenizer.decode(tokens.tolist(), skip_special_tokens=True)


def test_failure_of_a_stream_is_reported_and_ends_no_other(path):
    processor = OutputProcessor()
    failing, fine = (stream_in(processor, name, output_kind=RequestOutputKind.DELTA) for name in ("failing", "fine"))
    group = group_of(failing, fine)
    slots = [stream.completions[0].slot for stream in (failing, fine)]

    async def run():
        unwanted = processor.process(message([(slots[0], 5, 3), (slots[0], 6, 0), (slots[1], 7, 0)]))
        assert unwanted == [slots[0]]
        failed, output = sorted(await take(group), key=lambda output: output.request_id)
        assert isinstance(failed, RequestFailure)
        assert failed.finished
        assert "tokens after the first 0 were lost" in str(failed.error)
        assert output.outputs[0].token_ids == [7]
        processor.process(message([], [wire.Finished(slots[1], 1, "length")]))
        (output,) = await take(group)
        assert output.finished
        assert len(group) == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("slots", "tokens", "positions"),
    [(b"\0\0", b"\0" * 8, b"\0" * 4), (b"\0" * 4, b"\0" * 8, b"\0" * 2), (b"\0" * 2, b"\0" * 5, b"\0" * 2)],
)
def test_columns_that_disagree_are_refused(path, slots, tokens, positions):
    with pytest.raises(ValueError, match="the columns disagree"):
        OutputProcessor().process(wire.StepOutput(0, 1, slots, tokens, positions))


def test_tokens_of_unknown_slots_and_of_positions_received_before_are_ignored(path):
    processor = OutputProcessor()
    stream = stream_in(processor, "id", output_kind=RequestOutputKind.DELTA)
    slot = stream.completions[0].slot
    assert processor.process(message([(slot, 2**32 - 1, 0), (slot, 5, 0), (2**16 + 3, 5, 0), (7, 5, 0)])) == []
    assert stream.completions[0].token_ids == [2**32 - 1]


def test_consumer_that_was_cancelled_or_whose_event_loop_is_closed_does_not_keep_tokens_from_others(path):
    processor = OutputProcessor()
    streams = [stream_in(processor, f"{i}", output_kind=RequestOutputKind.DELTA) for i in range(3)]

    async def wait_and_leave():
        streams[0].arrival().cancel()
        streams[1].arrival()

    asyncio.run(wait_and_leave())
    entries = [(stream.completions[0].slot, 5, 0) for stream in streams]
    assert processor.process(message(entries)) == []
    assert [asyncio.run(stream.next()).outputs[0].token_ids for stream in streams] == [[5]] * 3


def test_second_consumer_of_a_stream_is_refused():
    stream = stream_in(OutputProcessor(), "id")

    async def run():
        stream.arrival()
        with pytest.raises(RuntimeError, match="has a consumer that waits"):
            stream.arrival()

    asyncio.run(run())


def test_stream_is_taken_over_by_another_event_loop_after_the_first_is_closed(path):
    stream = stream_in(OutputProcessor(), "id")
    loop = asyncio.new_event_loop()

    async def wait():
        stream.arrival()

    loop.run_until_complete(wait())
    loop.close()
    asyncio.run(wait())


def test_awaitable_of_an_output_is_an_iterator_over_futures(path):
    processor = OutputProcessor()
    stream = stream_in(processor, "id", output_kind=RequestOutputKind.DELTA)

    async def run():
        step = OutputIterator(lambda: None, lambda stream: None, None, stream).__anext__().__await__()
        for _ in range(2):
            future = next(step)
            assert not future.done()
            stream.wake()  # without news
            await asyncio.sleep(0)
            assert future.done()
        processor.process(message([(stream.completions[0].slot, 5, 0)]))
        with pytest.raises(StopIteration) as stop:
            next(step)
        return stop.value.value

    assert asyncio.run(run()).outputs[0].token_ids == [5]


def test_whole_token_after_half_a_character_shows_the_half_as_a_replacement(tokenizer, path):
    processor = OutputProcessor()
    stream = stream_in(processor, "id", tokenizer, output_kind=RequestOutputKind.DELTA)
    half, whole = tokenizer.convert_tokens_to_ids("ð"), tokenizer.convert_tokens_to_ids("fox")
    texts = []
    for position, token in enumerate([whole, half, whole, whole]):  # ð stands for the byte 0xF0
        processor.process(message([(stream.completions[0].slot, token, position)]))
        group = group_of(stream)
        texts.append(asyncio.run(take(group))[0].outputs[0].text)
        stream.group = None
    assert texts == ["fox", "", "�fox", "fox"]


def test_waiting_consumer_of_a_group_is_woken(path):
    processor = OutputProcessor()
    streams = [stream_in(processor, f"{i}", output_kind=RequestOutputKind.DELTA) for i in range(2)]
    group = group_of(*streams)

    async def run():
        waiting = asyncio.create_task(take(group))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        processor.process(message([(stream.completions[0].slot, 5, 0) for stream in streams]))
        return await waiting

    assert [output.request_id for output in asyncio.run(run())] == ["0", "1"]


def test_other_callbacks_run_between_the_consumers_of_a_large_step(path):
    processor = OutputProcessor()
    streams = [stream_in(processor, f"{i}", output_kind=RequestOutputKind.DELTA) for i in range(3 * MAX_PER_TURN)]
    groups = [group_of(stream) for stream in streams[::2]]
    num_done, seen = 0, [0]

    async def consume(source):
        nonlocal num_done
        await source
        num_done += 1

    async def run():
        loop = asyncio.get_running_loop()
        sources = [anext(group) for group in groups] + [stream.next() for stream in streams[1::2]]
        consumers = [asyncio.create_task(consume(source)) for source in sources]
        await asyncio.sleep(0)

        def beat():
            seen.append(num_done)
            if num_done < len(streams):
                loop.call_soon(beat)

        processor.process(message([(stream.completions[0].slot, 5, 0) for stream in streams]))
        loop.call_soon(beat)
        await asyncio.wait_for(asyncio.gather(*consumers), 30)

    asyncio.run(run())
    turns = [after - before for before, after in itertools.pairwise(seen) if after > before]
    assert max(turns) <= MAX_PER_TURN


def test_steps_that_arrive_before_consumers_are_woken_are_one_output(path):
    processor = OutputProcessor()
    streams = [stream_in(processor, f"{i}", output_kind=RequestOutputKind.DELTA) for i in range(2 * MAX_PER_TURN)]

    async def run():
        consumers = [asyncio.create_task(stream.next()) for stream in streams]
        await asyncio.sleep(0)
        for position in range(3):
            processor.process(message([(stream.completions[0].slot, position, position) for stream in streams]))
        return await asyncio.wait_for(asyncio.gather(*consumers), 30)

    assert [output.outputs[0].token_ids for output in asyncio.run(run())] == [[0, 1, 2]] * len(streams)


def test_consumers_are_woken_by_another_event_loop_after_one_was_closed_too_early_to_wake_them(path):
    processor = OutputProcessor()
    streams = [stream_in(processor, f"{i}", output_kind=RequestOutputKind.DELTA) for i in range(2)]

    def step(position):
        processor.process(message([(stream.completions[0].slot, 5, position) for stream in streams]))

    loop = asyncio.new_event_loop()
    for callback in (streams[0].arrival, lambda: step(0), loop.stop):
        loop.call_soon(callback)
    loop.run_forever()
    loop.close()

    async def run():
        assert len((await streams[1].next()).outputs[0].token_ids) == 1
        consumer = asyncio.create_task(streams[1].next())
        await asyncio.sleep(0)
        step(1)
        return await asyncio.wait_for(consumer, 30)

    assert asyncio.run(run()).outputs[0].token_ids == [5]


@pytest.mark.parametrize("error", [TypeError("takes 7 arguments"), AttributeError("no slot")])
def test_compiled_path_of_another_version_is_not_used(monkeypatch, caplog, error):
    def configure(*classes):
        raise error

    stale = types.SimpleNamespace(__file__="_output_path.so", configure=configure)
    monkeypatch.setitem(sys.modules, "vllm_mp.client.outputs._output_path", stale)
    monkeypatch.setattr(outputs, "_output_path", stale, raising=False)
    with caplog.at_level(logging.WARNING):
        assert output_path._load_compiled() is None
    (record,) = caplog.records
    assert "the output path runs in Python, because _output_path.so" in record.getMessage()
