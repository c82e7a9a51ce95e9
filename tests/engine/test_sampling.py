"""Sampling parameters on the real model: rules, log-probabilities, several answers, stop strings, truncation."""

import asyncio
import functools

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from vllm_mp import RequestOutputKind, SamplingParams
from vllm_mp.testing.engines import answer, eventually, greedy, is_empty, running_engine
from vllm_mp.testing.greedy_parity import NEAR_TIE, num_preemptions
from vllm_mp.testing.prompts import PROMPTS
from vllm_mp.testing.sampling_cases import CASES

pytestmark = pytest.mark.usefixtures("forked_cores")

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
PROMPT = "Once upon a time, in a village by the sea,"
LONG_PROMPT = "The engine has two halves, which run apart and talk over a socket. " * 20
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def reference(small_model):
    return AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def real_reference(default_model):
    return AutoModelForCausalLM.from_pretrained(default_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def busy(small_model):
    """An engine with small chunks, few blocks, sampling defaults and a stream interval of 5 tokens."""
    bytes_per_block = BLOCK_SIZE * 2 * 2 * 2 * 16 * 4
    with running_engine(
        small_model,
        max_model_len=256,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=35 * bytes_per_block,
        stream_interval=5,
        override_generation_config={"temperature": 0.0, "repetition_penalty": 1.3, "max_new_tokens": 9},
    ) as engine:
        yield engine


def ask(engine, *requests):
    """Send all (prompt, parameters) at once. Return the last output of each."""

    async def run():
        return await asyncio.gather(*(answer(engine, prompt, params) for prompt, params in requests))

    return asyncio.run(run())


def collect(engine, prompt, params):
    """Return all outputs of a request."""

    async def run():
        return [output async for output in engine.generate(prompt, params)]

    return asyncio.run(run())


class Barred(LogitsProcessor):
    """Keeps the answer from completing any word of `words` (token ids). A word that begins in the prompt is allowed."""

    def __init__(self, words, num_prompt_tokens):
        self.words, self.num_prompt_tokens = words, num_prompt_tokens

    def __call__(self, input_ids, scores):
        answered = input_ids[0, self.num_prompt_tokens :].tolist()
        for word in self.words:
            start = len(answered) - len(word) + 1
            if start >= 0 and answered[start:] == word[:-1]:
                scores[0, word[-1]] = -torch.inf
        return scores


class Allowed(LogitsProcessor):
    """Allows only the tokens `ids`."""

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, input_ids, scores):
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self.ids] = scores[:, self.ids]
        return allowed


@functools.lru_cache(maxsize=3)
@torch.inference_mode()
def logits_of(reference, ids):
    return reference(torch.tensor([ids])).logits[0]


def assert_chosen(reference, output, processors):
    """Check that each token has the highest score after these processors, or nearly: the difference is a near tie."""
    prompt, ids = output.prompt_token_ids, output.outputs[0].token_ids
    logits = logits_of(reference, (*prompt, *ids))
    for position, token in enumerate(ids):
        so_far = torch.tensor([prompt + ids[:position]])
        scores = processors(so_far, logits[len(prompt) + position - 1][None].clone())[0]
        assert scores.max() - scores[token] <= NEAR_TIE, f"token {position} of {ids}"


RULES = {
    "repetition": {"repetition_penalty": 1.4},
    "bad words": {"bad_words": ["there", " village", "a", "years old", "little girl named"]},
    "bias": {"logit_bias": {260: -8.0, 253: -3.5, 29: 4.0, 2: -100.0}},
    "allowed": {"allowed_token_ids": [*range(28, 60), *range(250, 400), 665, 1183]},
}
RULES["all"] = {name: value for rule in RULES.values() for name, value in rule.items()}


