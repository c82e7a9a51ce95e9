"""Logits processors agree with those of transformers, and change each row as if it were alone."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.logits_processors import LogitsProcessors, TokenCounts
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.worker.sampling.sampler import NO_TOKEN, Sampler, apply_logits_processors
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.testing.sampling_cases import FILTERS

VOCAB = 24
EOS = 3
CPU = torch.device("cpu")


def make_request(params, prompt=(1, 2), output=(), bad_words=(), slot=0):
    tokens = np.array([*prompt, *output], np.int32)
    processors = LogitsProcessors.from_params(params, bad_words)
    return Request(0, slot, "id", params, tokens, len(prompt), 1000, (0, slot), logits_processors=processors)


def make_batch(*requests):
    batch = Batch(max(1, len(requests)), 1000, 16, [EOS])
    for request in requests:
        batch.add(request, np.array([1], np.int32))
    return batch


def processed(logits, *requests):
    """Return a copy of `logits` [n, vocab] changed by the processors of n requests."""
    logits = logits.float().clone()
    batch = make_batch(*requests)
    apply_logits_processors(logits, batch, batch.order)
    return logits


def processed_row(logits, output=(), prompt=(1, 2), bad_words=(), **params):
    """Return the logits of one row as a list, changed by the processors that `params` ask for."""
    request = make_request(SamplingParams(**params), prompt, output, bad_words)
    return processed(torch.tensor([logits], dtype=torch.float32), request)[0].tolist()


def sample(logits, *requests):
    batch = make_batch(*requests)
    return Sampler(batch, CPU).sample(logits.clone(), batch.order).tolist()


def barred(scores):
    return [token for token, score in enumerate(scores) if score == -torch.inf]


def reference(logits, params, prompt, output, bad_words):
    """Apply transformers' processors in the order that `SamplingParams` states."""
    scores, sequence = logits.float()[None].clone(), torch.tensor([[*prompt, *output]])
    if params.allowed_token_ids:
        others = sorted(set(range(VOCAB)) - set(params.allowed_token_ids))
        scores[:, others] = -torch.inf
    stop = params.stop_token_ids + ([] if params.ignore_eos else [EOS])
    if params.min_tokens and stop:
        scores = MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, stop)(sequence, scores)
    if bad_words:
        # The processor ignores words longer than its input, and must read the output alone.
        answer = torch.tensor([[-1] * 8 + [*output]])
        scores = NoBadWordsLogitsProcessor([list(word) for word in bad_words])(answer, scores)
    if params.logit_bias:
        bias = {(token,): value for token, value in params.logit_bias.items()}
        scores = SequenceBiasLogitsProcessor(bias)(sequence, scores)
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(sequence, scores)
    for token, count in Counter(output).items():
        scores[0, token] -= params.frequency_penalty * count + params.presence_penalty
    return scores[0]


TOKEN = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    **{name: st.sampled_from([getattr(SamplingParams(), name), *values]) for name, values in FILTERS.items()},
    seed=st.integers(0, 99),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 1.9]),
    repetition_penalty=st.sampled_from([1.0, 0.4, 1.3]),
    logit_bias=st.none() | st.dictionaries(TOKEN, st.floats(-9, 9, width=32), min_size=1, max_size=5),
    allowed_token_ids=st.none() | st.lists(TOKEN, min_size=1, max_size=VOCAB),
    stop_token_ids=st.lists(TOKEN, max_size=3),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
)
REQUEST = st.tuples(
    PARAMS,
    st.lists(TOKEN, min_size=1, max_size=6),
    st.lists(TOKEN, max_size=6),
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=4) | st.just([]),
)
PLAIN = st.builds(SamplingParams, temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 99))
ROW = REQUEST | st.tuples(PLAIN, st.just([1]), st.lists(TOKEN, max_size=2), st.just([]))


def logits_of(count, seed, dtype=torch.float32):
    """Return logits of both signs on a coarse grid, so that some are equal."""
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 2).round().div(2).to(dtype)


@settings(max_examples=50, deadline=None)
@given(REQUEST, st.integers(0, 1000))
def test_processors_agree_with_transformers_in_the_documented_order(request, seed):
    logits = logits_of(1, seed)
    found = processed(logits, make_request(*request))
    torch.testing.assert_close(found[0], reference(logits[0], *request), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=25, deadline=None)
@given(rows=st.lists(ROW, min_size=2, max_size=7), seed=st.integers(0, 1000))
def test_each_row_is_changed_to_the_bit_as_if_it_were_alone(dtype, rows, seed):
    logits = logits_of(len(rows), seed, dtype)
    together = processed(logits, *[make_request(*row, slot=i) for i, row in enumerate(rows)])
    tokens = sample(logits, *[make_request(*row, slot=i) for i, row in enumerate(rows)])
    for i, row in enumerate(rows):
        assert torch.equal(together[i : i + 1], processed(logits[i : i + 1], make_request(*row)))
        assert sample(logits[i : i + 1], make_request(*row)) == [tokens[i]]
        if make_request(*row).logits_processors is None and not row[0].min_tokens:
            assert torch.equal(together[i], logits[i].float())


