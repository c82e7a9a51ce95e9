"""A request, event loop or thread that does something wrong does not disturb others."""

import asyncio
import contextlib
import functools
import itertools
import os
import threading
import time

import numpy as np
import pytest

from vllm_mp import EngineDeadError, EngineGenerateError, SamplingParams, wire
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.testing.engines import answer, eventually, greedy, is_empty

pytestmark = pytest.mark.usefixtures("forked_cores")

PROMPT = "The quick brown fox"


class Whole(int):
    """A subclass of `int`."""


def long_running(**params):
    return SamplingParams(max_tokens=900, ignore_eos=True, **params)


def test_numpy_numbers_and_subclasses_of_int_are_accepted(llm):
    params = SamplingParams(
        temperature=np.float64(0),
        max_tokens=Whole(4),
        top_k=np.int64(3),
        top_p=np.float32(1),
        stop_token_ids=[Whole(9)],
    )
    assert len(asyncio.run(answer(llm, PROMPT, params)).outputs[0].token_ids) == 4


def test_request_that_cannot_be_sent_does_not_disturb_the_next(llm):
    async def run():
        live = await llm.add_request("live", PROMPT, long_running(seed=1))
        await anext(live)
        for arguments in ({"request_id": "\ud800"}, {"tokenization_kwargs": {"return_tensors": "np"}}):
            with pytest.raises((ValueError, TypeError)):
                await answer_with(llm, **arguments)
        bad = long_running()
        bad.extra_args = None
        bad.stop = object()  # passes validation unnoticed, and cannot be encoded
        with pytest.raises((TypeError, NotImplementedError)):
            await answer(llm, PROMPT, bad)
        good = await answer(llm, PROMPT, greedy(6))
        alone = (await anext(live)).outputs[0].token_ids
        await live.aclose()
        return good, alone

    good, alone = asyncio.run(run())
    assert len(good.outputs[0].token_ids) == 6
    assert len(alone) > 1
    assert good.outputs[0].text == asyncio.run(answer(llm, PROMPT, greedy(6))).outputs[0].text


async def answer_with(llm, **arguments):
    async for _ in llm.generate(PROMPT, greedy(3), **arguments):
        pass


def test_lowest_temperatures_are_greedy(llm):
    expected = asyncio.run(answer(llm, PROMPT, greedy(5))).outputs[0].token_ids
    for temperature in (1e-40, 1e-30, 1e-10):
        params = SamplingParams(temperature=temperature, max_tokens=5)
        assert asyncio.run(answer(llm, PROMPT, params)).outputs[0].token_ids == expected


def test_request_that_allows_no_token_fails_alone(llm):
    async def run():
        other = asyncio.create_task(answer(llm, PROMPT, greedy(30)))
        stops = {"min_tokens": 3, "allowed_token_ids": [7, 8], "stop_token_ids": [7, 8]}
        end_and_stop = {"min_tokens": 3, "allowed_token_ids": [2, 7], "stop_token_ids": [7]}
        for params in (
            SamplingParams(temperature=0, **stops),
            SamplingParams(temperature=1, **stops),
            greedy(6, allowed_token_ids=[2], min_tokens=3),
            SamplingParams(temperature=0.9, seed=3, n=3, top_k=20, max_tokens=12, **end_and_stop),
        ):
            with pytest.raises(EngineGenerateError, match="allow no token"):
                await answer(llm, PROMPT, params)
        assert (await other).finished
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


def test_core_survives_hostile_values_from_a_client(llm):
    changes = [
        {"structured_outputs": {"regex": "a"}},  # valid, but not the constraint of the message
        {"structured_outputs": functools.reduce(lambda inner, _: [inner], range(900), [])},
        {"stop_token_ids": [2**63]},
        {"seed": 2**63},
        {"temperature": float("nan")},
    ]

    def attack():
        with contextlib.closing(CoreConnection(llm.cores.first.supervisor.core.connection.address)) as client:
            welcome, _ = client.greet(10, lambda: None)
            for slot, change in enumerate(changes):
                params = SamplingParams(seed=1)
                for name, value in change.items():
                    setattr(params, name, value)  # without validation
                client.send(wire.AddRequest(welcome.incarnation, slot, "bad", wire.pack_ids([1]), params))
            client.send(wire.AbortRequests(welcome.incarnation, [-1, 2**62]))
            client.send(wire.Call(welcome.incarnation, -(2**60), "no such call"))
            answers = (wire.decode_core_message(client._socket.recv()) for _ in itertools.count())
            # The core also sends empty outputs, by which it finds out whether a client is gone.
            said = (answer for answer in answers if not isinstance(answer, wire.StepOutput) or answer.finished)
            done.append(list(itertools.islice(said, 2)))

    done = []
    thread = threading.Thread(target=attack)  # its stack has room for the nesting
    thread.start()
    thread.join(30)
    first, last = done[0]
    assert "structured_outputs" in first.finished[0].error
    assert "no operation" in last.error
    assert asyncio.run(answer(llm, PROMPT, greedy(3))).finished


