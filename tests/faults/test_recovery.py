"""No output is lost, repeated or changed when the core dies, in any state of a request."""

import asyncio
import os
import signal
import time

import pytest
from support.engine_fixtures import SLOW_STEPS

from vllm_mp import (
    AsyncEngineArgs,
    AsyncLLM,
    EngineDeadError,
    EngineStartError,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
)
from vllm_mp.testing.engines import ENGINE, answer, eventually, greedy, is_empty, num_waiting_is, running_engine

pytestmark = pytest.mark.usefixtures("forked_cores")

PROMPT = "The history of the city begins"
LONG_PROMPT = list(range(1000, 1320))


@pytest.fixture(scope="module")
def engine(small_model):
    """An engine with small steps, so that requests wait and prompts are chunked, and with enough restarts."""
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_core_restarts": 1000}
    with running_engine(small_model, fault_injection=SLOW_STEPS, **options) as engine:
        yield engine


def kill(engine, signum=signal.SIGKILL):
    os.kill(engine.cores.first.supervisor.core.process.pid, signum)


def sampled(max_tokens, seed=7, **params):
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=max_tokens, ignore_eos=True, **params)


class Consumer:
    """Consumes the outputs of a request and compares each with the earlier outputs."""

    def __init__(self, engine, prompt, params):
        self.stream = engine.generate(prompt, params)
        self.delta = params.output_kind == RequestOutputKind.DELTA
        self.seen = {}
        self.ends = {}
        self.prompt_logprobs = None

    def num_tokens(self):
        return min((len(ids) for _, ids, _ in self.seen.values()), default=0)

    async def run(self):
        async for output in self.stream:
            self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
            for piece in output.outputs:
                text, ids, logprobs = self.seen.get(piece.index, ("", [], []))
                if self.delta:
                    now = text + piece.text, ids + piece.token_ids, logprobs + (piece.logprobs or [])
                else:
                    now = piece.text, piece.token_ids, piece.logprobs or []
                    assert now[0].startswith(text), "delivered text has changed"
                    assert now[1][: len(ids)] == ids
                    assert now[2][: len(logprobs)] == logprobs
                self.seen[piece.index] = now
                self.ends[piece.index] = piece.finish_reason, piece.stop_reason, piece.cumulative_logprob
        return self


def assert_same(got, expected):
    """Raise AssertionError unless two consumers received the same, except for rounding of log-probabilities."""
    assert got.seen.keys() == expected.seen.keys()
    for index, (text, ids, logprobs) in got.seen.items():
        other_text, other_ids, other_logprobs = expected.seen[index]
        assert ids == other_ids
        assert text == other_text
        assert len(logprobs) == len(other_logprobs)
        for a, b in zip(logprobs, other_logprobs, strict=True):
            assert a.keys() == b.keys()
            assert {t: x.logprob for t, x in a.items()} == pytest.approx({t: x.logprob for t, x in b.items()}, abs=1e-3)
        assert got.ends[index][:2] == expected.ends[index][:2]
        assert got.ends[index][2] == pytest.approx(expected.ends[index][2], abs=1e-3)
    assert (got.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    if got.prompt_logprobs is not None:
        assert len(got.prompt_logprobs) == len(expected.prompt_logprobs)


async def undisturbed(engine, requests):
    return await asyncio.gather(*(Consumer(engine, *request).run() for request in requests))


async def disturbed(engine, requests, moment, strike=kill):
    """Return the consumers of `requests`, after `strike(engine)` at the moment when `moment(consumers)` is true.

    If this process does not run at that moment, on a busy machine, the requests are sent again.
    """
    for _ in range(10):
        consumers = [Consumer(engine, *request) for request in requests]
        tasks = [asyncio.create_task(consumer.run()) for consumer in consumers]

        async def moment_has_come_or_gone(consumers=consumers, tasks=tasks):
            return all(task.done() for task in tasks) or moment(consumers)

        await eventually(moment_has_come_or_gone)
        if not all(task.done() for task in tasks):
            break
    assert not all(task.done() for task in tasks), "all requests finished before the moment came, each time"
    restarts = engine.cores.first.supervisor.num_restarts
    strike(engine)
    await asyncio.gather(*tasks)
    assert engine.cores.first.supervisor.num_restarts == restarts + 1
    await eventually(lambda: is_empty(engine))
    return consumers


def check(engine, requests, moment, strike=kill):
    async def run():
        expected = await undisturbed(engine, requests)
        for got, other in zip(await disturbed(engine, requests, moment, strike), expected, strict=True):
            assert_same(got, other)

    asyncio.run(run())


def requests_of_every_kind(max_tokens):
    kinds = RequestOutputKind
    return [
        (PROMPT, greedy(max_tokens, ignore_eos=True)),
        (PROMPT, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=3)),
        (PROMPT, sampled(max_tokens, output_kind=kinds.DELTA, logprobs=0)),
        ("Rivers and", sampled(max_tokens, presence_penalty=0.7, frequency_penalty=0.2, repetition_penalty=1.1)),
        ("Stones", sampled(max_tokens, min_p=0.02, top_k=40, top_p=0.9, logit_bias={500: 2.0}, bad_words=["the"])),
    ]


