"""The replay core answers a real client as a core does, with recorded tokens."""

import asyncio
import os
import signal

import numpy as np
import pytest

from vllm_mp import AsyncLLM, EngineError, EngineGenerateError, PoolingParams, RequestOutputKind, SamplingParams
from vllm_mp.core.engine_core import EngineCore
from vllm_mp.replay_core.answers import Answers
from vllm_mp.replay_core.streams import Streams
from vllm_mp.testing.engines import answer, eventually, greedy, is_empty, replay_core

ANSWERS = Answers()
EOS = 2


def expected(prompt, params, max_tokens):
    """Return the token ids that the replay core answers `prompt` with."""
    chosen = ANSWERS.choose(np.asarray(prompt, np.int32), params, max_tokens, [EOS])
    return ANSWERS.prefix(chosen.number, chosen.length).tolist()


@pytest.fixture(scope="module")
def address(default_model, tmp_path_factory):
    with replay_core(tmp_path_factory.mktemp("replay")) as address:
        yield address


@pytest.fixture(scope="module")
def llm(address):
    llm = AsyncLLM.connect(address)
    yield llm
    llm.shutdown()


def test_recorded_answers_are_real_text_with_characters_of_several_tokens(llm):
    text = llm.get_tokenizer().decode(ANSWERS.tokens.reshape(-1).tolist())
    assert " fox " in text
    assert any(ord(character) > 0xFFFF for character in text)


def test_streams_have_the_recorded_tokens_and_their_text(llm):
    async def run():
        params = SamplingParams(
            temperature=0, max_tokens=300, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
        )
        prompts = [[number, 7, 9] for number in range(3, 23)]
        return prompts, params, await asyncio.gather(*(answer(llm, prompt, params) for prompt in prompts))

    prompts, params, outputs = asyncio.run(run())
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == expected(prompt, params, 300)
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids, skip_special_tokens=True)
        assert completion.finish_reason == "length"


def test_answer_depends_on_the_seed_only_with_a_temperature():
    prompt = np.asarray([1, 2, 3], np.int32)

    def index(**params):
        return ANSWERS.choose(prompt, SamplingParams(**params), 5, [EOS]).number

    assert len({index(temperature=0, seed=seed) for seed in range(5)}) == 1
    assert len({index(temperature=1, seed=seed) for seed in range(5)}) == 5


def test_stop_tokens_end_the_answer_after_min_tokens():
    index, position = map(int, np.argwhere(ANSWERS.tokens[:, 20:] == EOS)[0])
    position += 20
    token = int(ANSWERS.tokens[index, position])
    prompt = next(
        prompt
        for number in range(10_000)
        if ANSWERS.choose(prompt := np.asarray([number], np.int32), greedy(1), 1, []).number == index
    )
    assert ANSWERS.choose(prompt, greedy(500), 500, [EOS]).stop_reason == EOS
    stopped = ANSWERS.choose(prompt, greedy(500), 500, [EOS], EOS)
    assert (stopped.reason, stopped.stop_reason) == ("stop", None)
    assert ANSWERS.prefix(index, stopped.length)[-1] == token
    later = ANSWERS.choose(prompt, greedy(500, min_tokens=stopped.length), 500, [EOS])
    assert later.length > stopped.length
    named = ANSWERS.choose(prompt, greedy(500, stop_token_ids=[EOS], ignore_eos=True), 500, [EOS], EOS)
    assert (named.reason, named.stop_reason) == ("stop", EOS)


def test_leaving_a_stream_ends_its_request(llm):
    async def run():
        stream = llm.generate([5, 6], SamplingParams(max_tokens=8000, output_kind=RequestOutputKind.DELTA))
        await anext(stream)
        await stream.aclose()
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


def test_requests_that_it_cannot_answer_fail_alone(llm):
    async def run():
        with pytest.raises(EngineGenerateError, match="no log-probabilities of prompts"):
            await answer(llm, [5], greedy(3, prompt_logprobs=1))
        with pytest.raises(EngineGenerateError, match="no vectors"):
            async for _ in llm.encode([5], PoolingParams()):
                pass
        with pytest.raises(EngineError, match="no operation 'sleep'"):
            await llm.sleep(mode="keep")
        return await answer(llm, [5], greedy(3, ignore_eos=True))

    assert asyncio.run(run()).outputs[0].token_ids == expected([5], greedy(3, ignore_eos=True), 3)