def processors_of(tokenizer, num_prompt_tokens, params):
    processors = LogitsProcessorList()
    if "allowed_token_ids" in params:
        processors.append(Allowed(params["allowed_token_ids"]))
    if "bad_words" in params:
        spellings = [space + word.strip() for word in params["bad_words"] for space in ("", " ")]
        processors.append(Barred([tokenizer(spelling).input_ids for spelling in spellings], num_prompt_tokens))
    if "logit_bias" in params:
        bias = {(token,): value for token, value in params["logit_bias"].items()}
        processors.append(SequenceBiasLogitsProcessor(sequence_bias=bias))
    if "repetition_penalty" in params:
        processors.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    return processors


def test_greedy_answers_under_rules_equal_those_of_transformers(real_llm, real_reference):
    prompts = (PROMPT, PROMPTS[6], PROMPTS[28])
    cases = [(prompt, rule) for prompt in prompts for rule in ({}, *RULES.values())]
    outputs = ask(real_llm, *[(prompt, greedy(20, ignore_eos=True, **rule)) for prompt, rule in cases])
    answers = {}
    for (_, rule), output in zip(cases, outputs, strict=True):
        processors = processors_of(real_llm.get_tokenizer(), len(output.prompt_token_ids), rule)
        assert_chosen(real_reference, output, processors)
        answers.setdefault(str(rule), []).append(output.outputs[0].token_ids)
    assert len({str(ids) for ids in answers.values()}) == 1 + len(RULES), "a rule changed no answer"


def test_bad_words_are_in_no_answer_with_or_without_a_leading_space(llm):
    words = ["village", "the", "little girl", "a", "sea"]
    requests = [
        (PROMPT, SamplingParams(temperature=1.0, seed=seed, max_tokens=40, bad_words=words)) for seed in range(4)
    ]
    tokenizer = llm.get_tokenizer()
    barred = [tokenizer(space + word).input_ids for word in words for space in ("", " ")]
    for output in ask(llm, *requests):
        ids = output.outputs[0].token_ids
        for word in barred:
            assert all(ids[start : start + len(word)] != word for start in range(len(ids)))


def test_bad_word_that_begins_in_the_prompt_may_be_completed(llm):
    (plain,) = ask(llm, (PROMPT, greedy(4)))
    first = llm.get_tokenizer().decode(plain.outputs[0].token_ids[:1])
    ids = llm.get_tokenizer()(" sea," + first).input_ids
    assert ids == plain.prompt_token_ids[-len(ids) + 1 :] + plain.outputs[0].token_ids[:1]
    (barred,) = ask(llm, (PROMPT, greedy(4, bad_words=["sea," + first])))
    assert barred.outputs[0].token_ids == plain.outputs[0].token_ids


def assert_logprobs(reference, tokenizer, output, count, prompt_count):
    """Check the log-probabilities of `output` against the logits of transformers."""
    prompt, completion = output.prompt_token_ids, output.outputs[0]
    ids = prompt + completion.token_ids
    distribution = logits_of(reference, tuple(ids)).double().log_softmax(-1)
    assert len(completion.logprobs) == len(completion.token_ids)
    if prompt_count is None:
        assert output.prompt_logprobs is None
        entries = [None] * len(prompt)
    else:
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        entries = output.prompt_logprobs
    for place, entry in enumerate([*entries, *completion.logprobs]):
        if entry is None:
            continue
        expected, chosen = distribution[place - 1], ids[place]
        size = prompt_count if place < len(prompt) else count
        assert next(iter(entry)) == chosen
        assert size <= len(entry) <= size + 1
        best = expected.topk(size).values.tolist() if size else []
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(expected[token].item(), abs=1e-4)
            assert logprob.decoded_token == tokenizer.decode([token])
            if token != chosen:
                assert logprob.logprob >= best[-1] - 1e-4
            lowest, highest = ((expected > logprob.logprob + slack).sum() for slack in (1e-4, -1e-4))
            assert lowest < logprob.rank <= highest
    own = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(own), abs=1e-4)