@settings(max_examples=25, deadline=None)
@given(REQUEST, st.lists(TOKEN, min_size=3, max_size=9), st.integers(1, 8))
def test_processors_continue_an_output_after_preemption_and_after_recovery(request, answer, cut):
    params, prompt, _, bad_words = request
    logits = logits_of(len(answer) + 1, 5)
    kept = make_request(params, prompt, (), bad_words)
    batch = Batch(3, 1000, 16, [EOS])
    others = [batch.add(make_request(SamplingParams(), slot=slot), np.array([slot], np.int32)) for slot in (1, 2)]
    batch.remove(others[0])
    row = batch.add(kept, np.array([3], np.int32))
    for position in range(len(answer) + 1):
        if position == cut:
            # The request returns in another row.
            batch.remove(row)
            batch.remove(others[1])
            row = batch.add(kept, np.array([3], np.int32))
        scores = logits[position : position + 1].clone()
        apply_logits_processors(scores, batch, np.array([row]))
        recovered = make_request(params, prompt, answer[:position], bad_words)
        assert torch.equal(scores, processed(logits[position : position + 1], recovered))
        if position < len(answer):
            batch.token_ids[row, batch.num_tokens[row]] = answer[position]
            batch.num_tokens[row] += 1


@given(st.lists(st.integers(0, 300), min_size=1), st.lists(st.lists(st.integers(0, 300), max_size=90), max_size=5))
def test_counts_follow_an_output_that_grows_by_any_number_of_tokens(prompt, pieces):
    counts, answer = TokenCounts(), []
    for piece in pieces:
        answer += piece
        ids, found = counts.catch_up(np.array(prompt + answer, np.int32), len(prompt))
        assert len(set(ids.tolist())) == len(ids)
        expected = Counter(answer)
        assert dict(zip(ids.tolist(), found.tolist(), strict=True)) == {
            token: expected[token] for token in {*prompt, *answer}
        }


def test_counts_hold_any_number_of_distinct_tokens():
    prompt, answer = np.arange(100, 1000), np.repeat(np.arange(3000), 2)
    counts = TokenCounts()
    counts.catch_up(prompt.astype(np.int32), 900)
    ids, found = counts.catch_up(np.concatenate([prompt, answer]).astype(np.int32), 900)
    assert sorted(ids.tolist()) == list(range(3000))
    assert (found == 2).all()


def test_only_the_repetition_penalty_reads_the_prompt():
    assert processed_row([4.0, 4, -4, -4], prompt=[0, 2], repetition_penalty=2.0) == [2, 4, -8, -4]
    assert processed_row([4.0, 4, -4, -4], prompt=[0, 2], output=[1, 3, 3], repetition_penalty=2.0) == [2, 2, -8, -8]
    assert processed_row([4.0, 4, 4], prompt=[0, 0], output=[1, 1, 1], frequency_penalty=0.5) == [4, 2.5, 4]
    assert processed_row([4.0, 4, 4], prompt=[0, 0], output=[1, 1, 1], presence_penalty=0.5) == [4, 3.5, 4]
    assert processed_row([4.0, 4, 4], prompt=[0, 0], output=[1], presence_penalty=-2, frequency_penalty=-1) == [4, 7, 4]


def test_penalties_come_after_biases_and_repetition_comes_before_the_other_penalties():
    # Multiplied before the bias, the first logit would be -2 + 3.
    assert processed_row([-1.0, 0], prompt=[0], logit_bias={0: 3}, repetition_penalty=2.0) == [1, 0]
    assert processed_row([4.0, 0], prompt=[1], output=[0], repetition_penalty=2.0, presence_penalty=1) == [1, 0]


def test_a_barred_token_stays_barred():
    scores = processed_row(
        [5.0] * 6,
        prompt=[0],
        output=[0, 1, 2, 4],
        bad_words=[[4, 5]],
        allowed_token_ids=[1, 4, 5, EOS],
        logit_bias=dict.fromkeys(range(6), 1e6),
        min_tokens=5,
        repetition_penalty=0.5,
        frequency_penalty=-2,
        presence_penalty=-2,
    )
    assert barred(scores) == [0, 2, EOS, 5]


def test_temperature_and_filters_apply_after_logits_processors():
    logits = torch.full((1, VOCAB), -10.0)
    logits[0, 7], logits[0, 8], logits[0, 9] = 0, 1, 9
    knobs = {"presence_penalty": 1.0, "temperature": 0.5, "logit_bias": {9: -50}}
    for filters in ({"min_p": 1.0}, {"top_k": 1}, {"top_p": 0.6}):
        requests = [make_request(SamplingParams(seed=s, **knobs, **filters), output=[8]) for s in range(60)]
        # The penalty makes both tokens equally likely at every temperature.
        assert set(sample(logits.repeat(60, 1), *requests)) == {7, 8}