def test_log_probabilities_are_made_up_for_as_many_tokens_as_the_request_wants(llm):
    async def run():
        counts = (None, 0, 3)
        return await asyncio.gather(*[answer(llm, [5], greedy(4, logprobs=n, ignore_eos=True)) for n in counts])

    tokens = expected([5], greedy(4, ignore_eos=True), 4)
    without, chosen, three = [output.outputs[0] for output in asyncio.run(run())]
    assert without.logprobs is None
    assert [list(entry) for entry in chosen.logprobs] == [[token] for token in tokens]
    assert [next(iter(entry)) for entry in three.logprobs] == three.token_ids == tokens
    assert [[value.rank for value in entry.values()] for entry in three.logprobs] == [[1, 2, 3]] * 4
    assert three.cumulative_logprob == chosen.cumulative_logprob == -2.0


def test_its_status_has_the_keys_of_a_core(llm):
    async def run():
        await llm.check_health()
        return await llm.core_status()

    status = asyncio.run(run())
    names = {name for name in EngineCore.status.__code__.co_consts if isinstance(name, tuple)} or {()}
    assert set(max(names, key=len)) <= status.keys()
    assert status["heartbeat_age"] < 30


def test_pause_holds_requests_until_it_ends(llm):
    async def run():
        await llm.pause_generation("keep")
        task = asyncio.create_task(answer(llm, [5], greedy(3, ignore_eos=True)))

        async def is_held():
            return (await llm.core_status())["num_waiting"] == 1

        await eventually(is_held)
        assert not task.done()
        await llm.resume_generation()
        assert len((await task).outputs[0].token_ids) == 3
        await llm.pause_generation("keep")
        task = asyncio.create_task(answer(llm, [5], greedy(3)))
        await eventually(is_held)
        await llm.pause_generation("abort")
        await llm.resume_generation()
        return await task

    assert asyncio.run(run()).outputs[0].finish_reason == "abort"


@pytest.mark.extended
def test_streams_continue_on_the_next_replay_core_at_the_address(default_model, tmp_path):
    async def run(llm, pid):
        params = greedy(100, ignore_eos=True)
        stream = llm.generate([7, 8], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        await anext(stream)
        os.kill(pid, signal.SIGKILL)
        with replay_core(tmp_path):
            async for output in stream:
                last = output
        return last.outputs[0].token_ids, expected([7, 8], params, 100)

    with replay_core(tmp_path, "--rate", "50") as address:
        llm = AsyncLLM.connect(address)
        try:
            status = asyncio.run(llm.core_status())
            got, wanted = asyncio.run(run(llm, status["pid"]))
        finally:
            llm.shutdown()
    assert got == wanted


def test_step_gives_each_live_request_its_next_token():
    streams = Streams(ANSWERS)
    params = greedy(3, ignore_eos=True)
    chosen = {slot: ANSWERS.choose(np.asarray([slot], np.int32), params, 3, []) for slot in (4, 9)}
    streams.add(4, chosen[4], 0)
    first = streams.step(1, 1)
    streams.add(9, chosen[9], 2)
    second = streams.step(1, 2)
    assert (first.finished, [end.slot for end in second.finished]) == ([], [9])
    assert np.frombuffer(second.slots, "<u2").tolist() == [4, 9]
    assert np.frombuffer(second.positions, "<u2").tolist() == [1, 2]
    tokens = [int(ANSWERS.tokens[chosen[4].number, 1]), int(ANSWERS.tokens[chosen[9].number, 2])]
    assert np.frombuffer(second.tokens, "<u4").tolist() == tokens
    (end,) = streams.abort([4, 77])
    assert (end.slot, end.num_output_tokens, end.reason, len(streams)) == (4, 2, "abort", 0)
