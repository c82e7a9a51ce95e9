"""Draws follow the distribution that the parameters describe; transformers' warpers are the reference."""

import numpy as np
import pytest
import torch

from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.worker.sampling.random_numbers import uniform_draws
from vllm_mp.core.worker.sampling.sampler import NO_TOKEN, Sampler
from vllm_mp.kernels import ops, sampling
from vllm_mp.kernels.sampling import SAMPLING_FILTERS, filter_logits, invert_cumulative
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.testing.sampling_cases import CASES, DRAWS, draw_params, warped

VOCAB = 40
NUM_DRAWS = 4000
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


def reference(logits, **knobs):
    return warped(logits[None], knobs).softmax(-1)[0].double().numpy()


def chi_square_p_value(observed, expected):
    """Return the probability that counts are at least as far from `expected` as `observed`."""
    statistic = ((observed - expected) ** 2 / expected).sum()
    halves = torch.tensor([len(observed) - 1, statistic], dtype=torch.float64) / 2
    return torch.special.gammaincc(*halves).item()


def kolmogorov_distance(draws):
    """Return the greatest distance between the distribution of `draws` and the uniform distribution on [0, 1)."""
    bounds = np.linspace(0, 1, len(draws) + 1)
    ordered = np.sort(draws)
    return max((bounds[1:] - ordered).max(), (ordered - bounds[:-1]).max())