def test_bad_words_are_matched_in_the_output_alone():
    words = [[5, 6], [5, 7], [8], [5, 5, 9]]
    assert barred(processed_row([0.0] * 12, prompt=[1, 5], bad_words=words)) == [8]
    assert barred(processed_row([0.0] * 12, prompt=[1, 5], output=[5], bad_words=words)) == [6, 7, 8]
    assert barred(processed_row([0.0] * 12, output=[5, 5], bad_words=words)) == [6, 7, 8, 9]
    assert barred(processed_row([0.0] * 12, output=[5, 4], bad_words=words)) == [8]


def test_min_tokens_bars_stop_tokens_only():
    stops = {"min_tokens": 2, "stop_token_ids": [9, 4]}
    assert barred(processed_row([0.0] * 12, output=[7], **stops)) == [EOS, 4, 9]
    assert barred(processed_row([0.0] * 12, output=[7], ignore_eos=True, **stops)) == [4, 9]
    assert barred(processed_row([0.0] * 12, output=[7], ignore_eos=True, min_tokens=2)) == []
    assert barred(processed_row([0.0] * 12, output=[7, 7], **stops)) == []


def test_a_row_with_all_tokens_barred_gets_no_token_and_leaves_other_rows_alone():
    logits = logits_of(5, 2)
    only_eos = SamplingParams(allowed_token_ids=[EOS], min_tokens=1, temperature=0)
    rows = [
        make_request(SamplingParams(temperature=0)),
        make_request(only_eos),
        make_request(only_eos, output=[5]),
        make_request(SamplingParams(allowed_token_ids=[4], temperature=1, seed=1), bad_words=[[4]]),
        make_request(SamplingParams(allowed_token_ids=[4], temperature=1, seed=1)),
    ]
    assert sample(logits, *rows) == [int(logits[0].argmax()), NO_TOKEN, EOS, NO_TOKEN, 4]


@pytest.mark.parametrize("temperature", [0, 1])
def test_infinite_logits_fail_only_the_rows_that_allow_them(temperature):
    logits = torch.tensor([[-torch.inf, torch.inf, torch.nan, -5, -7.5]])
    changes = {"repetition_penalty": 3.0, "presence_penalty": 2, "frequency_penalty": 2, "logit_bias": {0: 4, 1: -4}}
    touched = processed_row(logits[0].tolist(), prompt=[0, 1, 3], output=[0, 1], **changes)
    assert touched[:2] == [-torch.inf, torch.inf]
    allowing = [
        SamplingParams(allowed_token_ids=ids, temperature=temperature, seed=1, **changes) for ids in ([0, 3], [1])
    ]
    rows = [make_request(params, prompt=[0, 1, 3], output=[0]) for params in allowing]
    plain = make_request(SamplingParams(temperature=temperature, seed=1))
    assert sample(logits.repeat(3, 1), *rows, plain) == [3, NO_TOKEN, NO_TOKEN]


def test_no_processor_runs_for_a_step_without_any(monkeypatch):
    def fail(*_):
        raise AssertionError("no row has a logits processor")

    monkeypatch.setattr("vllm_mp.core.worker.sampling.sampler.apply_logits_processors", fail)
    rows = [
        make_request(SamplingParams(temperature=0, stop_token_ids=[4])),
        make_request(SamplingParams(seed=1, top_k=3, logit_bias={})),
        make_request(SamplingParams(temperature=0, min_tokens=2), output=[5, 5]),
    ]
    logits = logits_of(3, 1)
    assert sample(logits, *rows)[::2] == logits.argmax(-1)[::2].tolist()
    batch = make_batch(make_request(SamplingParams(presence_penalty=1, min_tokens=9)))
    batch.remove(0)
    assert batch.add(make_request(SamplingParams(temperature=0)), np.array([1], np.int32)) == 0
    assert Sampler(batch, CPU).sample(logits[:1], batch.order).tolist() == [int(logits[0].argmax())]
    with pytest.raises(AssertionError, match="no row has"):
        sample(logits_of(4, 1), *rows, make_request(SamplingParams(min_tokens=1)))


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("num_changed", [1, 3, 4, 6])
def test_tokens_do_not_depend_on_how_many_rows_have_processors(temperature, num_changed):
    changed = np.random.default_rng(num_changed).permutation(6)[:num_changed].tolist()
    params = [
        SamplingParams(temperature=temperature, seed=i, **({"logit_bias": {i: 20.0}} if i in changed else {}))
        for i in range(6)
    ]
    rows = [make_request(row_params, slot=i) for i, row_params in enumerate(params)]
    logits = logits_of(6, 7, torch.bfloat16)
    together = sample(logits, *rows)
    assert together == [sample(logits[[i]], row)[0] for i, row in enumerate(rows)]
    assert [together[i] for i in changed] == changed
