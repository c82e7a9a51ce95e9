"""A generation request as its consumer sees it, with a stand-in for the detokenizer."""

import asyncio
import time

import pytest

from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.stream import GenerationStream, Isolation
from vllm_mp.client.prompts.request import CallerRequest, GenerationRequest
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams
from vllm_mp.testing.engines import eventually
from vllm_mp.wire import Finished, encode, pack_ids

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


class Detokenizer:
    """Writes a token as its number in brackets, and a full stop at the end, as if text had been held back."""

    def append(self, token_ids):
        return "".join(f"[{token_id}]" for token_id in token_ids)

    def flush(self):
        return "."


def make_stream(kind=CUMULATIVE, detokenizer=None, **params):
    params = SamplingParams(output_kind=kind, **params)
    return stream_of(Completion(0, params, detokenizer or Detokenizer()), "prompt")


def stream_of(completion, prompt):
    return GenerationStream(
        GenerationRequest("id", prompt, [1, 2], pack_ids([1, 2]), completion.params, 5.0), [completion]
    )


def take_in(stream, token_id, position):
    return stream.completions[0].take_in(token_id, position)


def end(stream, finish):
    stream.end(stream.completions[0], finish)


def receive(stream, *token_ids):
    """Process a message as the client does: all tokens, then one wake-up."""
    for token_id in token_ids:
        assert take_in(stream, token_id, len(stream.completions[0].token_ids) & 0xFFFF)
    stream.wake_for_tokens(time.time())


def receive_last(stream, *token_ids, reason="length", stop_reason=None):
    for token_id in token_ids:
        assert take_in(stream, token_id, len(stream.completions[0].token_ids) & 0xFFFF)
    end(stream, Finished(0, len(stream.completions[0].token_ids), reason, stop_reason))
    stream.wake_for_tokens(time.time())


def test_consumer_who_changes_an_output_does_not_change_what_the_next_core_is_sent():
    params = SamplingParams()
    lora = LoRARequest("poet", 1, "/poet")
    request = GenerationRequest("id", "prompt", [1, 2], pack_ids([1, 2]), params, 5.0, lora=lora)
    stream = GenerationStream(request, [Completion(0, params, Detokenizer())])
    receive(stream, 7)
    expected = encode(stream.add_message(0, 1, Isolation()))
    output = stream.take()
    assert output.lora_request.lora_path == output.outputs[0].lora_request.lora_path == "/poet"
    output.prompt_token_ids[:] = [3]
    output.lora_request.lora_path = "/other"
    output.outputs[0].token_ids.clear()
    assert encode(stream.add_message(0, 1, Isolation())) == expected


def test_caller_who_changes_the_inputs_of_a_request_does_not_change_what_the_next_core_is_sent(input_processor):
    ids, params = [1, 2], SamplingParams(stop_token_ids=[3], seed=1)
    stream = asyncio.run(input_processor().generation(CallerRequest("id", None, ids, 0, 0.0, {}), params))
    expected = encode(stream.add_message(0, 1, Isolation()))
    ids[:] = [7, 8]
    params.stop_token_ids[:] = [9]
    params.max_tokens = 1
    assert encode(stream.add_message(0, 1, Isolation())) == expected
    assert stream.prompt_token_ids == [1, 2]


async def until_waiting(stream):
    """Run the consumer until it waits for news."""

    async def is_waiting():
        return stream._waiter is not None and not stream._waiter.done()

    await eventually(is_waiting)


def consume(stream, *messages):
    """Return (text, token ids, finished) of each output, if the consumer takes each before the next message."""

    async def run():
        outputs = []

        async def read():
            while not outputs or not outputs[-1].finished:
                outputs.append(await stream.next())

        reader = asyncio.create_task(read())
        for message in messages[:-1]:
            await until_waiting(stream)
            receive(stream, *message)
        await until_waiting(stream)
        receive_last(stream, *messages[-1])
        await asyncio.wait_for(reader, 5)
        return [(out.outputs[0].text, out.outputs[0].token_ids, out.finished) for out in outputs]

    return asyncio.run(run())


def test_cumulative_outputs_repeat_everything_so_far():
    assert consume(make_stream(CUMULATIVE), [7], [8, 9], [10]) == [
        ("[7]", [7], False),
        ("[7][8][9]", [7, 8, 9], False),
        ("[7][8][9][10].", [7, 8, 9, 10], True),
    ]


