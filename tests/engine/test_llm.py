"""`LLM`: batches of prompts for callers that block."""

import asyncio
import functools
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
from tqdm import tqdm

from vllm_mp import (
    LLM,
    BatchDeadError,
    EngineDeadError,
    EngineError,
    EngineStartError,
    LoRARequest,
    PoolingParams,
    RequestFailure,
    RequestOutputKind,
    SamplingParams,
)
from vllm_mp.testing.engines import ENGINE, eventually, is_empty

pytestmark = pytest.mark.usefixtures("forked_cores")

MAX_NUM_SEQS = 4
MAX_LIVE = 2 * MAX_NUM_SEQS
PROMPTS = ["Once upon a time", "The sea is", "One, two,", "Paris"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}{{ mood }}{{ tools[0].name if tools }}"


@pytest.fixture(scope="module")
def small_llm(small_model):
    """An LLM of a small random model, for tests that leave no core dead for good."""
    with LLM(str(small_model), **ENGINE, max_num_seqs=MAX_NUM_SEQS, num_threads=1) as llm:
        yield llm


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def num_live(llm):
    async def count():
        return llm.async_llm.get_num_unfinished_requests()

    return llm.thread.run(count())


def is_idle(llm):
    """Return once the core has no request."""
    llm.thread.run(eventually(functools.partial(is_empty, llm.async_llm)))


def pid(llm):
    return llm.thread.run(llm.async_llm.core_status())["pid"]