def test_log_probabilities_are_those_of_the_model_under_rules_and_for_a_cached_prompt(llm, reference):
    rules = {**RULES["bias"], "repetition_penalty": 1.4, "frequency_penalty": 0.5}
    cases = [
        ((5, 3), greedy(12, logprobs=5, prompt_logprobs=3, ignore_eos=True)),
        ((0, 0), SamplingParams(temperature=0.8, seed=4, max_tokens=12, logprobs=0, prompt_logprobs=0, **rules)),
        ((20, None), SamplingParams(temperature=0.8, top_k=3, seed=5, max_tokens=12, logprobs=20)),
    ]
    tokenizer = llm.get_tokenizer()
    for prompt in (LONG_PROMPT[:500], "A"):
        for _ in range(2):  # the second time the prompt is in the prefix cache
            outputs = ask(llm, *[(prompt, params) for _, params in cases])
            for (counts, _), output in zip(cases, outputs, strict=True):
                assert_logprobs(reference, tokenizer, output, *counts)
    assert outputs[0].prompt_logprobs == [None]
    assert ask(llm, (LONG_PROMPT[:500], greedy(1, logprobs=1)))[0].num_cached_tokens > 0


def test_log_probabilities_are_complete_and_exact_with_chunks_and_preemption(busy, reference):
    async def run():
        await busy.reset_prefix_cache()

    asyncio.run(run())
    before = num_preemptions(busy)
    begin = LONG_PROMPT[:400]
    prompts = [begin, begin, begin + "Why?", begin + "Why?", begin + "One", PROMPT, PROMPT * 4, PROMPT * 2]
    outputs = ask(busy, *[(prompt, greedy(20, logprobs=2, prompt_logprobs=2, ignore_eos=True)) for prompt in prompts])
    assert num_preemptions(busy) > before
    for output in outputs:
        assert len(output.outputs[0].token_ids) == 20
        assert_logprobs(reference, busy.get_tokenizer(), output, 2, 2)


def test_log_probabilities_without_detokenization_have_no_text(llm):
    (output,) = ask(llm, (PROMPT, greedy(4, logprobs=2, prompt_logprobs=1, detokenize=False)))
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert all(logprob.decoded_token is None for entry in entries for logprob in entry.values())
    assert output.outputs[0].text == ""


@pytest.mark.essential
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_streamed_log_probabilities_belong_to_the_streamed_tokens(llm, kind):
    outputs = collect(
        llm, PROMPT, SamplingParams(temperature=0, max_tokens=10, logprobs=1, prompt_logprobs=1, output_kind=kind)
    )
    total = 0.0
    for output in outputs:
        (completion,) = output.outputs
        assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
        own = sum(entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True))
        total = total + own if kind == DELTA else own
        assert completion.cumulative_logprob == pytest.approx(total, abs=1e-5)
    given = [output.prompt_logprobs is not None for output in outputs]
    assert given == [True] * len(outputs) if kind == CUMULATIVE else [True] + [False] * (len(outputs) - 1)


def sampled(seed, n=1, **params):
    # A draw among few tokens does not depend on the rounding of tiny probabilities.
    params.setdefault("top_k", 20)
    return SamplingParams(
        **{"temperature": 0.9, "max_tokens": 12, "output_kind": FINAL_ONLY, **params, "seed": seed, "n": n}
    )


@pytest.mark.essential
@pytest.mark.parametrize("seed", [41, 2**63 - 2, -4])
def test_each_of_n_answers_equals_the_answer_to_its_own_seed(llm, seed):
    seeds = [(seed + i + 2**63) % 2**64 - 2**63 for i in range(4)]
    usable = [each for each in seeds if each != -1]  # seed=-1 means no seed
    together, *others = ask(llm, (PROMPT, sampled(seed, 4)), *[(PROMPT, sampled(each)) for each in [*usable, 0]])
    assert [completion.index for completion in together.outputs] == [0, 1, 2, 3]
    by_seed = {each: completion.token_ids for each, completion in zip(seeds, together.outputs, strict=True)}
    for each, other in zip(usable, others, strict=False):
        assert by_seed[each] == other.outputs[0].token_ids
    assert len({tuple(ids) for ids in by_seed.values()}) == 4
    assert others[-1].outputs[0].token_ids not in by_seed.values(), "seed 0 gives another answer"