@pytest.mark.essential
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV], ids=lambda signum: signum.name)
def test_requests_of_every_kind_continue_after_a_death(engine, signum):
    check(
        engine,
        requests_of_every_kind(14),
        lambda consumers: all(consumer.num_tokens() >= 4 for consumer in consumers[1:]),
        lambda engine: kill(engine, signum),
    )


def test_each_completion_of_a_prompt_continues_at_its_position(engine):
    requests = [(PROMPT, sampled(12, n=4, logprobs=1)), (PROMPT, sampled(12, n=2, output_kind=RequestOutputKind.DELTA))]
    check(engine, requests, lambda consumers: consumers[0].num_tokens() >= 5)


def test_waiting_requests_keep_their_turn(engine):
    requests = [(f"Number {i} is", sampled(8, seed=i)) for i in range(12)]
    check(engine, requests, lambda consumers: consumers[0].num_tokens() >= 3 and consumers[11].num_tokens() == 0)


def test_partially_computed_prompt_is_computed_again(engine):
    requests = [(LONG_PROMPT, greedy(4, ignore_eos=True, prompt_logprobs=1)), (PROMPT, sampled(30))]

    def prompt_is_half_computed(consumers):
        streams = [
            stream
            for stream, _ in engine.cores.first.requests.live()
            if len(stream.prompt_token_ids) == len(LONG_PROMPT)
        ]
        known = streams[0]._prompt_logprobs if streams else None
        return known is not None and 80 < len(known) < 260

    check(engine, requests, prompt_is_half_computed)


def test_half_matched_stop_string_is_completed_by_the_next_core(engine):
    text = asyncio.run(answer(engine, PROMPT, greedy(24, ignore_eos=True))).outputs[0].text
    stop = text[20:70]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop])
    shown_text = []

    def is_half_matched(consumers):
        shown = consumers[0].seen.get(0, ("",))[0]
        completions = [completion for _, completion in engine.cores.first.requests.live()]
        shown_text[:] = [shown]
        return len(shown) == 20 and completions and len(completions[0].token_ids) > 7

    check(engine, [(PROMPT, params)], is_half_matched)
    assert shown_text == [text[:20]]


def test_half_a_character_is_completed_by_the_next_core(engine):
    pieces = engine.get_tokenizer().encode("\N{GRINNING FACE}\N{HOT BEVERAGE}", add_special_tokens=False)
    params = SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True, allowed_token_ids=pieces)
    tokenizer = engine.get_tokenizer()

    def ends_with_half_a_character(consumers):
        live = engine.cores.first.requests.live()
        return live and len(live[0][1].token_ids) > 5 and tokenizer.decode(live[0][1].token_ids).endswith("\ufffd")

    check(engine, [(PROMPT, params)], ends_with_half_a_character)


def test_vector_is_computed_again_after_core_is_killed(engine):
    async def vector(prompt):
        (output,) = [output async for output in engine.encode(prompt, PoolingParams())]
        return output.outputs.data

    async def run():
        expected = await vector(LONG_PROMPT)
        await engine.reset_prefix_cache()
        task = asyncio.create_task(vector(LONG_PROMPT))

        async def has_begun():
            return bool(engine.cores.first.supervisor.status().step_requests)

        await eventually(has_begun)
        kill(engine)
        assert await task == pytest.approx(expected, abs=1e-5)

    asyncio.run(run())


