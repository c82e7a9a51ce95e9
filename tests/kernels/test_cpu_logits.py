"""Every build of the C++ operations on logits, compared with kernels/reference.py."""

import pytest
import torch
from support.sampling_logits import EQUAL_TO_REFERENCE, impossible_tokens_at_the_end, rows_that_are_not_finite
from support.token_masks import VOCAB_SIZES, masked_case, same_bits

from vllm_mp.kernels import ops, reference, sampling
from vllm_mp.testing.sampling_cases import DRAWS, draw_params

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab_size", "num_words"), [*VOCAB_SIZES, (4133, 130)])
def test_token_masks_forbid_what_the_reference_forbids(build, dtype, vocab_size, num_words):
    logits, masks, rows = masked_case(vocab_size, num_words, dtype)
    expected = logits.clone()
    reference.apply_token_masks(expected, masks, rows)
    ops.apply_token_masks(logits, masks, rows)
    assert same_bits(logits, expected)


@DTYPES
@pytest.mark.parametrize("size", [1, 15, 16, 4133])
def test_argmax_finds_the_first_of_the_highest_scores(build, dtype, size):
    wide = torch.randint(-9, 9, (7, size + 5)).to(dtype)
    wide[2, size // 2], wide[3, size - 1], wide[4] = float("nan"), float("inf"), -float("inf")
    wide[:, size:] = 99
    scores = wide[:, :size]
    assert torch.equal(ops.argmax(scores), reference.argmax(scores))
    assert ops.argmax(scores)[2:5].tolist() == [ops.NO_PLACE] * 3


@DTYPES
def test_no_token_mask_leaves_all_logits(build, dtype):
    logits, masks, rows = masked_case(200, 7, dtype)
    expected = logits.clone()
    ops.apply_token_masks(logits, masks[:0], rows[:0])
    assert same_bits(logits, expected)


@pytest.mark.parametrize("case", EQUAL_TO_REFERENCE)
def test_draws_equal_the_definition(build, case):
    logits, params = EQUAL_TO_REFERENCE[case]()
    assert ops.sample(logits, params).tolist() == reference.sample(logits, params).tolist()


def test_rows_that_offer_no_choice_get_no_token(build):
    tokens = ops.sample(*rows_that_are_not_finite()).tolist()
    assert tokens[1:5] == [ops.NO_PLACE] * 3 + [0]


def test_draw_ends_at_the_last_possible_token_even_if_sums_differ_in_their_last_bit(build):
    assert ops.sample(*impossible_tokens_at_the_end()).max() < 55


@pytest.mark.parametrize(
    ("dtype", "knobs"), [(torch.bfloat16, {}), *((torch.float32, knobs) for knobs in [*DRAWS, {"top_k": 900}])], ids=str
)
def test_tokens_of_a_large_vocabulary_are_drawn_as_often_as_the_definition_says(build, dtype, knobs):
    """Uniform numbers at equal distances meet each token as often as it is likely, but for one."""
    count, generator = 100, torch.Generator().manual_seed(2)
    logits = (2 * torch.randn(1, 5003, generator=generator)).to(dtype)
    params = draw_params([knobs] * count, (torch.arange(count).double() + 0.5) / count)
    got = ops.sample(logits.repeat(count, 1), params)
    expected = reference.sample(logits.repeat(count, 1), params)
    assert (got != expected).sum() <= 1
    assert torch.equal(got.sort().values, got), "the draw inverts the cumulative distribution"


def test_draw_of_a_row_does_not_depend_on_the_other_rows(build):
    logits, params = EQUAL_TO_REFERENCE["every parameter, 150 tokens"]()
    together = ops.sample(logits, params)
    alone = [ops.sample(logits[[i]], params.rows(torch.tensor([i]))) for i in range(len(logits))]
    assert torch.equal(together, torch.cat(alone))


@DTYPES
@pytest.mark.parametrize(
    ("size", "count"), [(1, 3), (150, 0), (150, 7), (150, 150), (5003, 1), (5003, 12), (5003, 300)]
)
def test_logprobs_are_those_of_the_definition(build, dtype, size, count):
    generator = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(6, size, generator=generator)).round(decimals=1).to(dtype)
    logits[1, size // 2 :] = -torch.inf
    if size > 1:
        logits[1, 0] = 0
    chosen = torch.randint(0, size, (6,), generator=generator)
    got, expected = ops.logprobs(logits, chosen, count), sampling.logprobs(logits, chosen, count)
    distribution = logits.double().log_softmax(-1)
    assert torch.equal(got.token_ids[:, 0], chosen.int())
    assert torch.equal(got.ranks, expected.ranks)
    own = distribution.gather(-1, got.token_ids.long()).float()
    for values in (expected.values, own):
        torch.testing.assert_close(got.values, values, atol=2e-6, rtol=1e-6, equal_nan=True)
    most_likely = got.token_ids[:, 1:]
    assert most_likely.shape == (6, min(count, size))
    for row, ids in zip(distribution, most_likely.tolist(), strict=True):
        assert ids == sorted(set(ids), key=lambda token: (-row[token], token)), "equally likely tokens by their ids"


def test_equally_likely_tokens_share_the_better_rank(build):
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0, 5.0]]).repeat(6, 1)
    for implementation in (ops, sampling):
        assert implementation.logprobs(logits, torch.arange(6), 0).ranks.tolist() == [5, 2, 2, 2, 6, 1]


def test_logprobs_of_rows_that_are_not_finite_are_not_numbers(build):
    logits, _ = rows_that_are_not_finite()
    for implementation in (ops, sampling):
        got = implementation.logprobs(logits, torch.full((6,), 2), 3)
        assert got.values.isnan().all(dim=-1).tolist() == [False, True, True, True, False, False]
        assert got.token_ids.min() >= 0
        assert got.token_ids.max() < logits.shape[1]
