"""Managed requests and streams of text over a real engine."""

import asyncio

import pytest

from vllm_mp import RequestManager, RequestOutputKind, RequestStatus, SamplingParams, stream_generate
from vllm_mp.testing.engines import answer, eventually, greedy

PROMPT = "Once upon a time"
LONG = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)


def test_pieces_of_text_make_the_text_of_the_completion(llm):
    async def run():
        params = SamplingParams(temperature=0, max_tokens=30, output_kind=RequestOutputKind.FINAL_ONLY)
        pieces = [piece async for piece in stream_generate(llm, PROMPT, params, "pieces")]
        assert params.output_kind == RequestOutputKind.FINAL_ONLY
        return pieces, (await answer(llm, PROMPT, params)).outputs[0].text

    pieces, text = asyncio.run(run())
    assert len(pieces) > 1
    assert all(pieces)
    assert "".join(pieces) == text


def test_leaving_the_text_early_aborts_the_request(llm):
    async def run():
        async for _ in stream_generate(llm, PROMPT, LONG, "left"):
            assert llm.output_processor.has_unfinished_requests()
            break

        async def is_over():
            return not llm.output_processor.has_unfinished_requests()

        await eventually(is_over)

    asyncio.run(run())


def test_text_of_several_completions_is_refused(llm):
    async def run():
        await anext(stream_generate(llm, PROMPT, SamplingParams(n=2), "two"))

    with pytest.raises(ValueError, match="n must be 1, got 2"):
        asyncio.run(run())


def test_managed_requests_give_what_generate_gives(llm):
    prompts = [f"{number} little bears" for number in range(8)]

    async def run():
        manager = RequestManager(llm)
        for number, prompt in enumerate(prompts):
            await manager.add_request(str(number), prompt, greedy(12))
        results = [await manager.get_result(str(number)) for number in range(len(prompts))]
        expected = await asyncio.gather(*(answer(llm, prompt, greedy(12)) for prompt in prompts))
        statuses = {await manager.get_request_status(str(number)) for number in range(len(prompts))}
        return results, expected, statuses

    results, expected, statuses = asyncio.run(run())
    assert [result.outputs[0].text for result in results] == [output.outputs[0].text for output in expected]
    assert statuses == {RequestStatus.COMPLETED}


def test_managed_deltas_of_several_completions_make_the_whole(llm):
    params = SamplingParams(
        n=2, temperature=1, seed=5, max_tokens=12, logprobs=1, prompt_logprobs=0, output_kind=RequestOutputKind.DELTA
    )

    async def run():
        manager = RequestManager(llm)
        await manager.add_request("deltas", PROMPT, params)
        deltas = [output async for output in manager.stream("deltas")]
        whole = params.clone()
        whole.output_kind = RequestOutputKind.FINAL_ONLY
        return deltas, await answer(llm, PROMPT, whole)

    deltas, expected = asyncio.run(run())
    assert deltas[0].prompt_logprobs is not None
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])
    for completion in expected.outputs:
        parts = [part for delta in deltas for part in delta.outputs if part.index == completion.index]
        assert "".join(part.text for part in parts) == completion.text
        assert [token for part in parts for token in part.token_ids] == completion.token_ids
        assert [each for part in parts for each in part.logprobs] == completion.logprobs
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == completion.finish_reason


def test_aborted_managed_request_is_cancelled_and_keeps_its_text(llm):
    async def run():
        manager = RequestManager(llm)
        await manager.add_request("long", PROMPT, LONG)
        await anext(manager.stream("long"))
        await manager.abort_request("long")
        result = await manager.get_result("long")
        return result.outputs[0], await manager.get_request_status("long")

    completion, status = asyncio.run(run())
    assert completion.finish_reason == "abort"
    assert completion.text
    assert status == RequestStatus.CANCELLED


def test_managed_request_that_cannot_run_fails_alone(llm):
    async def run():
        manager = RequestManager(llm)
        await manager.add_request("good", PROMPT, greedy(4))
        await manager.add_request("bad", PROMPT, greedy(4), prompt_token_ids=[])
        with pytest.raises(ValueError):
            await manager.get_result("bad")
        assert await manager.get_request_status("bad") == RequestStatus.FAILED
        assert (await manager.get_result("good")).finished

    asyncio.run(run())