def test_request_aborted_as_the_core_dies_stays_aborted_and_others_continue(engine):
    async def run():
        expected = (await answer(engine, PROMPT, greedy(16, ignore_eos=True))).outputs[0].token_ids
        aborted = Consumer(engine, PROMPT, sampled(500))
        task = asyncio.create_task(aborted.run())
        other = asyncio.create_task(answer(engine, PROMPT, greedy(16, ignore_eos=True)))

        async def has_begun():
            return aborted.num_tokens() > 3

        await eventually(has_begun)
        (request_id,) = (s.request_id for s, _ in engine.cores.first.requests.live() if s.params.max_tokens == 500)
        await engine.abort(request_id)
        kill(engine)
        await task
        assert aborted.ends[0][0] == "abort"
        assert (await other).outputs[0].token_ids == expected
        await eventually(lambda: is_empty(engine))
        await engine.wait_for_requests_to_drain(10)

    asyncio.run(run())


def test_death_between_requests_affects_no_request(engine):
    before = asyncio.run(answer(engine, PROMPT, greedy(5))).outputs[0].token_ids
    kill(engine)
    assert asyncio.run(answer(engine, PROMPT, greedy(5))).outputs[0].token_ids == before
    kill(engine)
    assert asyncio.run(engine.core_status())["num_running"] == 0


def test_blocked_event_loop_delays_no_restart_and_loses_nothing(engine):
    def block(engine):
        restarts = engine.cores.first.supervisor.num_restarts
        kill(engine)
        deadline = time.monotonic() + 120
        while engine.cores.first.supervisor.num_restarts == restarts:
            assert time.monotonic() < deadline
            time.sleep(0.01)  # blocks the event loop on purpose

    check(engine, requests_of_every_kind(16)[1:], lambda consumers: consumers[0].num_tokens() >= 4, block)


def test_unanswered_calls_are_answered_by_the_next_core(engine, monkeypatch):
    monkeypatch.setattr("vllm_mp.client.cores.core_group._PING_TIMEOUT_S", 60)  # a busy machine starts a core slowly

    async def run():
        await engine.check_health()
        kill(engine, signal.SIGSTOP)
        calls = [
            asyncio.create_task(call)
            for call in (engine.core_status(), engine.reset_prefix_cache(), engine.check_health())
        ]

        async def calls_are_sent():
            return len(engine.cores.first._calls) == len(calls)

        await eventually(calls_are_sent)
        old = engine.cores.first.supervisor.core.process.pid
        kill(engine)
        status, *_ = await asyncio.gather(*calls)
        assert status["pid"] != old
        assert status["restarts"] == engine.cores.first.supervisor.num_restarts

    asyncio.run(run())