def test_n_answers_are_the_same_in_each_kind_of_output(llm):
    final, cumulative, delta = (
        collect(llm, PROMPT, sampled(7, 3, output_kind=kind, stop=["e"], min_tokens=4, max_tokens=20, logprobs=1))
        for kind in (FINAL_ONLY, CUMULATIVE, DELTA)
    )
    assert len(final) == 1
    for outputs in (final, cumulative, delta):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for output in outputs:
            indices = [completion.index for completion in output.outputs]
            assert indices == sorted(set(indices))
    for index, whole in enumerate(final[0].outputs):
        last = cumulative[-1].outputs[index]
        assert (last.text, last.token_ids, last.stop_reason) == (whole.text, whole.token_ids, whole.stop_reason)
        parts = [part for output in delta for part in output.outputs if part.index == index]
        assert "".join(part.text for part in parts) == whole.text
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        entries = [entry for part in parts for entry in part.logprobs]
        assert [next(iter(entry)) for entry in entries] == whole.token_ids
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [whole.finish_reason]
        assert parts[-1].stop_reason == whole.stop_reason
        for end in (parts[-1], last):
            assert end.cumulative_logprob == pytest.approx(whole.cumulative_logprob, abs=1e-4)


def test_n_answers_share_the_blocks_of_their_prompt_and_free_them_when_the_consumer_leaves(llm):
    async def run():
        await eventually(lambda: is_empty(llm))
        used = 0
        async for output in llm.generate(LONG_PROMPT, sampled(1, 4, max_tokens=300, output_kind=CUMULATIVE)):
            if len(output.outputs) == 4 and all(completion.token_ids for completion in output.outputs):
                status = await llm.core_status()
                used = status["total_blocks"] - status["free_blocks"]
                break
        await eventually(lambda: is_empty(llm))
        return used, len(output.prompt_token_ids)

    used, num_prompt_tokens = asyncio.run(run())
    assert num_prompt_tokens // BLOCK_SIZE < used < 2 * num_prompt_tokens // BLOCK_SIZE


def test_abort_of_a_request_ends_all_its_answers(llm):
    async def run():
        outputs = []
        async for output in llm.generate(PROMPT, sampled(1, 3, max_tokens=900, output_kind=DELTA), "several"):
            outputs.append(output)
            if len(outputs) == 4:
                await llm.abort("several")
        await eventually(lambda: is_empty(llm))
        return outputs

    outputs = asyncio.run(run())
    completions = [completion for output in outputs for completion in output.outputs]
    ends = [(completion.index, completion.finish_reason) for completion in completions if completion.finish_reason]
    assert sorted(ends) == [(0, "abort"), (1, "abort"), (2, "abort")]
    assert outputs[-1].finished


def stops_of(llm, whole):
    """Return strings of the answer `whole`: a token, a part of a token, and strings across two and three tokens."""
    texts = [llm.get_tokenizer().decode([token]) for token in whole.token_ids]
    across = [texts[i][-2:] + texts[i + 1][:2] for i in (6, 9, 13)]
    return [texts[5], texts[8][1:3], *across, texts[4][-1:] + texts[5] + texts[6][:1]]