def assert_follows(tokens, probabilities):
    """Check by chi-square; the seeds are fixed, so the outcome is the same every time."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0, "a barred token was drawn"
    likely = probabilities * len(tokens) >= 5
    observed = np.append(counts[likely], counts[~likely].sum())
    expected = np.append(probabilities[likely], probabilities[~likely].sum()) * len(tokens)
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    if len(observed) > 1:
        assert chi_square_p_value(observed, expected * observed.sum() / expected.sum()) > 1e-3


@pytest.mark.parametrize("knobs", DRAWS, ids=str)
def test_draws_follow_the_distribution(knobs):
    logits = logits_of()
    batch, sampler = make_batch([SamplingParams(seed=seed, **knobs) for seed in range(NUM_DRAWS)])
    tokens = sampler.sample(logits.repeat(NUM_DRAWS, 1), batch.order).numpy()
    assert_follows(tokens, reference(logits, **knobs))


FILTERED = [
    (sampling_filter, value) for sampling_filter in SAMPLING_FILTERS for value in CASES[sampling_filter.name].values
]


@pytest.mark.parametrize(("sampling_filter", "value"), FILTERED, ids=lambda value: str(getattr(value, "name", value)))
def test_a_filter_keeps_the_tokens_that_transformers_keeps(sampling_filter, value):
    logits = 3 * torch.randn(50, 500, generator=torch.Generator().manual_seed(3))
    params = draw_params([{sampling_filter.name: value, "temperature": 1.0}] * 50, torch.zeros(50).double())
    found = filter_logits(logits, params, [sampling_filter])
    assert torch.equal(found == -torch.inf, warped(logits, {sampling_filter.name: value}) == -torch.inf)
    assert torch.equal(found[found > -torch.inf], logits[found > -torch.inf])


@pytest.mark.parametrize("sampling_filter", SAMPLING_FILTERS, ids=lambda sampling_filter: sampling_filter.name)
def test_a_filter_leaves_rows_alone_that_are_greedy_or_off_or_not_finite(sampling_filter):
    logits = torch.randn(5, 60, generator=torch.Generator().manual_seed(3))
    logits[2, 3], logits[3, 7] = torch.nan, torch.inf
    on = {sampling_filter.name: sampling_filter.trial}
    params = draw_params([{**on, "temperature": 0}, {}, on, on, on], torch.zeros(5).double())
    found = filter_logits(logits, params, [sampling_filter])
    assert torch.equal(found[:2], logits[:2])
    assert torch.isnan(found[2, 3])
    assert torch.isposinf(found[3, 7])
    assert torch.isneginf(found[4]).any(), "the trial value bars tokens"


def test_only_filters_that_a_random_row_uses_run(monkeypatch):
    seen = []
    monkeypatch.setattr(ops, "sample", lambda logits, params: seen.append(params))
    for sampling_filter in SAMPLING_FILTERS:
        batch, sampler = make_batch(
            [SamplingParams(seed=1), SamplingParams(seed=2, **{sampling_filter.name: sampling_filter.trial})]
        )
        sampler.sample(torch.zeros(2, VOCAB), batch.order)
        assert seen.pop().filters == (sampling_filter,)
        sampler.sample(torch.zeros(1, VOCAB), batch.order[:1])
        assert seen.pop().filters == ()
        greedy = SamplingParams(temperature=0, **{sampling_filter.name: sampling_filter.trial})
        batch, sampler = make_batch([SamplingParams(seed=1), greedy])
        sampler.sample(torch.zeros(2, VOCAB), batch.order)
        assert seen.pop().filters == (), "a greedy row needs no filter"


def test_filters_in_slices_of_rows_bar_the_same_tokens(monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(7, VOCAB)
    values = {sampling_filter.name: sampling_filter.trial for sampling_filter in SAMPLING_FILTERS}
    params = draw_params([{"temperature": 0.0 if row == 3 else 0.7, **values} for row in range(7)], torch.zeros(7))
    whole = sampling.filter_logits(logits.clone(), params, SAMPLING_FILTERS)
    monkeypatch.setattr(sampling, "_MAX_FILTERED_ELEMENTS", 2 * VOCAB)
    assert torch.equal(sampling.filter_logits(logits.clone(), params, SAMPLING_FILTERS), whole)
    assert torch.equal(whole[3], logits[3])
    assert torch.isneginf(whole[0]).any()


def test_filters_that_triton_does_not_fuse_come_before_those_that_it_fuses():
    triton = pytest.importorskip("vllm_mp.kernels.triton.sampling")
    fused = [sampling_filter.name in triton.FUSED_FILTERS for sampling_filter in SAMPLING_FILTERS]
    assert fused == sorted(fused)
    assert sum(fused) == len(triton.FUSED_FILTERS)


@pytest.mark.parametrize("size", [1, 7, 256, 257, 5000])
def test_the_drawn_index_is_where_the_cumulative_sum_passes_the_number(size):
    generator = torch.Generator().manual_seed(size)
    probability = torch.rand(200, size, generator=generator).pow(8)
    probability[:, 1:] *= torch.rand(200, size - 1, generator=generator) < 0.3  # most have probability zero
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
def test_rows_that_are_not_finite_get_no_token_and_leave_other_rows_alone(size):
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size))
    batch, sampler = make_batch([SamplingParams(seed=seed) for seed in range(4)])
    expected = sampler.sample(logits.clone(), batch.order)
    logits[1], logits[2, -1] = torch.nan, torch.inf
    assert sampler.sample(logits, batch.order).tolist() == [expected[0], NO_TOKEN, NO_TOKEN, expected[3]]


def test_successive_positions_of_one_request_draw_independently():
    logits = logits_of(1)
    batch, sampler = make_batch([SamplingParams(seed=11)])
    tokens = []
    for _ in range(NUM_DRAWS):
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
        # Uniform draws exceed this distance in one of 1000 cases.
        assert kolmogorov_distance(draws) < np.sqrt(np.log(2 / 1e-3) / 2 / len(draws))
        assert draws.min() >= 0
        assert draws.max() < 1
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_greedy_rows_get_the_most_likely_token_among_rows_that_draw():
    logits = torch.stack([logits_of(seed) for seed in range(6)])
    params = [SamplingParams(temperature=0 if i % 2 else 1, seed=i) for i in range(6)]
    batch, sampler = make_batch(params)
    tokens = sampler.sample(logits.clone(), batch.order)
    assert tokens[1::2].tolist() == logits[1::2].argmax(-1).tolist()


def test_draws_are_batch_invariant():
    rng = np.random.default_rng(0)
    params = [
        SamplingParams(
            temperature=float(rng.choice([0, 0.5, 1, 2])),
            seed=int(rng.integers(2**62)),
            **{
                sampling_filter.name: rng.choice(CASES[sampling_filter.name].values).item()
                for sampling_filter in SAMPLING_FILTERS
                if rng.random() < 0.4
            },
        )
        for _ in range(50)
    ]
    logits = torch.stack([logits_of(seed) for seed in range(50)])
    batch, sampler = make_batch(params, num_output_tokens=4)
    together = sampler.sample(logits.clone(), batch.order).tolist()
    for i, row_params in enumerate(params):
        batch, sampler = make_batch([row_params], num_output_tokens=4)
        assert sampler.sample(logits[i : i + 1].clone(), batch.order).tolist() == [together[i]]


def test_stop_tokens_are_barred_below_min_tokens():
    logits = torch.zeros(3, VOCAB)
    logits[:, EOS], logits[:, 9], logits[:, 20] = 30, 20, 10
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[9])
    batch, sampler = make_batch([params, params, SamplingParams(temperature=0, min_tokens=2, ignore_eos=True)])
    batch.num_tokens[:] = batch.num_prompt_tokens + np.array([1, 2, 1])
    assert sampler.sample(logits, batch.order).tolist() == [20, EOS, EOS]


def test_draws_at_both_ends_of_the_distribution_have_probability(monkeypatch):
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 4] = logits[0, 6] = 0
    for uniform, token in ((1 - 2.0**-52, 6), (0.0, 4)):
        batch, sampler = make_batch([SamplingParams(seed=0)])
        monkeypatch.setattr(
            "vllm_mp.core.worker.sampling.sampler.uniform_draws",
            lambda _, positions, uniform=uniform: np.full(positions.shape, uniform),
        )
        assert sampler.sample(logits.clone(), batch.order).tolist() == [token]


def test_rows_that_a_step_repeats_get_the_draws_of_a_step_that_is_new():
    params = [SamplingParams(temperature=1.5, seed=seed, top_k=20) for seed in range(3)]
    batch, sampler = make_batch(params, num_output_tokens=2)
    rows, batch.num_tokens[1] = batch.order, batch.num_tokens[1] + 7
    got, expected = [], []
    for advance in [1] * 70 + [5, 0, 1]:
        logits = torch.stack([logits_of(len(got) + row) for row in range(3)])
        assert sampler.repeats(rows) == bool(got)
        got.append(sampler.sample(logits.clone(), rows).tolist())
        expected.append(Sampler(batch, torch.device("cpu")).sample(logits.clone(), rows).tolist())
        batch.num_tokens[rows] += advance
    assert got == expected


def test_rows_are_not_repeated_while_their_logits_change_or_once_the_batch_has_changed():
    batch, sampler = make_batch([SamplingParams(seed=0, min_tokens=2), SamplingParams(seed=1)])
    rows, logits = batch.order, torch.stack([logits_of(0), logits_of(1)])
    for num_output_tokens in range(4):
        batch.num_tokens[rows] = batch.num_prompt_tokens[rows] + num_output_tokens
        assert sampler.repeats(rows) == (num_output_tokens > 2)
        sampler.sample(logits.clone(), rows)
    batch.remove(int(rows[0]))
    assert not sampler.repeats(rows)