@pytest.mark.essential
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause_stays_in_force_after_core_is_killed(engine, mode):
    async def run():
        expected = (await answer(engine, PROMPT, greedy(16, ignore_eos=True))).outputs[0].token_ids
        early = Consumer(engine, PROMPT, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        tasks = [asyncio.create_task(early.run())]

        async def has_begun():
            return early.num_tokens() > 3

        await eventually(has_begun)
        pause = asyncio.create_task(engine.pause_generation(mode))
        if mode != "wait":
            await pause
        late = Consumer(engine, PROMPT, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
        tasks.append(asyncio.create_task(late.run()))

        async def both_are_sent():
            return await engine.get_num_unfinished_requests() == (2 if mode != "abort" else 1)

        await eventually(both_are_sent)
        kill(engine)
        await pause
        assert await engine.is_paused()
        status = await engine.core_status()
        assert status["num_waiting"] == (2 if mode == "keep" else 1)
        assert late.num_tokens() == 0
        if mode == "wait":
            assert early.ends[0][0] == "length"
        await engine.resume_generation()
        await asyncio.gather(*tasks)
        assert late.seen[0][1] == expected
        if mode == "abort":
            assert early.ends[0][0] == "abort"
        else:
            assert early.seen[0][1] == expected

    asyncio.run(run())


@pytest.mark.parametrize(("level", "tags"), [(2, ()), (1, ("weights",))], ids=["level 2", "level 1, weights awake"])
def test_sleep_stays_in_force_after_core_is_killed(engine, level, tags):
    async def run():
        requests = requests_of_every_kind(14)[:3]
        expected = await undisturbed(engine, requests)
        consumers = [Consumer(engine, *request) for request in requests]
        tasks = [asyncio.create_task(consumer.run()) for consumer in consumers[:2]]

        async def has_begun():
            return consumers[1].num_tokens() > 3

        await eventually(has_begun)
        await engine.sleep(level, mode="keep")
        if tags:
            await engine.wake_up(tags)
        (completion,) = (
            completion for stream, completion in engine.cores.first.requests.live() if stream.params.logprobs == 3
        )

        async def all_tokens_are_consumed():
            return consumers[1].num_tokens() == len(completion.token_ids)

        await eventually(all_tokens_are_consumed)
        num_tokens = consumers[1].num_tokens()
        tasks.append(asyncio.create_task(consumers[2].run()))
        kill(engine)
        status = await engine.core_status()
        assert (status["is_sleeping"], status["sleep_level"], status["num_running"]) == (True, level, 0)
        await eventually(num_waiting_is(engine, 3))
        assert consumers[1].num_tokens() == num_tokens
        assert consumers[2].num_tokens() == 0
        if tags:
            await engine.wake_up([tag for tag in ("weights", "kv_cache") if tag not in tags])
        else:
            await engine.wake_up()
        assert not await engine.is_sleeping()
        await asyncio.gather(*tasks)
        for consumer, other in zip(consumers, expected, strict=True):
            assert_same(consumer, other)
        if tags:
            kill(engine)
            assert not await engine.is_sleeping(), "the next core sleeps although the engine was awake"
        await eventually(lambda: is_empty(engine))

    asyncio.run(run())


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
def test_unanswered_sleep_or_wake_up_is_carried_out_by_the_next_core(engine, call):
    async def run():
        if call == "wake_up":
            await engine.sleep(2, mode="keep")
        stream = asyncio.create_task(answer(engine, PROMPT, greedy(8, ignore_eos=True)))
        kill(engine, signal.SIGSTOP)
        unanswered = asyncio.create_task(getattr(engine, call)())

        async def calls_are_sent():
            return len(engine.cores.first._calls) == 1

        await eventually(calls_are_sent)
        kill(engine)
        await unanswered
        assert await engine.is_sleeping() == (call == "sleep")
        await engine.wake_up()
        assert len((await stream).outputs[0].token_ids) == 8
        await eventually(lambda: is_empty(engine))

    asyncio.run(run())


def test_sleep_and_pause_are_inherited_by_a_third_core_if_the_second_dies_first(engine):
    async def run():
        await engine.sleep(1, mode="keep")
        await engine.wake_up(["weights"])
        await engine.pause_generation("keep")
        source = engine.cores.first.supervisor._source
        kill(engine)

        async def next_core_loads():
            return source._process is not None

        await eventually(next_core_loads)
        os.kill(source._process.pid, signal.SIGKILL)
        status = await engine.core_status()
        assert (status["is_sleeping"], status["sleep_level"], status["is_paused"]) == (True, 1, True)
        await engine.wake_up(["kv_cache"])
        await engine.resume_generation()
        assert len((await answer(engine, PROMPT, greedy(5, ignore_eos=True))).outputs[0].token_ids) == 5
        kill(engine)
        status = await engine.core_status()
        assert (status["is_sleeping"], status["is_paused"]) == (False, False)

    asyncio.run(run())


def test_core_that_dies_while_loading_is_replaced(engine):
    async def run():
        task = asyncio.create_task(answer(engine, PROMPT, greedy(20, ignore_eos=True)))
        restarts, source = engine.cores.first.supervisor.num_restarts, engine.cores.first.supervisor._source

        async def is_in_a_step():
            return bool(engine.cores.first.supervisor.status().step_requests)

        await eventually(is_in_a_step)
        kill(engine)

        async def next_core_loads():
            return source._process is not None

        await eventually(next_core_loads)
        os.kill(source._process.pid, signal.SIGKILL)
        assert len((await task).outputs[0].token_ids) == 20
        assert engine.cores.first.supervisor.num_restarts == restarts + 1
        assert (await engine.core_status())["incarnation"] == source._num_started

    asyncio.run(run())


def test_stopped_core_is_replaced_while_it_serves_and_while_it_loads(make_small_engine):
    engine = make_small_engine(engine_iteration_timeout_s=2.0)

    async def run():
        expected = (await answer(engine, PROMPT, greedy(24, ignore_eos=True))).outputs[0].token_ids
        task = asyncio.create_task(answer(engine, PROMPT, greedy(24, ignore_eos=True)))

        async def is_in_a_step():
            return bool(engine.cores.first.supervisor.status().step_requests)

        await eventually(is_in_a_step)
        kill(engine, signal.SIGSTOP)
        source = engine.cores.first.supervisor._source

        async def next_core_loads():
            return source._process is not None

        await eventually(next_core_loads)
        os.kill(source._process.pid, signal.SIGSTOP)
        assert (await task).outputs[0].token_ids == expected
        assert (await engine.core_status())["incarnation"] >= 3

    asyncio.run(run())


@pytest.mark.slow
def test_no_request_is_blamed_for_signals_that_stop_several_cores(make_small_engine):
    engine = make_small_engine(engine_iteration_timeout_s=1.0, fault_injection="slow@step=*,seconds=0.1")

    async def run():
        tasks = [asyncio.create_task(answer(engine, prompt, greedy(8, ignore_eos=True))) for prompt in (PROMPT, "Two")]
        for incarnation in (1, 2):

            async def is_in_a_step(incarnation=incarnation):
                status = engine.cores.first.supervisor.status()
                return status is not None and status.incarnation == incarnation and bool(status.step_requests)

            await eventually(is_in_a_step)
            kill(engine, signal.SIGSTOP)
        for task in tasks:
            assert len((await task).outputs[0].token_ids) == 8
        assert (await engine.core_status())["incarnation"] == 3

    asyncio.run(run())


@pytest.mark.essential
def test_stopped_idle_core_is_replaced_when_a_request_arrives(make_small_engine):
    engine = make_small_engine(engine_iteration_timeout_s=1.0)
    kill(engine, signal.SIGSTOP)
    assert len(asyncio.run(answer(engine, PROMPT, greedy(5, ignore_eos=True))).outputs[0].token_ids) == 5
    assert engine.cores.first.supervisor.num_restarts == 1


@pytest.mark.essential
def test_every_stream_and_call_fails_with_the_cause_beyond_the_restart_limit(make_small_engine):
    engine = make_small_engine(max_core_restarts=1)

    async def run():
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=900, ignore_eos=True))
        await anext(stream)
        kill(engine, signal.SIGSEGV)

        async def next_core_serves():
            return (await engine.core_status())["restarts"] == 1

        await eventually(next_core_serves)
        kill(engine, signal.SIGABRT)
        with pytest.raises(EngineDeadError, match="max_core_restarts=1") as caught:
            async for _ in stream:
                pass
        assert "SIGABRT" in str(caught.value)
        assert "log lines" in str(caught.value)
        for later in (answer(engine, PROMPT, greedy(3)), engine.check_health(), engine.core_status()):
            with pytest.raises(EngineDeadError, match="SIGABRT"):
                await later
        assert engine.errored
        assert "SIGABRT" in str(engine.dead_error)

    asyncio.run(run())


def test_death_of_the_first_core_while_loading_is_an_error_at_once(small_model, monkeypatch):
    from vllm_mp.client.cores.sources.launcher import CoreLauncher

    begin = CoreLauncher.begin

    def begin_and_kill(self):
        begin(self)
        os.kill(self._process.pid, signal.SIGKILL)

    monkeypatch.setattr(CoreLauncher, "begin", begin_and_kill)
    with pytest.raises(EngineStartError, match="SIGKILL"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(small_model), **ENGINE))
