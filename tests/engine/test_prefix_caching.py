"""Requests that begin alike share what has been computed, and answer as if they did not."""

import asyncio

import pytest
from harness import answer, eventually, greedy, is_empty

SHARED = "The engine has two halves, which run apart and talk over a socket. " * 20


async def ask(engine, tail, **knobs):
    return await answer(engine, SHARED + tail, greedy(12, ignore_eos=True, **knobs))


def test_a_shared_beginning_is_computed_once_and_changes_no_answer(make_engine):
    engine, plain = make_engine(), make_engine(enable_prefix_caching=False)
    tails = ["The first half", "The second half", "Why?"]

    async def run(one):
        return [await ask(one, tail) for tail in [*tails, tails[0]]]

    cached, computed = asyncio.run(run(engine)), asyncio.run(run(plain))
    assert [output.num_cached_tokens for output in computed] == [0] * 4
    length = len(engine.get_tokenizer()(SHARED).input_ids)
    assert cached[0].num_cached_tokens == 0
    for output in cached[1:]:
        assert length - 16 <= output.num_cached_tokens < len(output.prompt_token_ids)
    assert len(cached[3].prompt_token_ids) - cached[3].num_cached_tokens <= 16
    for with_cache, without in zip(cached, computed, strict=True):
        assert with_cache.outputs[0].token_ids == without.outputs[0].token_ids


def test_a_conversation_finds_its_earlier_turns(llm):
    async def run():
        first = await ask(llm, "Tell me more.")
        ids = first.prompt_token_ids + first.outputs[0].token_ids
        return len(ids), await answer(llm, [*ids, 504, 2019], greedy(4))

    length, second = asyncio.run(run())
    assert second.num_cached_tokens >= length - 17


def test_reset_and_other_salts_find_nothing(llm):
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


def test_requests_in_flight_together_share_what_the_first_has_computed(make_engine):
    engine = make_engine(max_num_batched_tokens=64, max_num_seqs=16)

    async def run():
        first = await ask(engine, "0")
        return first, await asyncio.gather(*(ask(engine, str(i % 3)) for i in range(12)))

    first, others = asyncio.run(run())
    assert all(output.num_cached_tokens > 200 for output in others)
    assert all(
        output.outputs[0].token_ids == first.outputs[0].token_ids
        for output in others
        if output.prompt_token_ids == first.prompt_token_ids
    )


def test_a_salt_that_is_no_text_is_refused(llm):
    for salt in (3, "x" * 2000, "\ud800"):
        with pytest.raises(ValueError, match=r"cache_salt|Unicode"):
            asyncio.run(answer(llm, {"prompt": "x", "cache_salt": salt}, greedy(2)))