def test_delta_outputs_hold_only_what_is_new():
    assert consume(make_stream(DELTA), [7], [8, 9], [10]) == [
        ("[7]", [7], False),
        ("[8][9]", [8, 9], False),
        ("[10].", [10], True),
    ]


def test_final_only_gives_one_output():
    assert consume(make_stream(FINAL_ONLY), [7], [8, 9], [10]) == [("[7][8][9][10].", [7, 8, 9, 10], True)]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_end_may_arrive_without_tokens(kind):
    outputs = consume(make_stream(kind), [7], [])
    assert outputs[-1][2]
    assert "".join(text for text, _, _ in outputs) == ("[7][7]." if kind == CUMULATIVE else "[7].")


def test_final_only_consumer_is_woken_once():
    stream = make_stream(FINAL_ONLY)

    async def run():
        reader = asyncio.create_task(stream.next())
        await until_waiting(stream)
        waiter = stream._waiter
        for token_id in range(5):
            receive(stream, token_id)
            await asyncio.sleep(0)
            assert not waiter.done()
        receive_last(stream, 5)
        await asyncio.sleep(0)
        assert waiter.done()
        assert len((await reader).outputs[0].token_ids) == 6

    asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (CUMULATIVE, ["[1][2][3]", "[1][2][3][4][5]."]),
        (DELTA, ["[1][2][3]", "[4][5]."]),
        (FINAL_ONLY, ["[1][2][3][4][5]."]),
    ],
)
def test_slow_consumer_gets_fewer_larger_outputs_and_loses_nothing(kind, texts):
    stream = make_stream(kind)

    async def run():
        for token_id in (1, 2, 3):
            receive(stream, token_id)
        outputs = [await stream.next()] if kind != FINAL_ONLY else []
        receive(stream, 4)
        receive_last(stream, 5)
        outputs.append(await stream.next())
        return [output.outputs[0].text for output in outputs]

    assert asyncio.run(run()) == texts


def test_consumer_waits_if_there_is_no_news():
    stream = make_stream(DELTA)

    async def run():
        receive(stream, 1)
        await stream.next()
        reader = asyncio.create_task(stream.next())
        await until_waiting(stream)
        assert not reader.done()
        stream.wake_for_tokens(time.time())  # without news, as after a repeated token
        await asyncio.sleep(0)
        await until_waiting(stream)
        assert not reader.done()
        receive(stream, 2)
        assert (await reader).outputs[0].text == "[2]"

    asyncio.run(run())


def test_consumer_that_stops_waiting_loses_nothing():
    stream = make_stream(DELTA)

    async def run():
        reader = asyncio.create_task(stream.next())
        await until_waiting(stream)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        receive(stream, 1)
        assert (await stream.next()).outputs[0].text == "[1]"
        reader = asyncio.create_task(stream.next())
        await until_waiting(stream)
        receive(stream, 2)
        reader.cancel()  # it was woken, but has not run yet
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert (await stream.next()).outputs[0].text == "[2]"

    asyncio.run(run())


def test_repeated_token_is_ignored():
    stream = make_stream()
    for position, token_id in enumerate([7, 8, 9]):
        assert take_in(stream, token_id, position)
    for position in (0, 1, 2):
        assert take_in(stream, 99, position)
    assert stream.completions[0].token_ids == [7, 8, 9]
    assert take_in(stream, 10, 3)
    assert stream.completions[0].token_ids == [7, 8, 9, 10]


def test_gap_is_reported_and_its_token_is_not_taken():
    stream = make_stream()
    assert take_in(stream, 7, 0)
    for position in (2, 3, 1 + 0x7FFF):
        assert not take_in(stream, 8, position)
    assert stream.completions[0].token_ids == [7]
    assert take_in(stream, 8, 1)


def test_completions_continue_beyond_the_range_of_positions_on_the_wire():
    stream = make_stream()
    count = 2**17 + 3
    for position in range(count):
        assert take_in(stream, position, position & 0xFFFF)
        if position % 1000 == 0:
            assert take_in(stream, -1, position & 0xFFFF), "repeated"
            assert not take_in(stream, -1, (position + 2) & 0xFFFF), "a token is missing"
    assert stream.completions[0].token_ids == list(range(count))