def in_thread(function, *args):
    """Run a function in a thread, and return a function that waits for its result."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function(*args)), daemon=True)
    thread.start()

    def wait():
        thread.join(30)
        assert result, "the thread has not ended"
        return result[0]

    return wait


@pytest.mark.essential
def test_outputs_are_in_the_order_of_the_prompts_whatever_their_form(small_llm):
    tokenizer = small_llm.get_tokenizer()
    ids = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    expected = texts(small_llm.generate(PROMPTS, GREEDY))
    assert len(set(expected)) == len(PROMPTS)
    mixed = [PROMPTS[0], ids[1], {"prompt": PROMPTS[2]}, {"prompt_token_ids": ids[3], "prompt": "said"}]
    outputs = small_llm.generate(mixed, GREEDY)
    assert texts(outputs) == expected
    assert [output.prompt for output in outputs] == [PROMPTS[0], None, PROMPTS[2], "said"]
    assert all(output.finished and len(output.outputs[0].token_ids) == 6 for output in outputs)
    assert [texts(small_llm.generate(prompt, GREEDY)) for prompt in mixed] == [[text] for text in expected]
    assert texts(small_llm.generate(iter(PROMPTS), GREEDY)) == expected
    assert small_llm.generate([], GREEDY) == []


def test_each_prompt_may_have_parameters_of_its_own(small_llm):
    params = [SamplingParams(max_tokens=count, n=n, ignore_eos=True) for count, n in ((1, 1), (7, 2))]
    short, long = small_llm.generate(PROMPTS[:2], params)
    assert [len(completion.token_ids) for completion in short.outputs] == [1]
    assert [len(completion.token_ids) for completion in long.outputs] == [7, 7]
    assert all(each.output_kind == RequestOutputKind.CUMULATIVE for each in params)  # the caller's are not changed


@pytest.mark.essential
def test_prompt_that_fails_is_reported_in_its_place_and_harms_no_other(small_llm, caplog):
    expected = texts(small_llm.generate(PROMPTS[:2], GREEDY))
    with caplog.at_level(logging.WARNING):
        outputs = small_llm.generate([PROMPTS[0], "far too long " * 2000, [10**6], 3.5, PROMPTS[1]], GREEDY)
    assert texts([outputs[0], outputs[4]]) == expected
    for output, kind, words in zip(
        outputs[1:4], (ValueError, ValueError, TypeError), ("too long", "vocabulary", "token ids"), strict=True
    ):
        assert isinstance(output, RequestFailure)
        assert output.finished
        with pytest.raises(kind, match=words):
            output.outputs  # noqa: B018
    assert "3 of 5 prompts failed; the first is prompt 1: the prompt is too long" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"sampling_params": [GREEDY]}, ValueError, "params must have an entry for each of the 2 prompts, got 1"),
        ({"sampling_params": [GREEDY, PoolingParams()]}, TypeError, "must be SamplingParams or a list of them, got P"),
        ({"sampling_params": {"max_tokens": 3}}, TypeError, "must be SamplingParams or a list of them, got dict"),
        ({"sampling_params": SamplingParams(stop_token_ids=[10**6])}, ValueError, "stop_token_ids must be in"),
        ({"sampling_params": [GREEDY, SamplingParams(logit_bias={10**6: 1})]}, ValueError, "logit_bias must be in"),
        ({"sampling_params": SamplingParams(logprobs=10**4)}, ValueError, "logprobs must be at most"),
        ({"priority": [1]}, ValueError, "priority must have an entry"),
        ({"priority": [0, 1]}, ValueError, "priority=1 needs an engine with scheduling_policy='priority'"),
        ({"lora_request": LoRARequest("a", 1, "/a")}, ValueError, "LoRA is not enabled"),
        ({"lora_request": [None, "a"]}, TypeError, "lora_request must be a LoRARequest, got str"),
        (
            {"tokenization_kwargs": {"truncate_prompt_token": 4}},
            TypeError,
            "has no option 'truncate_prompt_token'; did you mean `truncate_prompt_tokens`.*; it takes",
        ),
        ({"tokenization_kwargs": {"pad_prompt_tokens": 9}}, NotImplementedError, "pad_prompt_tokens=9 is not served"),
        (
            {"tokenization_kwargs": {"do_lower_case": True}},
            NotImplementedError,
            r"do_lower_case=True .* call lower\(\)",
        ),
        ({"tokenization_kwargs": {"truncation_side": "top"}}, ValueError, "truncation_side must be .*, got 'top'"),
        ({"mm_processor_kwargs": [1]}, TypeError, "mm_processor_kwargs must be a dict"),
        ({"mm_processor_kwargs": {"device": "cuda"}}, ValueError, "must not hold 'device', which the engine sets"),
        ({"mm_processor_kwargs": {"merge_size": 1}}, ValueError, "must not hold 'merge_size', which the engine sets"),
    ],
)
def test_arguments_that_cannot_work_are_refused_before_anything_runs(small_llm, options, error, words):
    with pytest.raises(error, match=words):
        small_llm.generate(PROMPTS[:2], **{"sampling_params": GREEDY, **options})
    with pytest.raises(TypeError, match="prompts must be a prompt or an iterable"):
        small_llm.generate(5)
    with pytest.raises(ValueError, match="dimensions must be at most"):
        small_llm.embed(PROMPTS[:2], pooling_params=PoolingParams(dimensions=10**6))


@pytest.mark.parametrize("as_list", [False, True])
def test_parameters_that_were_changed_to_wrong_values_are_refused(small_llm, as_list):
    params = SamplingParams(max_tokens=2)
    params.n = 0
    with pytest.raises(ValueError, match=r"n must be in \[1, 1024\], got 0"):
        small_llm.generate(PROMPTS[:1], [params] if as_list else params)


def test_prompts_are_taken_from_an_iterator_while_a_limited_number_is_live(small_llm):
    live = []

    def prompts():
        for number in range(5 * MAX_LIVE):
            live.append(num_live(small_llm))
            yield [5 + number]

    assert len(small_llm.generate(prompts(), GREEDY)) == 5 * MAX_LIVE
    assert max(live) <= MAX_LIVE
    # Completions count, and a request with more of them than the limit runs alone.
    outputs = small_llm.generate([[5], [6], [7]], SamplingParams(n=2 * MAX_LIVE, max_tokens=2, ignore_eos=True))
    assert [len(output.outputs) for output in outputs] == [2 * MAX_LIVE] * 3


def test_progress_bar_counts_prompts_and_tokens(small_llm):
    stream = io.StringIO()
    small_llm.generate([[5, 6], [7, 8], [9] * 2000], GREEDY, use_tqdm=functools.partial(tqdm, file=stream))
    last = stream.getvalue().rpartition("\r")[2]
    assert "Processed prompts: 100%" in last
    assert "3/3" in last
    assert "toks/s, output: " in last
    stream = io.StringIO()
    small_llm.embed(iter([[5], [6]]), use_tqdm=functools.partial(tqdm, file=stream))
    assert "2it" in stream.getvalue()


def test_progress_bar_is_shown_by_default_on_a_terminal_only(small_llm, capfd, monkeypatch):
    small_llm.generate(PROMPTS, GREEDY)
    assert "Processed" not in capfd.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    small_llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert "Processed" not in capfd.readouterr().err
    small_llm.generate(PROMPTS, GREEDY)
    assert "Processed prompts: 100%" in capfd.readouterr().err


def test_calls_block_inside_a_running_event_loop_and_in_several_threads_at_once(small_llm):
    expected = texts(small_llm.generate(PROMPTS, GREEDY))

    async def run():
        return texts(small_llm.generate(PROMPTS, GREEDY))

    assert asyncio.run(run()) == expected
    waits = [in_thread(lambda: texts(small_llm.generate(PROMPTS, GREEDY))) for _ in range(3)]
    assert [wait() for wait in waits] == [expected] * 3


def test_interrupt_aborts_the_requests_and_leaves_the_engine_usable(small_llm):
    interrupted = threading.Event()

    def interrupt():
        while not num_live(small_llm):
            time.sleep(0.001)
        interrupted.set()
        os.kill(os.getpid(), signal.SIGINT)
        return True

    wait = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        small_llm.generate([[5]] * 3, LONG)
    assert wait()
    assert num_live(small_llm) == 0
    is_idle(small_llm)
    assert len(small_llm.generate(PROMPTS, GREEDY)) == len(PROMPTS)


def test_error_of_the_iterator_of_prompts_aborts_the_requests_and_is_raised(small_llm):
    def prompts():
        yield [5]
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        small_llm.generate(prompts(), LONG)
    assert num_live(small_llm) == 0
    is_idle(small_llm)


@pytest.mark.essential
def test_chat_answers_one_or_many_conversations(small_llm):
    hello, bye = ([{"role": "user", "content": word}] for word in ("Hello", "Bye"))
    options = {"chat_template": TEMPLATE, "chat_template_kwargs": {"mood": "gladly"}, "tools": [{"name": "weather"}]}
    outputs = small_llm.chat([hello, [], bye], GREEDY, **options)
    assert [outputs[0].prompt, outputs[2].prompt] == ["Hello gladlyweather", "Bye gladlyweather"]
    with pytest.raises(ValueError, match="messages is empty"):
        outputs[1].outputs  # noqa: B018
    (alone,) = small_llm.chat(hello, GREEDY, **options)
    (same,) = small_llm.generate("Hello gladlyweather", GREEDY, tokenization_kwargs={"add_special_tokens": False})
    assert alone.outputs[0].token_ids == outputs[0].outputs[0].token_ids == same.outputs[0].token_ids
    with pytest.raises(NotImplementedError, match="chat_template_content_format must be"):
        small_llm.chat(hello, GREEDY, chat_template_content_format="openai")


def test_enqueued_prompts_run_when_they_are_waited_for(small_llm):
    expected = texts(small_llm.generate(PROMPTS, GREEDY))
    ids = small_llm.enqueue(PROMPTS[:1], GREEDY) + small_llm.enqueue(PROMPTS[1:], GREEDY)
    assert num_live(small_llm) == 0
    outputs = small_llm.wait_for_completion()
    assert texts(outputs) == expected
    assert [output.request_id for output in outputs] == ids
    assert small_llm.wait_for_completion() == []


def test_embeddings_and_their_similarities(small_llm):
    vectors = [np.array(output.outputs.embedding) for output in small_llm.embed(PROMPTS)]
    for vector, output in zip(vectors, small_llm.encode(iter(PROMPTS), PoolingParams(task="embed")), strict=True):
        np.testing.assert_array_equal(vector, output.outputs.data)
    scores = small_llm.score(PROMPTS[0], [*PROMPTS[1:], [10**6]])
    assert [score.outputs.score for score in scores[:3]] == pytest.approx([vectors[0] @ other for other in vectors[1:]])
    assert isinstance(scores[3], RequestFailure)
    (same,) = small_llm.score([PROMPTS[2]], [PROMPTS[2]])
    assert same.outputs.score == pytest.approx(1.0)
    with pytest.raises(ValueError, match="data_1 must have 1 text or as many as data_2, 3, got 2"):
        small_llm.score(PROMPTS[:2], PROMPTS[:3])
    with pytest.raises(ValueError, match="has no classes"):
        small_llm.classify(PROMPTS)
    with pytest.raises(ValueError, match=r"^pooling_task must be .* got 'token_classify'; a prompt has one"):
        small_llm.encode(PROMPTS, pooling_task="token_classify")
    with pytest.raises(ValueError, match="task must be 'embed' or None for this call"):
        small_llm.embed(PROMPTS, pooling_params=PoolingParams(task="classify"))


def test_prompts_are_truncated_at_the_side_that_the_call_names(small_llm):
    text, ids = PROMPTS[0], small_llm.get_tokenizer()(PROMPTS[0]).input_ids

    def kept(call, prompt, *args, **options):
        (output,) = call(prompt, *args, use_tqdm=False, tokenization_kwargs=options)
        return output.prompt_token_ids

    for prompt in (text, ids):
        for side, expected in ((None, ids[-3:]), ("left", ids[-3:]), ("right", ids[:3])):
            options = {"truncate_prompt_tokens": 3, "truncation_side": side}
            assert kept(small_llm.generate, prompt, GREEDY, **options) == expected
        for side, expected in ((None, ids[:3]), ("left", ids[-3:]), ("right", ids[:3])):
            options = {"truncate_prompt_tokens": 3, "truncation_side": side}
            assert kept(small_llm.embed, prompt, **options) == expected
    context = small_llm.model_config.max_model_len
    assert len(kept(small_llm.embed, "word " * context, truncate_prompt_tokens=-1)) == context
    assert len(kept(small_llm.generate, "word " * context, GREEDY, truncate_prompt_tokens=-1)) == context - 6
    for outputs in (
        small_llm.embed(text, truncate_prompt_tokens=3),
        small_llm.encode(text, PoolingParams(truncate_prompt_tokens=9), truncate_prompt_tokens=3),
    ):
        assert outputs[0].prompt_token_ids == ids[:3]
    (score,) = small_llm.score(text, text, truncate_prompt_tokens=3)
    assert score.prompt_token_ids == ids[:3] * 2


def test_operations_of_the_engine_are_calls_that_block(small_llm):
    expected = texts(small_llm.generate(PROMPTS, GREEDY))
    small_llm.sleep(level=2)
    assert small_llm.wake_up(["weights"]) is False
    assert small_llm.wake_up() is True
    assert small_llm.reset_prefix_cache() is True
    small_llm.reset_mm_cache()
    with pytest.raises(EngineError, match="profile"):
        small_llm.stop_profile()
    with pytest.raises(NotImplementedError, match="profile_prefix='mine' is not served: each profile has a folder"):
        small_llm.start_profile("mine")
    assert small_llm.collective_rpc("get_num_parameters")[0] > 0
    assert texts(small_llm.generate(PROMPTS, GREEDY)) == expected
    assert small_llm.get_default_sampling_params() == SamplingParams(**small_llm.model_config.default_sampling_params)
    assert (small_llm.get_world_size(), small_llm.model_config.max_model_len) == (1, 1024)
    assert repr(small_llm).startswith("LLM(model='/")


def test_names_of_vllm_that_are_not_served_say_what_to_use_instead(small_llm):
    assert not hasattr(small_llm, "beam_search")
    assert small_llm.llm_engine.model_config.max_model_len == small_llm.model_config.max_model_len
    with pytest.raises(NotImplementedError, match=r"LLM has no beam_search: generate with n completions"):
        small_llm.beam_search  # noqa: B018
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'unknown'"):
        small_llm.unknown  # noqa: B018


def test_results_are_complete_after_the_core_was_killed(small_llm):
    expected = texts(small_llm.generate([[number] for number in range(5, 25)], GREEDY))

    def prompts():
        for number in range(5, 25):
            if number == 15:
                os.kill(pid(small_llm), signal.SIGKILL)
            yield [number]

    assert texts(small_llm.generate(prompts(), GREEDY)) == expected
    assert small_llm.thread.run(small_llm.async_llm.core_status())["restarts"] == 1


def test_outputs_so_far_are_in_the_error_when_the_core_is_gone_for_good(small_model):
    llm = LLM(str(small_model), **ENGINE, recovery=False, num_threads=1, max_num_seqs=MAX_NUM_SEQS)
    core = psutil.Process(pid(llm))
    done = []

    def prompts():
        yield from ([5], [6])
        while num_live(llm):
            time.sleep(0.001)
        core.kill()
        for number in range(7, 100):
            done.append(number)
            yield [number]

    with pytest.raises(BatchDeadError, match="2 prompts were finished when the engine ended") as caught:
        llm.generate(prompts(), GREEDY)
    outputs = caught.value.outputs
    assert [isinstance(output, RequestFailure) for output in outputs[:3]] == [False, False, True]
    assert len(outputs) - 2 <= len(done) < 93  # the iterator is not drained for a dead engine
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS, GREEDY)
    llm.shutdown()


def test_shutdown_frees_callers_that_wait_or_make_prompts_and_ends_all_processes(small_model):
    before = set(threading.enumerate())
    llm = LLM(str(small_model), **ENGINE, num_threads=1)
    (loop_thread,) = (each for each in set(threading.enumerate()) - before if each.name == "vllm-mp-loop")
    core = psutil.Process(pid(llm))
    is_first_done, is_shut_down = threading.Event(), threading.Event()

    def generate(prompts, params):
        try:
            return llm.generate(prompts, params)
        except EngineDeadError as error:
            return error

    def prompts():
        yield [5]
        while num_live(llm):
            time.sleep(0.001)
        is_first_done.set()
        assert is_shut_down.wait(30)
        yield [6]

    feeding = in_thread(generate, prompts(), GREEDY)
    assert is_first_done.wait(30)
    waiting = in_thread(generate, [[5]] * 3, LONG)
    while not num_live(llm):
        time.sleep(0.001)
    llm.shutdown()
    llm.shutdown()
    is_shut_down.set()
    for error, failed in ((waiting(), [True, True, True]), (feeding(), [False])):
        assert isinstance(error, BatchDeadError)
        assert [isinstance(output, RequestFailure) for output in error.outputs] == failed
    assert not core.is_running()
    assert not loop_thread.is_alive()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate(PROMPTS)


CARELESS = """
import os, sys, psutil
from vllm_mp import LLM, SamplingParams

options = {"max_model_len": 128, "kv_cache_memory_bytes": 2**24, "num_threads": 1}
first, second = LLM(sys.argv[1], **options), LLM(sys.argv[1], **options)
params = SamplingParams(temperature=0, max_tokens=4)
assert first.generate("Hello", params)[0].outputs[0].text == second.generate("Hello", params)[0].outputs[0].text
cores = [child for child in psutil.Process().children() if not child.name().startswith("core-")]
assert len(cores) == 2
del first
assert sum(core.is_running() for core in cores) == 1
print(*[core.pid for core in cores])
"""


@pytest.mark.slow
def test_engines_that_are_dropped_or_never_shut_down_leave_no_process(small_model):
    command = [sys.executable, "-c", CARELESS, str(small_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_engine_that_cannot_start_leaves_no_thread(tmp_path):
    before = threading.active_count()
    with pytest.raises(ValueError, match="convert must be one of auto, none, embed, got 'classify'"):
        LLM(str(tmp_path), runner="pooling", convert="classify")
    with pytest.raises((ValueError, EngineStartError)):
        LLM(str(tmp_path))
    assert threading.active_count() == before