@pytest.mark.essential
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_ends_the_answer_and_no_output_goes_past_it(llm, include):
    (whole,) = ask(llm, (PROMPT, greedy(30, ignore_eos=True)))[0].outputs
    stops = [stop for stop in stops_of(llm, whole) if stop.strip()]
    assert len(stops) >= 4

    async def stream(stop, kind):
        params = SamplingParams(
            temperature=0,
            max_tokens=900,
            ignore_eos=True,
            stop=stop,
            include_stop_str_in_output=include,
            output_kind=kind,
        )
        return [output async for output in llm.generate(PROMPT, params)]

    async def run():
        cases = [([stop, "not in the answer"], kind) for stop in stops for kind in RequestOutputKind]
        streams = await asyncio.gather(*(stream(*case) for case in cases))
        await eventually(lambda: is_empty(llm))  # well before 900 tokens
        return streams

    streams = asyncio.run(run())
    for number, stop in enumerate(stops):
        of_kinds = streams[3 * number : 3 * number + 3]
        start = whole.text.index(stop)
        expected = whole.text[: start + (len(stop) if include else 0)]
        for kind, outputs in zip(RequestOutputKind, of_kinds, strict=True):
            shown = ""
            for output in outputs:
                (completion,) = output.outputs
                shown = shown + completion.text if kind == DELTA else completion.text
                assert expected.startswith(shown), "streamed past the stop string"
            assert shown == expected
            assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        ids = of_kinds[-1][-1].outputs[0].token_ids
        assert ids == whole.token_ids[: len(ids)]
        decode = llm.get_tokenizer().decode
        assert stop in decode(ids)
        assert stop not in decode(ids[:-1])


def test_stop_string_is_found_although_tokens_cut_its_characters(real_llm):
    prompt = "日本の首都は"
    (whole,) = ask(real_llm, (prompt, greedy(40, ignore_eos=True)))[0].outputs
    wide = [i for i, character in enumerate(whole.text) if ord(character) > 0x2000 and character not in whole.text[:i]]
    stop = whole.text[wide[3] : wide[3] + 2]
    outputs = collect(real_llm, prompt, SamplingParams(temperature=0, max_tokens=40, stop=stop, output_kind=DELTA))
    assert "".join(output.outputs[0].text for output in outputs) == whole.text[: whole.text.index(stop)]
    assert outputs[-1].outputs[0].stop_reason == stop


def test_stop_string_within_the_first_min_tokens_is_ignored(llm):
    (whole,) = ask(llm, (PROMPT, greedy(30, ignore_eos=True)))[0].outputs
    decode = llm.get_tokenizer().decode
    (output,) = ask(llm, (PROMPT, greedy(30, ignore_eos=True, stop=[" "], min_tokens=8)))
    (completion,) = output.outputs
    assert len(completion.token_ids) > 8
    start = len(decode(whole.token_ids[:8]))
    assert completion.text == whole.text[: whole.text.index(" ", start)]


def test_truncated_prompt_keeps_its_last_tokens(busy):
    ids = busy.get_tokenizer()(LONG_PROMPT).input_ids
    requests = [
        (LONG_PROMPT, greedy(6, truncate_prompt_tokens=20)),
        (ids, greedy(6, truncate_prompt_tokens=20)),
        (ids[-20:], greedy(6)),
        (PROMPT, greedy(6, truncate_prompt_tokens=250)),
        (ids * 9, greedy(6, truncate_prompt_tokens=-1)),
        (ids * 9, greedy(None, truncate_prompt_tokens=252)),
    ]
    outputs = ask(busy, *requests)
    assert [output.prompt_token_ids for output in outputs[:3]] == [ids[-20:]] * 3
    assert len({output.outputs[0].text for output in outputs[:3]}) == 1
    assert outputs[3].prompt_token_ids == busy.get_tokenizer()(PROMPT).input_ids
    assert outputs[4].prompt_token_ids == (ids * 9)[-(256 - 6) :]
    assert len(outputs[4].outputs[0].token_ids) == 6
    assert len(outputs[5].prompt_token_ids) + len(outputs[5].outputs[0].token_ids) == 256