@pytest.mark.parametrize("length", [0, 1, 65_535, 65_536, 65_537])
@pytest.mark.parametrize(("ahead", "grows", "fine"), [(0, 1, True), (-1, 0, True), (1, 0, False), (300, 0, False)])
def test_positions_are_compared_modulo_their_width(length, ahead, grows, fine):
    stream = make_stream()
    stream.completions[0].token_ids.extend(range(length))
    assert take_in(stream, 5, (length + ahead) & 0xFFFF) is fine
    assert len(stream.completions[0].token_ids) == length + grows


def test_only_the_first_end_counts():
    stream = make_stream()
    receive(stream, 7)
    assert not stream.is_over
    end(stream, Finished(0, 1, "length"))
    assert stream.is_over
    end(stream, Finished(0, 1, "abort"))
    stream.fail(RuntimeError("too late"))
    output = asyncio.run(stream.next())
    assert (output.finished, output.outputs[0].finish_reason) == (True, "length")


def test_only_the_first_failure_counts():
    stream = make_stream()
    receive(stream, 7)
    stream.fail(RuntimeError("first"))
    assert stream.is_over
    stream.fail(RuntimeError("second"))
    end(stream, Finished(0, 1, "length"))
    assert stream.completions[0].finish is None
    for _ in range(2):
        with pytest.raises(RuntimeError, match="first"):
            asyncio.run(stream.next())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_failure_wakes_a_waiting_consumer(kind):
    stream = make_stream(kind)

    async def run():
        reader = asyncio.create_task(stream.next())
        await until_waiting(stream)
        stream.fail(RuntimeError("gone"))
        with pytest.raises(RuntimeError, match="gone"):
            await asyncio.wait_for(reader, 5)

    asyncio.run(run())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_stop_token_is_in_the_ids_and_not_in_the_text(kind):
    stream = make_stream(kind, stop_token_ids=[9])

    async def run():
        receive_last(stream, 7, 9, reason="stop", stop_reason=9)
        return (await stream.next()).outputs[0]

    completion = asyncio.run(run())
    assert completion.text == "[7]."
    assert completion.token_ids == [7, 9]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 9)


def test_stop_token_is_in_the_text_if_the_request_asks_for_it():
    stream = make_stream(stop_token_ids=[9], include_stop_str_in_output=True)
    receive_last(stream, 7, 9, reason="stop", stop_reason=9)
    assert asyncio.run(stream.next()).outputs[0].text == "[7][9]."


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_last_token_is_in_the_text_if_the_completion_was_not_stopped(reason):
    stream = make_stream(DELTA)
    receive_last(stream, 7, 9, reason=reason)
    assert asyncio.run(stream.next()).outputs[0].text == "[7][9]."


def test_output_without_a_detokenizer_has_ids_and_no_text():
    stream = stream_of(Completion(0, SamplingParams(detokenize=False)), None)
    receive_last(stream, 7, 9, reason="stop")
    output = asyncio.run(stream.next())
    assert output.prompt is None
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [7, 9])


def test_output_is_not_changed_by_later_tokens():
    stream = make_stream(CUMULATIVE)

    async def run():
        receive(stream, 1)
        first = await stream.next()
        first.outputs[0].token_ids.append(99)  # a change by the consumer does not reach the stream
        receive_last(stream, 2)
        return first, await stream.next()

    first, last = asyncio.run(run())
    assert first.outputs[0].text == "[1]"
    assert not first.finished
    assert last.outputs[0].token_ids == [1, 2]


def test_outputs_carry_the_request_and_its_times():
    stream = make_stream()
    stream.num_cached_tokens = 2
    assert take_in(stream, 1, 0)
    stream.wake_for_tokens(6.0)
    output = asyncio.run(stream.next())
    assert output.num_cached_tokens == 2
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("id", "prompt", [1, 2])
    assert output.metrics.finished_time is None
    assert take_in(stream, 2, 1)
    stream.wake_for_tokens(7.0)
    before = time.time()
    receive_last(stream, 3)
    times = asyncio.run(stream.next()).metrics
    assert (times.arrival_time, times.first_token_time) == (5.0, 6.0)
    assert before <= times.last_token_time <= time.time()
    assert before <= times.finished_time <= time.time()
