"""Requests with the same beginning share its blocks in the prefix cache, and their answers do not change."""

import asyncio
import contextlib

import pytest

from vllm_mp import SamplingParams, wire
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.testing.engines import answer, eventually, greedy, is_empty, rest, running_engine

pytestmark = pytest.mark.usefixtures("forked_cores")

SHARED = "The engine has two halves, which run apart and talk over a socket. " * 8


@pytest.fixture(scope="module")
def without_cache(small_model):
    """An engine without a prefix cache, whose steps have room for any prompt of these tests."""
    with running_engine(small_model, enable_prefix_caching=False, max_num_batched_tokens=512) as engine:
        yield engine


async def ask(engine, tail):
    return await answer(engine, SHARED + tail, greedy(12, ignore_eos=True))


def test_shared_beginning_is_computed_once_and_changes_no_answer(llm, without_cache):
    tails = ["The first half", "The second half", "Why?"]

    async def run(engine):
        await engine.reset_prefix_cache()
        return [await ask(engine, tail) for tail in [*tails, tails[0]]]

    cached, computed = asyncio.run(run(llm)), asyncio.run(run(without_cache))
    assert [output.num_cached_tokens for output in computed] == [0] * 4
    length = len(llm.get_tokenizer()(SHARED).input_ids)
    assert cached[0].num_cached_tokens == 0
    for output in cached[1:]:
        assert length - 16 <= output.num_cached_tokens < len(output.prompt_token_ids)
    assert len(cached[3].prompt_token_ids) - cached[3].num_cached_tokens <= 16
    for from_cache, without in zip(cached, computed, strict=True):
        assert from_cache.outputs[0].token_ids == without.outputs[0].token_ids


def test_conversation_finds_its_earlier_turns_in_the_cache(llm):
    async def run():
        first = await ask(llm, "Tell me more.")
        ids = first.prompt_token_ids + first.outputs[0].token_ids
        return len(ids), await answer(llm, [*ids, 504, 2019], greedy(4))

    length, second = asyncio.run(run())
    assert second.num_cached_tokens >= length - 17


@pytest.mark.essential
def test_prompt_is_not_found_after_a_reset_or_with_another_salt(llm):
    async def run():
        await ask(llm, "again")
        found = (await ask(llm, "again")).num_cached_tokens
        salted = await answer(llm, {"prompt": SHARED + "again", "cache_salt": "tenant"}, greedy(2))
        await llm.reset_prefix_cache()
        after = await ask(llm, "again")
        await eventually(lambda: is_empty(llm))
        return found, salted.num_cached_tokens, after.num_cached_tokens

    found, salted, after = asyncio.run(run())
    assert found > 0
    assert salted == after == 0


def test_running_requests_are_computed_again_with_the_same_tokens_if_the_reset_is_theirs_too(llm):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)

    async def run():
        expected = (await rest(llm.generate(SHARED, params))).token_ids
        stream = llm.generate(SHARED, params)
        await anext(stream)
        before = (await llm.core_status())["num_preemptions"]
        assert await llm.reset_prefix_cache()
        kept = (await llm.core_status())["num_preemptions"]
        assert await llm.reset_prefix_cache(reset_running_requests=True)
        preempted = (await llm.core_status())["num_preemptions"]
        assert (await rest(stream)).token_ids == expected
        return kept - before, preempted - before

    assert asyncio.run(run()) == (0, 1)


@pytest.mark.essential
def test_requests_that_arrive_together_compute_their_shared_beginning_once(llm):
    async def run():
        await llm.reset_prefix_cache()
        together = await asyncio.gather(*(ask(llm, str(i)) for i in range(6)))
        await llm.reset_prefix_cache()
        return together, [await ask(llm, str(i)) for i in range(6)]

    together, one_by_one = asyncio.run(run())
    length = len(llm.get_tokenizer()(SHARED).input_ids)
    assert sum(output.num_cached_tokens >= length - 16 for output in together) == 5
    for with_others, alone in zip(together, one_by_one, strict=True):
        assert with_others.outputs[0].token_ids == alone.outputs[0].token_ids


def test_concurrent_requests_share_blocks_of_an_earlier_request(make_small_engine):
    engine = make_small_engine(max_num_batched_tokens=32, max_num_seqs=16)

    async def run():
        first = await ask(engine, "0")
        return first, await asyncio.gather(*(ask(engine, str(i % 3)) for i in range(6)))

    first, others = asyncio.run(run())
    assert first.num_cached_tokens == 0
    assert all(output.num_cached_tokens > 80 for output in others)
    assert all(
        output.outputs[0].token_ids == first.outputs[0].token_ids
        for output in others
        if output.prompt_token_ids == first.prompt_token_ids
    )


def test_without_a_prefix_cache_only_requests_of_one_group_share_their_prompt(without_cache):
    prompt = wire.pack_ids(list(range(1000, 1100)))

    def ask_together(groups):
        """Send a request for each group; return how many tokens each found in the cache, and the answers."""
        with contextlib.closing(CoreConnection(without_cache.cores.first.supervisor.core.connection.address)) as client:
            welcome, _ = client.greet(10, lambda: None)
            params = greedy(4, ignore_eos=True, seed=1)
            for slot, group in enumerate(groups):
                client.send(wire.AddRequest(welcome.incarnation, slot, "x", prompt, params, group=group))
            found, answers, num_ended = [0] * len(groups), [[] for _ in groups], 0
            while num_ended < len(groups):
                output = wire.decode_core_message(client._socket.recv())
                for slot, token, _ in zip(*wire.unpack_tokens(output), strict=True):
                    answers[slot].append(token)
                for slot, count in output.cached:
                    found[slot] = count
                num_ended += len(output.finished)
        return found, answers

    found, answers = ask_together(["first", "first", "second", "", "", "first"])
    assert found == [0, 96, 0, 0, 0, 96]
    assert answers == [answers[0]] * 6
    assert ask_together(["first", ""]) == ([0, 0], answers[:2])


@pytest.fixture(params=[True, False], ids=["with cache", "without cache"])
def engine(request, make_small_engine):
    """An engine with a prefix cache and one without, both with 512 tokens a step."""
    if request.param:
        return make_small_engine(max_num_batched_tokens=512)
    return request.getfixturevalue("without_cache")


def test_completions_of_a_request_read_its_prompt_once(engine):
    params = SamplingParams(n=4, max_tokens=8, ignore_eos=True, seed=1)

    async def run():
        async def all_wait():
            return (await engine.core_status())["num_waiting"] == 4

        before = (await engine.core_status())["step"]
        await engine.pause_generation("wait")
        request = asyncio.create_task(answer(engine, list(range(1000, 1325)), params))
        await eventually(all_wait)
        await engine.resume_generation()
        assert [len(completion.token_ids) for completion in (await request).outputs] == [8] * 4
        return (await engine.core_status())["step"] - before

    assert asyncio.run(run()) == 8, "a prompt read four times would take 3 steps to read in place of 1"


def test_salt_that_is_not_a_short_text_is_refused(llm):
    for salt in (3, "x" * 2000, "\ud800"):
        with pytest.raises(ValueError, match=r"cache_salt|Unicode"):
            asyncio.run(answer(llm, {"prompt": "x", "cache_salt": salt}, greedy(2)))