def test_answer_ends_at_the_end_of_the_context(busy):
    ids = (busy.get_tokenizer()(LONG_PROMPT).input_ids * 9)[:242]
    requests = [(ids, greedy(limit, ignore_eos=True)) for limit in (10**6, None, 14, 5)]
    completions = [output.outputs[0] for output in ask(busy, *requests)]
    assert [len(completion.token_ids) for completion in completions] == [14, 14, 14, 5]
    assert {completion.finish_reason for completion in completions} == {"length"}


def visible(outputs):
    """Return all that a consumer can compare of an answer."""
    return [
        (
            output.prompt_token_ids,
            output.prompt_logprobs,
            [(part.index, part.text, part.token_ids, part.logprobs, part.finish_reason) for part in output.outputs],
        )
        for output in outputs
    ]


def test_every_served_parameter_changes_an_answer(real_llm):
    async def seen(params):
        params = {"max_tokens": 12, **params}
        return visible([output async for output in real_llm.generate(PROMPT, SamplingParams(**params))])

    async def run():
        bases = {str(case.base): case.base for case in CASES.values()}
        params = [*bases.values(), *bases.values(), *({**case.base, name: case.shown} for name, case in CASES.items())]
        answers = await asyncio.gather(*map(seen, params))
        without, again = (dict(zip(bases, answers[i * len(bases) :], strict=False)) for i in range(2))
        return without, again, dict(zip(CASES, answers[2 * len(bases) :], strict=True))

    without, again, shown = asyncio.run(run())
    assert without == again
    assert [name for name, case in CASES.items() if without[str(case.base)] == shown[name]] == []


def test_request_without_parameters_takes_the_defaults_of_the_generation_config(busy):
    prompt = "x" * 30
    implicit, explicit = ask(
        busy, (prompt, None), (prompt, SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=9))
    )
    assert implicit.outputs[0].token_ids == explicit.outputs[0].token_ids
    assert len(implicit.outputs[0].token_ids) == 9
    (other,) = ask(busy, (prompt, greedy(9)))
    assert other.outputs[0].token_ids != implicit.outputs[0].token_ids, "a request with parameters takes no defaults"


def test_stream_interval_spaces_the_outputs(busy):
    outputs = collect(busy, PROMPT, SamplingParams(temperature=0, max_tokens=23, ignore_eos=True, output_kind=DELTA))
    sizes = [len(output.outputs[0].token_ids) for output in outputs]
    assert sum(sizes) == 23
    # The first token is not held back, but tokens that arrive before the caller asks are joined to it.
    assert all(size >= 5 for size in sizes[1:-1])


REFUSED = [
    ({"stop": ""}, "stop"),
    ({"stop": ["ok", ""]}, "stop"),
    ({"stop": "x" * 5000}, "stop"),
    ({"stop": ["x"] * 5000}, "stop"),
    ({"stop": "x", "detokenize": False}, "detokenize"),
    ({"bad_words": [""]}, "bad_words"),
    ({"logit_bias": {49152: 1.0}}, "logit_bias"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"allowed_token_ids": [49152]}, "allowed_token_ids"),
    ({"n": 0}, "n must"),
    ({"n": 10_000}, "n must"),
    ({"n": 2, "temperature": 0}, "temperature"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 21}, "max_logprobs"),
    ({"logprobs": -1}, "max_logprobs"),
    ({"prompt_logprobs": 21}, "max_logprobs"),
    ({"min_tokens": 2000, "max_tokens": None}, "min_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
]


def test_parameters_that_cannot_be_served_are_refused_by_name_and_disturb_no_other_request(llm):
    async def run():
        neighbour = asyncio.create_task(answer(llm, PROMPT, greedy(6, ignore_eos=True)))
        for fields, words in REFUSED:
            with pytest.raises(ValueError, match=words):
                await answer(llm, PROMPT, SamplingParams(**fields))
        return (await neighbour).outputs[0]

    assert len(asyncio.run(run()).token_ids) == 6
    assert llm.get_num_unfinished_requests() == 0
