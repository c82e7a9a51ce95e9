"""Outputs as their consumer sees them: three kinds of output, early ends, slow consumers, several event loops."""

import asyncio
import gc
import gzip
import itertools
import shutil
import threading
from pathlib import Path

import pytest

from vllm_mp import EngineError, RequestOutputKind, SamplingParams
from vllm_mp.testing.engines import answer, eventually, greedy, is_empty

PROMPT = "The quick brown fox"


def params(kind, max_tokens=24, **fields):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=kind, **fields)


async def collect(engine, kind, prompt=PROMPT, **fields):
    return [output async for output in engine.generate(prompt, params(kind, **fields))]


@pytest.mark.essential
def test_three_kinds_of_output_give_the_same_answer(llm):
    async def run():
        return await asyncio.gather(*(collect(llm, kind) for kind in RequestOutputKind))

    cumulative, delta, final = asyncio.run(run())
    assert len(final) == 1
    whole = final[0].outputs[0]
    assert len(whole.token_ids) == 24
    assert len(cumulative) > 1
    assert len(delta) > 1
    assert cumulative[-1].outputs[0].text == whole.text == "".join(output.outputs[0].text for output in delta)
    assert cumulative[-1].outputs[0].token_ids == whole.token_ids
    assert [token for output in delta for token in output.outputs[0].token_ids] == whole.token_ids
    for earlier, later in itertools.pairwise(cumulative):
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)
    for outputs in (cumulative, delta, final):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert outputs[-1].metrics.arrival_time <= outputs[-1].metrics.first_token_time


def test_wide_characters_are_never_cut(real_llm):
    text = "日本の首都は"
    outputs = asyncio.run(collect(real_llm, RequestOutputKind.DELTA, prompt=text, max_tokens=24))
    pieces = [output.outputs[0].text for output in outputs]
    assert "�" not in "".join(pieces[:-1])
    assert any(ord(character) > 0x2000 for character in "".join(pieces)), "the answer has no wide character to cut"
    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
    decode = real_llm.get_tokenizer().decode
    assert "".join(pieces) == decode(outputs[0].prompt_token_ids + tokens)[len(decode(outputs[0].prompt_token_ids)) :]


@pytest.mark.essential
def test_slow_consumer_gets_all_tokens_in_fewer_outputs_and_delays_no_other(llm):
    async def run():
        slow = llm.generate(PROMPT, params(RequestOutputKind.DELTA, 40))
        pieces = [(await anext(slow)).outputs[0]]
        fast = await answer(llm, PROMPT, params(RequestOutputKind.FINAL_ONLY, 40))  # while the slow consumer waits
        pieces += [output.outputs[0] async for output in slow]
        return fast.outputs[0], pieces

    fast, pieces = asyncio.run(run())
    assert len(pieces) < 20
    assert "".join(piece.text for piece in pieces) == fast.text
    assert [token for piece in pieces for token in piece.token_ids] == fast.token_ids


@pytest.mark.essential
def test_leaving_the_loop_early_aborts_in_the_core(llm):
    async def run():
        async for _ in llm.generate(PROMPT, params(RequestOutputKind.DELTA, 900)):
            break
        gc.collect()
        await eventually(lambda: is_empty(llm))
        assert await llm.get_num_unfinished_requests() == 0

    asyncio.run(run())


@pytest.mark.essential
def test_cancelling_the_task_aborts_in_the_core(llm):
    async def run():
        started = asyncio.Event()

        async def consume():
            async for _ in llm.generate(PROMPT, params(RequestOutputKind.DELTA, 900)):
                started.set()

        task = asyncio.create_task(consume())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: is_empty(llm))

    asyncio.run(run())


@pytest.mark.essential
def test_abort_ends_the_stream_and_keeps_the_tokens_so_far(llm):
    async def run():
        outputs = []
        async for output in llm.generate(PROMPT, params(RequestOutputKind.CUMULATIVE, 900), "to-abort"):
            outputs.append(output)
            if len(outputs) == 3:
                await llm.abort(["to-abort", "unknown"])
        await llm.abort("to-abort")
        await eventually(lambda: is_empty(llm))
        return outputs

    last = asyncio.run(run())[-1]
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert len(last.outputs[0].token_ids) >= 3
    assert last.outputs[0].text


