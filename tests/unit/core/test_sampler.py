"""Draws follow the distribution that the parameters describe; transformers' own warpers are the reference."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.worker.sampler import NO_TOKEN, Sampler, uniform_draws
from vllm_mp.kernels.sampling import invert_cumulative
from vllm_mp.sampling_params import SamplingParams

VOCAB = 40
DRAWS = 8000
EOS = 3


def make_batch(all_params, num_output_tokens=0, num_prompt_tokens=2):
    batch = Batch(len(all_params), 64, 16, [EOS])
    for slot, params in enumerate(all_params):
        tokens = np.ones(num_prompt_tokens + num_output_tokens, np.int32)
        request = Request(0, slot, str(slot), params, tokens, num_prompt_tokens, 64, (0, slot))
        batch.add(request, np.array([slot + 1], np.int32))
    return batch, Sampler(batch, torch.device("cpu"))


def logits_of(seed=0, vocab=VOCAB):
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 2


def reference(logits, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    scores = TemperatureLogitsWarper(temperature)(None, logits[None])
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)[0].double().numpy()


def assert_follows(tokens, probabilities):
    """Chi-square, with a fixed seed, so that the outcome is the same every time."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0, "a token that the parameters exclude was drawn"
    likely = probabilities * len(tokens) >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(probabilities[likely], probabilities[~likely].sum()) * len(tokens)
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    if len(observed) > 1:
        assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
        {"top_k": 10_000},
        {"top_k": -1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"top_k": 1},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(knobs):
    logits = logits_of()
    batch, sampler = make_batch([SamplingParams(seed=seed, **knobs) for seed in range(DRAWS)])
    tokens = sampler.sample(logits.repeat(DRAWS, 1), batch.order).numpy()
    expected = dict(knobs)
    expected["top_k"] = min(max(0, expected.get("top_k", 0)), VOCAB)
    assert_follows(tokens, reference(logits, **expected))


@pytest.mark.parametrize("size", [1, 7, 256, 257, 5000])
def test_the_place_is_where_the_sum_passes_the_number(size):
    generator = torch.Generator().manual_seed(size)
    probability = torch.rand(200, size, generator=generator).pow(8)
    probability[:, 1:] *= torch.rand(200, size - 1, generator=generator) < 0.3  # most are barred
    uniform = torch.rand(200, 1, generator=generator, dtype=torch.float64)
    uniform[:40], uniform[40:80] = 0, 1 - 2.0**-52
    places = invert_cumulative(probability, uniform)
    assert (probability.gather(1, places.unsqueeze(1)) > 0).all()
    sums = probability.double().cumsum(1)
    target = uniform * sums[:, -1:]
    slack = 1e-12 * sums[:, -1]
    assert (sums.gather(1, places.unsqueeze(1)).squeeze(1) > target.squeeze(1) - slack).all()
    before = (sums - probability.double()).gather(1, places.unsqueeze(1)).squeeze(1)
    assert (before <= target.squeeze(1) + slack).all()


@pytest.mark.parametrize("size", [7, 256, 600])
def test_rows_that_are_not_numbers_get_no_token_and_the_others_theirs(size):
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size))
    batch, sampler = make_batch([SamplingParams(seed=seed) for seed in range(4)])
    expected = sampler.sample(logits.clone(), batch.order)
    logits[1], logits[2, -1] = torch.nan, torch.inf
    assert sampler.sample(logits, batch.order).tolist() == [expected[0], NO_TOKEN, NO_TOKEN, expected[3]]


def test_successive_positions_of_one_request_draw_independently():
    logits = logits_of(1)
    batch, sampler = make_batch([SamplingParams(seed=11)])
    tokens = []
    for _ in range(DRAWS):
        tokens.append(int(sampler.sample(logits[None].clone(), batch.order)))
        batch.num_tokens[0] += 1
    assert_follows(np.array(tokens), reference(logits))
    pairs = np.array(tokens[:-1]) * VOCAB + np.array(tokens[1:])
    assert_follows(pairs, np.outer(reference(logits), reference(logits)).ravel())


def test_draws_are_uniform_over_seeds_and_positions():
    seeds = np.arange(20_000, dtype=np.uint64)
    at_start = uniform_draws(seeds, np.zeros(20_000, np.int64))
    along = uniform_draws(np.full(20_000, 5, np.uint64), np.arange(20_000))
    for draws in (at_start, along):
        assert kstest(draws, "uniform").pvalue > 1e-3
        assert draws.min() >= 0
        assert draws.max() < 1
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_greedy_takes_the_likeliest_token_and_mixes_with_draws():
    logits = torch.stack([logits_of(seed) for seed in range(6)])
    params = [SamplingParams(temperature=0 if i % 2 else 1, seed=i) for i in range(6)]
    batch, sampler = make_batch(params)
    tokens = sampler.sample(logits.clone(), batch.order)
    assert tokens[1::2].tolist() == logits[1::2].argmax(-1).tolist()


def test_a_request_draws_the_same_alone_and_among_others_with_other_settings():
    rng = np.random.default_rng(0)
    params = [
        SamplingParams(
            temperature=float(rng.choice([0, 0.5, 1, 2])),
            top_k=int(rng.integers(0, 8)),
            top_p=float(rng.uniform(0.3, 1)),
            min_p=float(rng.choice([0, 0.05])),
            seed=int(rng.integers(2**62)),
        )
        for _ in range(50)
    ]
    logits = torch.stack([logits_of(seed) for seed in range(50)])
    batch, sampler = make_batch(params, num_output_tokens=4)
    together = sampler.sample(logits.clone(), batch.order).tolist()
    for i, one in enumerate(params):
        batch, sampler = make_batch([one], num_output_tokens=4)
        assert sampler.sample(logits[i : i + 1].clone(), batch.order).tolist() == [together[i]]


def test_stop_tokens_are_barred_below_min_tokens():
    logits = torch.zeros(3, VOCAB)
    logits[:, EOS], logits[:, 9], logits[:, 20] = 30, 20, 10
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[9])
    batch, sampler = make_batch([params, params, SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)])
    batch.num_tokens[:] = batch.num_prompt_tokens + np.array([1, 2, 1])
    assert sampler.sample(logits, batch.order).tolist() == [20, EOS, EOS]


def test_a_draw_at_the_very_end_of_the_distribution_is_a_token_that_has_probability(monkeypatch):
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 4] = logits[0, 6] = 0
    batch, sampler = make_batch([SamplingParams(seed=0)])
    monkeypatch.setattr("vllm_mp.core.worker.sampler.uniform_draws", lambda *_: np.array([1 - 2.0**-52]))
    assert sampler.sample(logits.clone(), batch.order).tolist() == [6]
    monkeypatch.setattr("vllm_mp.core.worker.sampler.uniform_draws", lambda *_: np.array([0.0]))
    assert sampler.sample(logits.clone(), batch.order).tolist() == [4]
