"""Batches of the tokenizer thread: which requests share one, when it runs, and what each caller gets."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from vllm_mp.client.prompts.microbatch_tokenizer import AsyncMicrobatchTokenizer
from vllm_mp.client.prompts.microbatcher import Microbatcher

LONG_WAIT_S = 3600.0
PROMPTS = ["hello world", "a", "", "the quick brown fox 你好 😀"]


class Recorder:
    """A tokenizer that records the arguments of its calls, can be blocked, and fails on "bad"."""

    model_max_length = 8

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any]]] = []
        self.decodes: list[tuple[Any, dict[str, Any]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.real = real_tokenizer()

    def __call__(self, prompt: Any, **kwargs: Any) -> Any:
        self.calls.append((prompt, kwargs))
        self.entered.set()
        assert self.gate.wait(60)
        if "bad" in prompt:
            raise ValueError(f"cannot tokenize {prompt!r}")
        if "panic" in prompt:
            raise BaseException("thread panicked")
        return self.real(prompt, **kwargs)

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        self.decodes.append((token_ids, kwargs))
        return self.real.decode(token_ids, **kwargs)

    def batch_decode(self, token_ids: Any, **kwargs: Any) -> Any:
        self.decodes.append((token_ids, kwargs))
        return self.real.batch_decode(token_ids, **kwargs)


def real_tokenizer() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(PROMPTS * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    # Padding that the file enables must not reach a batch whose callers asked for none.
    backend.enable_padding(pad_id=1, pad_token="<pad>")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", pad_token="<pad>", model_max_length=8, padding_side="right"
    )


def tokenizer_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("vllm-mp-tokenizer")}


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.gate.set()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_requests_of_one_tick_share_a_call(recorder: Recorder, run: Any) -> None:
    batching = AsyncMicrobatchTokenizer(recorder)

    async def main() -> None:
        await asyncio.gather(*(batching(prompt) for prompt in PROMPTS))

    run(main())
    assert recorder.calls == [(PROMPTS, {})]


@pytest.mark.parametrize(
    "kwargs", [{}, {"add_special_tokens": False}, {"truncation": True}, {"truncation": True, "max_length": 8}]
)
def test_each_caller_of_a_batch_gets_what_its_own_call_would_return(recorder: Recorder, kwargs: dict[str, Any]) -> None:
    batching = AsyncMicrobatchTokenizer(recorder)

    async def main() -> list[Any]:
        return await asyncio.gather(*(batching(prompt, **kwargs) for prompt in PROMPTS))

    results = asyncio.run(main())
    assert len(recorder.calls) == 1
    for prompt, result in zip(PROMPTS, results, strict=True):
        alone = recorder.real(prompt, **kwargs)
        assert type(result) is type(alone)
        assert result.data == alone.data
        assert result.tokens() == alone.tokens()
        assert result.n_sequences == alone.n_sequences
        assert [encoding.offsets for encoding in result.encodings] == [e.offsets for e in alone.encodings]


def test_single_request_does_not_wait_for_others(recorder: Recorder) -> None:
    batching = AsyncMicrobatchTokenizer(recorder, batch_wait_timeout_s=LONG_WAIT_S)

    async def main() -> Any:
        await batching("hello")
        return await batching.decode([5, 6])

    assert asyncio.run(main()) == recorder.real.decode([5, 6])


def test_several_requests_gather_until_the_batch_is_full(recorder: Recorder) -> None:
    batching = AsyncMicrobatchTokenizer(recorder, max_batch_size=3, batch_wait_timeout_s=LONG_WAIT_S)

    async def main() -> None:
        first = [asyncio.ensure_future(batching(prompt)) for prompt in ("a", "b")]
        for _ in range(10):
            await asyncio.sleep(0)
        assert recorder.calls == []
        await asyncio.gather(*first, batching("c"))

    asyncio.run(main())
    assert recorder.calls == [(["a", "b", "c"], {})]


def test_several_requests_gather_no_longer_than_the_timeout(recorder: Recorder) -> None:
    batching = AsyncMicrobatchTokenizer(recorder, max_batch_size=3, batch_wait_timeout_s=0.001)

    async def main() -> None:
        await asyncio.gather(batching("a"), batching("b"))

    asyncio.run(main())
    assert recorder.calls == [(["a", "b"], {})]


def test_gathering_requests_do_not_delay_other_kinds(recorder: Recorder) -> None:
    batching = AsyncMicrobatchTokenizer(recorder, max_batch_size=3, batch_wait_timeout_s=LONG_WAIT_S)

    async def main() -> None:
        gathering = [asyncio.ensure_future(batching(prompt)) for prompt in ("a", "b")]
        await batching("c", add_special_tokens=False)
        await batching("d", return_offsets_mapping=True)
        await batching.decode([3])
        assert not any(task.done() for task in gathering)
        for task in gathering:
            task.cancel()

    asyncio.run(main())
    assert [prompt for prompt, _ in recorder.calls] == ["c", "d"]


def test_encodes_share_a_call_by_special_tokens_and_truncation(recorder: Recorder) -> None:
    batching = AsyncMicrobatchTokenizer(recorder)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "plain too": {"add_special_tokens": True, "truncation": False},
        "bare": {"add_special_tokens": False},
        "cut": {"truncation": True},
        "cut too": {"truncation": True, "max_length": 8, "add_special_tokens": True},
        "short": {"truncation": True, "max_length": 4},
        "short by length alone": {"max_length": 4},
        "offsets": {"return_offsets_mapping": True},
    }

    async def main() -> list[Any]:
        return await asyncio.gather(*(batching(prompt, **kwargs) for prompt, kwargs in kinds.items()))

    results = asyncio.run(main())
    batches = [prompt if isinstance(prompt, list) else [prompt] for prompt, _ in recorder.calls]
    assert sorted(batches) == [
        ["bare"],
        ["cut", "cut too"],
        ["offsets"],
        ["plain", "plain too"],
        ["short"],
        ["short by length alone"],
    ]
    for (prompt, kwargs), result in zip(kinds.items(), results, strict=True):
        assert result.data == recorder.real(prompt, **kwargs).data


def test_many_small_batches_run_on_the_loop_with_other_callbacks_between_them() -> None:
    batches = Microbatcher(lambda jobs: jobs, max_batch_size=8, max_inline_cost=0)
    kinds = range(2000)

    async def main() -> tuple[list[Any], int]:
        queues = batches.queues()
        answers = [queues.add(kind, kind) for kind in kinds]
        await answers[0]
        num_answered = sum(answer.done() for answer in answers)
        return await asyncio.gather(*answers), num_answered

    answers, num_answered = asyncio.run(asyncio.wait_for(main(), 60))
    assert answers == [*kinds]
    assert num_answered < 10


def test_decodes_share_a_call_by_their_keywords(recorder: Recorder) -> None:
    batching = AsyncMicrobatchTokenizer(recorder)
    ids = recorder.real("hello 你好")["input_ids"]

    async def main() -> list[str]:
        return await asyncio.gather(
            batching.decode(ids),
            batching.decode([], skip_special_tokens=True),
            batching.decode(ids[:3]),
            batching.decode(ids, skip_special_tokens=True),
        )

    assert asyncio.run(main()) == ["<s>hello 你好", "", recorder.real.decode(ids[:3]), "hello 你好"]
    assert sorted(len(token_ids) for token_ids, _ in recorder.decodes) == [2, 2]


def test_keywords_that_cannot_be_hashed_run_alone(recorder: Recorder) -> None:
    batching = AsyncMicrobatchTokenizer(recorder)

    async def main() -> list[str]:
        return await asyncio.gather(*(batching.decode([5], anything=[1]) for _ in range(2)))

    assert asyncio.run(main()) == [recorder.real.decode([5])] * 2
    assert recorder.decodes == [([5], {"anything": [1]})] * 2


def test_prompts_that_are_not_text_run_alone(recorder: Recorder) -> None:
    batching = AsyncMicrobatchTokenizer(recorder)

    async def main() -> list[Any]:
        pair: Any = ["a", "hello"]
        return await asyncio.gather(batching("a"), batching(pair), batching("b"))

    assert asyncio.run(main())[1].data == recorder.real(["a", "hello"]).data
    assert sorted(prompt for prompt, _ in recorder.calls) == [["a", "b"], ["a", "hello"]]


@pytest.mark.parametrize("bad", ["bad", "panic"])
def test_bad_prompt_fails_alone(recorder: Recorder, bad: str) -> None:
    batching = AsyncMicrobatchTokenizer(recorder)

    async def main() -> list[Any]:
        return await asyncio.gather(*(batching(prompt) for prompt in ("a", bad, "b")), return_exceptions=True)

    first, failed, last = asyncio.run(main())
    assert first.data == recorder.real("a").data
    assert last.data == recorder.real("b").data
    assert isinstance(failed, ValueError if bad == "bad" else RuntimeError)
    assert recorder.calls[0][0] == ["a", bad, "b"]


def test_text_that_the_real_tokenizer_refuses_fails_alone() -> None:
    tokenizer = real_tokenizer()
    batching = AsyncMicrobatchTokenizer(tokenizer)

    async def main() -> list[Any]:
        return await asyncio.gather(batching("a"), batching("\ud800"), return_exceptions=True)

    good, failed = asyncio.run(main())
    assert good.data == tokenizer("a").data
    assert isinstance(failed, Exception)


def test_cancelled_callers_are_skipped_and_do_not_affect_the_others(recorder: Recorder) -> None:
    batching = AsyncMicrobatchTokenizer(recorder)

    async def main() -> None:
        recorder.gate.clear()
        running = asyncio.ensure_future(batching("running"))
        await asyncio.to_thread(recorder.entered.wait, 60)
        queued = [asyncio.ensure_future(batching(prompt)) for prompt in ("a", "b", "c", "d")]
        await asyncio.sleep(0)
        for task in (running, queued[0], queued[2]):
            task.cancel()
        recorder.gate.set()
        assert (await queued[1]).data == recorder.real("b").data
        assert (await queued[3]).data == recorder.real("d").data
        for task in (running, queued[0], queued[2]):
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert [prompt for prompt, _ in recorder.calls] == ["running", ["b", "d"]]


def test_close_fails_pending_callers_and_ends_the_thread(recorder: Recorder) -> None:
    batching = AsyncMicrobatchTokenizer(recorder)
    before = set(threading.enumerate())

    async def main() -> None:
        recorder.gate.clear()
        running = asyncio.ensure_future(batching("running"))
        await asyncio.to_thread(recorder.entered.wait, 60)
        queued = [asyncio.ensure_future(batching(prompt)) for prompt in ("a", "b")]
        await asyncio.sleep(0)
        (worker,) = tokenizer_threads() - before
        batching.close()
        batching.close()
        for task in (running, *queued):
            with pytest.raises(RuntimeError, match="closed"):
                await task
        recorder.gate.set()
        await asyncio.to_thread(worker.join, 60)
        assert not worker.is_alive()
        with pytest.raises(RuntimeError, match="closed"):
            await batching("later")
        with pytest.raises(RuntimeError, match="closed"):
            await batching.decode([1])

    asyncio.run(main())
    assert [prompt for prompt, _ in recorder.calls] == ["running"]


def test_close_fails_a_request_that_was_not_dispatched_yet(recorder: Recorder) -> None:
    batching = AsyncMicrobatchTokenizer(recorder)

    async def main() -> None:
        request = asyncio.ensure_future(batching("a"))
        asyncio.get_running_loop().call_soon(batching.close)
        with pytest.raises(RuntimeError, match="closed"):
            await request

    asyncio.run(main())


def test_callers_fail_if_the_worker_thread_accepts_no_work(recorder: Recorder) -> None:
    batching = AsyncMicrobatchTokenizer(recorder)
    # As when the interpreter exits.
    batching._batches.executor.shutdown()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="closed"):
            await batching("a")

    asyncio.run(main())


def test_tokenizer_serves_successive_event_loops(recorder: Recorder) -> None:
    batching = AsyncMicrobatchTokenizer(recorder, max_batch_size=3, batch_wait_timeout_s=LONG_WAIT_S)

    async def leave_early() -> None:
        # A batch stays in the worker thread, and two requests wait for a third.
        recorder.gate.clear()
        tasks = [asyncio.ensure_future(batching("left behind"))]
        await asyncio.to_thread(recorder.entered.wait, 60)
        tasks += [asyncio.ensure_future(batching(prompt)) for prompt in ("a", "b")]
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks)

    async def use() -> Any:
        recorder.gate.set()
        return await batching("hello")

    asyncio.run(leave_early())
    assert asyncio.run(use()).data == recorder.real("hello").data
    assert asyncio.run(use()).data == recorder.real("hello").data


def test_dropped_tokenizer_leaves_no_thread() -> None:
    tokenizer = real_tokenizer()
    before = set(threading.enumerate())
    batching = AsyncMicrobatchTokenizer(tokenizer)

    asyncio.run(batching("hello"))
    (worker,) = tokenizer_threads() - before
    gone = weakref.ref(batching)
    del batching
    gc.collect()
    assert gone() is None
    worker.join(60)
    assert not worker.is_alive()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_batch_size", 0),
        ("batch_wait_timeout_s", -0.1),
        ("batch_wait_timeout_s", float("nan")),
        ("batch_wait_timeout_s", float("inf")),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        AsyncMicrobatchTokenizer(real_tokenizer(), **{name: value})  # type: ignore[arg-type]