def test_message_that_is_too_large_is_refused_before_it_is_sent(llm):
    too_long = bytes(wire.MAX_MESSAGE_BYTES)
    message = wire.AddRequest(
        llm.cores.first.supervisor.core.connection.incarnation, 0, "long", too_long, SamplingParams(seed=1)
    )
    with pytest.raises(ValueError, match="shorten"):
        llm.cores.first.supervisor.core.connection.send(message)
    assert asyncio.run(answer(llm, PROMPT, greedy(3))).finished


@pytest.mark.parametrize("recovery", [True, False], ids=["recovery", "no recovery"])
def test_broken_connection_counts_as_death_of_the_core_even_if_its_process_lives(make_small_engine, recovery):
    engine = make_small_engine(max_model_len=512, recovery=recovery)

    async def run():
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
        await anext(stream)
        # The core's socket closes the connection on a message above its limit.
        engine.cores.first.supervisor.core.connection._socket.send(b"\0" * (wire.MAX_MESSAGE_BYTES + 1))
        if recovery:
            assert len([output async for output in stream][-1].outputs[0].token_ids) == 100
        else:
            with pytest.raises(EngineDeadError, match="connection"):
                async for _ in stream:
                    pass
        assert engine.errored is not recovery

    asyncio.run(asyncio.wait_for(run(), 120))


def test_event_loop_closed_with_waiters_does_not_block_the_next(llm):
    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(llm.add_request("left", PROMPT, long_running()))
    task = loop.create_task(anext(stream))
    loop.run_until_complete(asyncio.sleep(0))
    task._log_destroy_pending = False
    loop.close()

    async def run():
        outputs = await asyncio.gather(*(answer(llm, PROMPT, greedy(12)) for _ in range(2)))
        await llm.abort("left")
        await eventually(lambda: is_empty(llm))
        return outputs

    assert [len(output.outputs[0].token_ids) for output in asyncio.run(run())] == [12, 12]


def test_abort_during_tokenization_is_not_lost(llm):
    async def run():
        task = asyncio.create_task(answer(llm, "word " * 700, long_running(), "early"))
        await asyncio.sleep(0)
        assert await llm.get_num_unfinished_requests() == 1
        await llm.abort("early")
        output = await task
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == []
        assert await is_empty(llm)

    asyncio.run(run())


def test_unread_stream_is_aborted_when_it_is_closed(llm):
    async def run():
        stream = await llm.add_request("unread", PROMPT, long_running())
        await stream.aclose()
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


def test_shutdown_from_another_thread_ends_every_stream(make_small_engine):
    engine = make_small_engine(max_model_len=512)
    outcomes = []

    async def run():
        async def request():
            try:
                await answer(engine, PROMPT, SamplingParams(max_tokens=400, ignore_eos=True))
            except EngineDeadError as error:
                outcomes.append(str(error))

        tasks = [asyncio.create_task(request()) for _ in range(20)]

        async def all_sent():
            return engine.output_processor.num_slots_in_use == 20

        await eventually(all_sent)
        sent.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)

    sent = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(run(), debug=True))
    thread.start()
    assert sent.wait(30)
    engine.shutdown()
    thread.join(30)
    assert not thread.is_alive()
    assert len(outcomes) == 20


def test_shutdown_is_quick_although_the_app_has_forked(make_small_engine):
    engine = make_small_engine(max_model_len=512)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        started = time.monotonic()
        engine.shutdown(timeout=50)
        assert time.monotonic() - started < 40, (
            "the core waited for the forked child, which holds its standard input open"
        )
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_each_call_after_a_death_raises_an_error_object_of_its_own(make_small_engine):
    engine = make_small_engine(max_model_len=512, recovery=False)
    os.kill(engine.cores.first.supervisor.core.process.pid, 9)

    async def run():
        errors = []
        for _ in range(3):
            with pytest.raises(EngineDeadError) as caught:
                await answer(engine, PROMPT, greedy(3))
            errors.append(caught.value)
        return errors

    assert len({id(error) for error in asyncio.run(run())}) == 3
