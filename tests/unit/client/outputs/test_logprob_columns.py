"""Objects for log-probabilities are made when a consumer takes them, a few in each turn of the event loop."""

import asyncio
import itertools
import tracemalloc

import numpy as np
import pytest

from vllm_mp import wire
from vllm_mp.client.engine import stream_group
from vllm_mp.client.engine.stream_group import StreamGroup
from vllm_mp.client.outputs import output_iterator
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.output_iterator import OutputIterator
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import GenerationStream
from vllm_mp.client.outputs.wake_ups import MAX_PER_TURN
from vllm_mp.client.prompts.request import GenerationRequest
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
WIDTH = 6
"""Number of tokens with a log-probability at each position."""
ALTERNATIVES = list(range(100_000, 99_999 + WIDTH))
PROMPT = list(range(1, 400))


class Requests:
    """Streams with log-probabilities, and the messages of their core."""

    def __init__(self, count, kind=DELTA, n=1, prompt_logprobs=None):
        self.processor = OutputProcessor()
        self.num_made = 0
        """Number of objects that have been made so far: each asks for its text."""
        params = SamplingParams(
            max_tokens=None, logprobs=WIDTH - 1, prompt_logprobs=prompt_logprobs, output_kind=kind, n=n
        )
        self.streams = [self._stream(f"{number}", params) for number in range(count)]

    def _stream(self, request_id, params):
        request = GenerationRequest(request_id, None, PROMPT, wire.pack_ids(PROMPT), params, 0.0)
        completions = [Completion(index, params, None, self.text) for index in range(params.n)]
        stream = GenerationStream(request, completions, 1, self.text)
        self.processor.requests.reserve(request_id)
        self.processor.enter(stream)
        return stream

    def text(self, token_id):
        self.num_made += 1
        return f"<{token_id}>"

    def deliver(self, num_tokens, streams=None, reason=None):
        """Deliver `num_tokens` further tokens of each completion in one message, with the ends for `reason`."""
        streams = self.streams if streams is None else streams
        completions = [completion for stream in streams for completion in stream.completions]
        columns, logprobs, ends = [], [], []
        for completion in completions:
            first, slot = completion.num_tokens, completion.slot
            positions = range(first, first + num_tokens)
            columns += [(slot, position, position) for position in positions]
            logprobs += [logprobs_at(slot, positions)] if num_tokens else []
            ends += [wire.Finished(slot, first + num_tokens, reason)] if reason else []
        packed = wire.pack_tokens(*np.asarray(columns, np.int64).reshape(-1, 3).T)
        assert not self.processor.process(wire.StepOutput(0, 1, *packed, finished=ends, logprobs=logprobs))

    def iterator(self, stream):
        return OutputIterator(lambda: None, lambda stream: None, None, stream)

    async def group(self):
        waiting = iter(self.streams)

        async def add(*_):
            return self.iterator(next(waiting))

        group = StreamGroup(add, lambda: None, lambda stream: None)
        for stream in self.streams:
            await group.add(None, None, stream.request_id)
        return group


def logprobs_at(slot, positions):
    """Return the log-probabilities at `positions`, where the token is the position."""
    ids = np.array([[position, *ALTERNATIVES] for position in positions], "<i4")
    values = np.array([[-position / 64] + [-1.0] * (WIDTH - 1) for position in positions], "<f4")
    return wire.TokenLogprobs(
        slot, positions[0], ids.tobytes(), values.tobytes(), np.full(len(ids), 7, "<u4").tobytes()
    )


async def made_in_turns(requests, task):
    """Return the number of objects that are made in each turn of the event loop until `task` is done."""
    made = [requests.num_made]
    while not task.done():
        await asyncio.sleep(0)
        made.append(requests.num_made)
    await task
    return [after - before for before, after in itertools.pairwise(made)]


def check_complete(outputs, num_tokens):
    """Check the DELTA outputs of a completion."""
    parts = [output.outputs[0] for output in outputs]
    assert [token for part in parts for token in part.token_ids] == list(range(num_tokens))
    entries = [entry for part in parts for entry in part.logprobs]
    assert [list(entry) for entry in entries] == [[token, *ALTERNATIVES] for token in range(num_tokens)]
    for part in parts:
        assert len(part.logprobs) == len(part.token_ids)
        assert part.cumulative_logprob == pytest.approx(-sum(range(part.token_ids[-1] + 1)) / 64)


def test_messages_make_no_objects_and_a_consumer_that_does_not_read_holds_columns_only():
    num_tokens = 4000
    requests = Requests(1, prompt_logprobs=WIDTH - 1)
    (stream,) = requests.streams
    tracemalloc.start()
    try:
        prompt = logprobs_at(stream.completions[0].slot, range(1, len(PROMPT)))
        requests.processor.process(wire.StepOutput(0, 1, b"", b"", b"", prompt_logprobs=[prompt]))
        for _ in range(num_tokens):
            requests.deliver(1)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert requests.num_made == 0
    assert size < (8 * WIDTH + 4 + 60) * 1.25 * num_tokens, "columns, and for each token an int and its place in a list"
    output = stream.take()
    assert requests.num_made == WIDTH * (num_tokens + len(PROMPT) - 1)
    assert [entry and next(iter(entry)) for entry in output.prompt_logprobs] == [None, *range(1, len(PROMPT))]
    check_complete([output], num_tokens)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_large_output_is_made_in_turns_between_which_other_callbacks_run(path, kind):
    num_tokens = 500
    requests = Requests(1, kind, prompt_logprobs=WIDTH - 1)
    (stream,) = requests.streams
    prompt = logprobs_at(stream.completions[0].slot, range(1, len(PROMPT)))
    requests.processor.process(wire.StepOutput(0, 1, b"", b"", b"", prompt_logprobs=[prompt]))
    requests.deliver(num_tokens, reason="length")
    outputs = []

    async def read():
        outputs.extend([output async for output in requests.iterator(stream)])

    async def run():
        return await made_in_turns(requests, asyncio.create_task(read()))

    turns = asyncio.run(run())
    assert 0 < max(turns) < output_iterator._OBJECTS_PER_TURN + WIDTH
    assert sum(turns) == WIDTH * (num_tokens + len(PROMPT) - 1)
    (output,) = outputs
    assert output.finished
    assert len(output.prompt_logprobs) == len(PROMPT)
    check_complete(outputs, num_tokens)