def test_request_is_computed_before_its_stream_is_read(llm):
    async def run():
        stream = await llm.add_request("early", PROMPT, params(RequestOutputKind.FINAL_ONLY, 10))
        await eventually(lambda: is_empty(llm))
        return [output async for output in stream]

    (output,) = asyncio.run(run())
    assert output.request_id == "early"
    assert len(output.outputs[0].token_ids) == 10


@pytest.mark.essential
def test_same_seed_gives_the_same_answer_and_other_seeds_differ(llm):
    def sampled(seed):
        return SamplingParams(temperature=1.0, seed=seed, max_tokens=16, output_kind=RequestOutputKind.FINAL_ONLY)

    async def run():
        return await asyncio.gather(*(answer(llm, PROMPT, sampled(seed)) for seed in (1, 1, 2, 3, None, None)))

    first, again, *others = [output.outputs[0].token_ids for output in asyncio.run(run())]
    assert first == again
    assert len({tuple(answer_ids) for answer_ids in [first, *others]}) == 5


def test_stop_tokens_end_the_answer_and_are_not_in_its_text(llm):
    whole = asyncio.run(answer(llm, PROMPT, greedy(12, ignore_eos=True))).outputs[0]
    stop = whole.token_ids[7]
    first = whole.token_ids.index(stop)

    def stopping(**fields):
        return asyncio.run(answer(llm, PROMPT, greedy(12, stop_token_ids=[stop], **fields))).outputs[0]

    without, included = stopping(), stopping(include_stop_str_in_output=True)
    assert without.token_ids == included.token_ids == whole.token_ids[: first + 1]
    assert without.finish_reason == included.finish_reason == "stop"
    assert without.stop_reason == stop
    decode = llm.get_tokenizer().decode
    assert whole.text.startswith(included.text)
    assert included.text == without.text + decode([stop])
    assert len(stopping(min_tokens=first + 1).token_ids) > first + 1


def test_without_detokenization_outputs_have_only_token_ids(llm):
    output = asyncio.run(answer(llm, PROMPT, greedy(5, detokenize=False)))
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 5


def test_each_form_of_a_prompt_gives_the_same_answer(llm):
    ids = llm.get_tokenizer()(PROMPT).input_ids

    async def run():
        forms = [PROMPT, ids, tuple(ids), {"prompt": PROMPT}, {"prompt_token_ids": ids}]
        outputs = [await answer(llm, form, greedy(8)) for form in forms]
        return outputs + [output async for output in llm.generate(None, greedy(8), prompt_token_ids=ids)]

    outputs = asyncio.run(run())
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert outputs[0].prompt == PROMPT
    assert all(output.prompt_token_ids == ids for output in outputs)


def test_engine_serves_several_event_loops_in_succession(llm):
    texts = {asyncio.run(answer(llm, PROMPT, greedy(6))).outputs[0].text for _ in range(3)}
    assert len(texts) == 1


def test_request_of_an_ended_event_loop_is_aborted_in_the_next(llm):
    async def start_and_leave():
        stream = llm.generate(PROMPT, params(RequestOutputKind.DELTA, 900))
        await anext(stream)

    async def wait_until_empty():
        await eventually(lambda: is_empty(llm))

    asyncio.run(start_and_leave())
    asyncio.run(wait_until_empty())


def test_second_event_loop_at_the_same_time_is_refused(llm):
    async def run():
        await llm.check_health()
        caught = []

        def other():
            try:
                asyncio.run(llm.check_health())
            except RuntimeError as error:
                caught.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        await asyncio.to_thread(thread.join)
        return caught

    (message,) = asyncio.run(run())
    assert "another thread" in message


def test_profile_of_the_core_is_in_the_folder_that_stop_profile_returns(llm):
    async def run():
        with pytest.raises(EngineError, match="call start_profile first"):
            await llm.stop_profile()
        await llm.start_profile()
        await answer(llm, PROMPT, greedy(4))
        return Path(await llm.stop_profile())

    folder = asyncio.run(run())
    (trace,) = folder.iterdir()
    assert b'"name"' in gzip.decompress(trace.read_bytes())
    shutil.rmtree(folder)