def test_consumers_with_large_outputs_share_the_turns(path):
    num_tokens, count = 40, 3 * MAX_PER_TURN
    requests = Requests(count)
    outputs = {stream: [] for stream in requests.streams}

    async def read(stream):
        async for output in requests.iterator(stream):
            outputs[stream].append(output)

    async def run():
        readers = [asyncio.create_task(read(stream)) for stream in requests.streams]
        await asyncio.sleep(0)  # all of them wait
        requests.deliver(num_tokens, reason="length")
        return await made_in_turns(requests, asyncio.gather(*readers))

    turns = asyncio.run(run())
    assert max(turns) < MAX_PER_TURN * (output_iterator._OBJECTS_PER_TURN + WIDTH)
    assert sum(turns) == WIDTH * num_tokens * count
    for taken in outputs.values():
        assert len(taken) == 1, "what arrived together is one output"
        check_complete(taken, num_tokens)


def test_group_takes_large_outputs_in_turns():
    num_tokens, count = 100, 20
    requests = Requests(count)
    outputs = {stream.request_id: [] for stream in requests.streams}

    async def read(group):
        async for taken in group:
            for output in taken:
                outputs[output.request_id].append(output)

    async def run():
        group = await requests.group()
        requests.deliver(num_tokens, reason="length")
        return await made_in_turns(requests, asyncio.create_task(read(group)))

    turns = asyncio.run(run())
    assert max(turns) < stream_group._OBJECTS_PER_TURN + WIDTH
    assert len([turn for turn in turns if turn]) >= WIDTH * num_tokens * count / stream_group._OBJECTS_PER_TURN
    for taken in outputs.values():
        check_complete(taken, num_tokens)


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
@pytest.mark.parametrize("by_group", [False, True])
def test_tokens_that_arrive_while_objects_are_made_belong_to_the_next_output(kind, by_group, monkeypatch, path):
    monkeypatch.setattr(stream_group, "_OBJECTS_PER_TURN", 64)
    requests = Requests(1, kind)
    (stream,) = requests.streams
    outputs = []

    async def read(source):
        async for output in source:
            outputs.extend(output if by_group else [output])

    async def run():
        requests.deliver(100)
        source = await requests.group() if by_group else requests.iterator(stream)
        reader = asyncio.create_task(read(source))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not outputs
        requests.deliver(50, reason="length")
        await asyncio.wait_for(reader, 30)

    asyncio.run(run())
    assert [output.finished for output in outputs] == [False, True]
    if kind == CUMULATIVE:
        assert [len(output.outputs[0].token_ids) for output in outputs] == [100, 150]
        for output in outputs:
            check_complete([output], len(output.outputs[0].token_ids))
    else:
        assert [len(output.outputs[0].token_ids) for output in outputs] == [100, 50]
        check_complete(outputs, 150)


def test_group_keeps_what_is_ready_if_the_wait_for_an_output_is_cancelled():
    requests = Requests(3)

    async def run():
        group = await requests.group()
        requests.deliver(1000, reason="length")
        waiting = asyncio.create_task(anext(group))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return [output async for outputs in group for output in outputs]

    outputs = asyncio.run(run())
    assert [output.request_id for output in outputs] == ["0", "1", "2"]
    for output in outputs:
        check_complete([output], 1000)


def test_group_that_is_closed_while_objects_are_made_has_no_further_outputs():
    requests = Requests(3)

    async def run():
        group = await requests.group()
        requests.deliver(1000)
        waiting = asyncio.create_task(anext(group))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await group.aclose()
        with pytest.raises(StopAsyncIteration):
            await waiting

    asyncio.run(run())


def test_request_that_fails_while_objects_are_made_raises_its_error():
    requests = Requests(1)
    (stream,) = requests.streams

    async def run():
        requests.deliver(1000)
        waiting = asyncio.create_task(anext(requests.iterator(stream)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stream.fail(RuntimeError("gone"))
        with pytest.raises(RuntimeError, match="gone"):
            await waiting

    asyncio.run(run())


def test_completions_of_a_request_share_the_turns(path):
    requests = Requests(1, FINAL_ONLY, n=3)
    (stream,) = requests.streams
    requests.deliver(100, reason="length")
    outputs = []

    async def read():
        outputs.append(await anext(requests.iterator(stream)))

    async def run():
        return await made_in_turns(requests, asyncio.create_task(read()))

    turns = asyncio.run(run())
    assert max(turns) < output_iterator._OBJECTS_PER_TURN + WIDTH
    assert [len(part.logprobs) for part in outputs[0].outputs] == [100] * 3
