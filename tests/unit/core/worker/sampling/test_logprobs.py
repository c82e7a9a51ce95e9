"""Log-probabilities are the model's own, belong to the right tokens and positions, and are sent once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mp import wire
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.logits_processors import LogitsProcessors
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.worker.sampling.logprobs import StepLogprobs, prompt_logprobs
from vllm_mp.core.worker.sampling.sampler import NO_TOKEN, Sampler
from vllm_mp.requests.sampling_params import SamplingParams

VOCAB, HIDDEN = 30, 8
WEIGHT = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
STATE = torch.randn(VOCAB, 40, HIDDEN, generator=torch.Generator().manual_seed(2))
"""[token, position, hidden_size] hidden states of the stand-in for a model."""


def make_request(slot, tokens, num_prompt_tokens, num_logprobs=-1, num_prompt_logprobs=-1, client=0, **params):
    made = SamplingParams(seed=1, **params)
    return Request(
        client,
        slot,
        "id",
        made,
        np.array(tokens, np.int32),
        num_prompt_tokens,
        100,
        (0, slot),
        logits_processors=LogitsProcessors.from_params(made, []),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def make_batch(*requests):
    batch = Batch(8, 100, 16, [2])
    for request in requests:
        batch.add(request, np.array([1], np.int32))
    return batch


def unpack(message):
    """Return token ids [n, 1 + k], values [n, 1 + k] and ranks [n] as a client decodes them."""
    output = wire.StepOutput(1, 1, b"", b"", b"", logprobs=[message])
    (message,) = wire.decode_core_message(wire.encode(output)).logprobs
    ranks = np.frombuffer(message.ranks, "<u4")
    ids = np.frombuffer(message.token_ids, "<i4").reshape(len(ranks), -1)
    values = np.frombuffer(message.values, "<f4").reshape(len(ranks), -1)
    assert ids.shape == values.shape
    return ids, values, ranks


def assert_entries(raw, chosen, count, ids, values, rank):
    """Check the entries of a position: `chosen` and the `count` most likely tokens under the logits `raw` [vocab]."""
    expected = raw.double().log_softmax(-1)
    assert len(ids) == 1 + min(count, VOCAB)
    assert ids[0] == chosen
    np.testing.assert_allclose(values, expected[ids.tolist()].numpy(), atol=1e-6, rtol=1e-6)
    assert rank == 1 + (raw > raw[chosen]).sum()
    np.testing.assert_allclose(values[1:], expected.sort(descending=True).values[:count].numpy(), atol=1e-6, rtol=1e-6)
    assert len(set(ids[1:].tolist())) == len(ids) - 1


def logits_of(count, seed=0, dtype=torch.float32):
    return (torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


def test_choice_among_equally_likely_tokens_does_not_depend_on_other_rows():
    vocab = 1000
    logits = (torch.randn(1, vocab, generator=torch.Generator().manual_seed(1))).round().to(torch.bfloat16)
    alone = make_batch(make_request(0, [1], 1, num_logprobs=3))
    (expected,) = StepLogprobs(logits, alone, alone.order).messages(torch.tensor([5]))()
    beside = make_batch(make_request(0, [1], 1, num_logprobs=3), make_request(1, [1], 1, num_logprobs=900))
    got = StepLogprobs(logits.repeat(2, 1), beside, beside.order).messages(torch.tensor([5, 5]))()
    assert got[0] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_row_gets_its_number_of_tokens_from_the_raw_distribution(dtype):
    """Logits processors, temperature and filters do not change log-probabilities."""
    logits = logits_of(6, dtype=dtype)
    knobs = {"temperature": 0.2, "top_k": 1, "logit_bias": {7: 1e6}, "presence_penalty": 1.0}
    counts = [3, -1, 0, 1, VOCAB, VOCAB + 20]
    requests = [make_request(i, [5] * (3 + i), 2, count, client=i % 2, **knobs) for i, count in enumerate(counts)]
    batch = make_batch(*requests)
    raw = logits.float().clone()
    wanted = StepLogprobs(logits, batch, batch.order)
    tokens = Sampler(batch, torch.device("cpu")).sample(logits, batch.order)
    assert tokens.tolist() == [7] * 6, "the processors did change the logits"
    messages = wanted.messages(tokens)()
    assert [message.slot for _, message in messages] == [0, 2, 3, 4, 5]
    for client, message in messages:
        ids, values, ranks = unpack(message)
        slot = message.slot
        assert (client, len(ranks), message.position) == (slot % 2, 1, 1 + slot)
        assert_entries(raw[slot], 7, counts[slot], ids[0], values[0], ranks[0])


def test_rows_without_a_token_have_no_logprobs_and_shift_no_other_row():
    logits = logits_of(4)
    raw = logits.clone()
    logits[1] = torch.nan
    batch = make_batch(*[make_request(i, [1, 2], 2, 2) for i in range(4)])
    wanted = StepLogprobs(logits, batch, batch.order)
    messages = wanted.messages(torch.tensor([4, NO_TOKEN, 6, NO_TOKEN]))()
    assert [message.slot for _, message in messages] == [0, 2]
    for (_, message), token in zip(messages, (4, 6), strict=True):
        ids, values, ranks = unpack(message)
        assert_entries(raw[message.slot], token, 2, ids[0], values[0], ranks[0])


def test_rows_of_a_step_get_their_own_logprobs_in_any_order():
    batch = make_batch(*[make_request(i, [1, 2], 2, i - 1) for i in range(5)])
    rows, logits = np.array([4, 0, 2]), logits_of(3)
    messages = StepLogprobs(logits, batch, rows).messages(torch.tensor([9, 8, 7]))()
    assert [message.slot for _, message in messages] == [4, 2]
    for (_, message), at, token in zip(messages, (0, 2), (9, 7), strict=True):
        ids, values, ranks = unpack(message)
        assert_entries(logits[at], token, message.slot - 1, ids[0], values[0], ranks[0])


def test_logits_are_not_read_when_no_row_asks_for_logprobs():
    batch = make_batch(make_request(0, [1, 2], 2))
    assert StepLogprobs(None, batch, batch.order).messages(torch.tensor([1]))() == []


class Prefill:
    """Computes prompts step by step, as the scheduler and the model runner do."""

    def __init__(self, *requests):
        self.batch = make_batch(*requests)
        self.received = {request.slot: {} for request in requests}
        self.largest = 0

    def compute_logits(self, hidden, first, last):
        self.largest = max(self.largest, last - first)
        return hidden[first:last] @ WEIGHT.T

    def step(self, counts):
        """Compute the next tokens of some rows; `counts` is {row: number of tokens}."""
        batch = self.batch
        rows, numbers = np.array(list(counts), np.int64), np.array(list(counts.values()), np.int64)
        done = batch.num_computed_tokens
        spans = [(row, slice(done[row], done[row] + count)) for row, count in counts.items()]
        hidden = torch.cat([STATE[batch.token_ids[row, at].tolist(), range(at.start, at.stop)] for row, at in spans])
        samples = done[rows] + numbers == batch.num_tokens[rows]
        for client, message in prompt_logprobs(
            ScheduledStep(rows, numbers, 0, samples, np.zeros_like(samples)), batch, hidden, self.compute_logits, VOCAB
        )():
            ids, values, ranks = unpack(message)
            assert client == message.slot + 10
            for i in range(len(ranks)):
                position = message.position + i
                expected = max(self.received[message.slot], default=0) + 1
                assert position == expected, "in order from the second token, without repetition or gap"
                self.received[message.slot][position] = (ids[i], values[i], ranks[i])
        batch.num_computed_tokens[rows] += numbers

    def assert_complete(self, request, count):
        received = self.received[request.slot]
        tokens = self.batch.token_ids[request.row].tolist()
        assert list(received) == list(range(1, request.num_prompt_tokens))
        for position, (ids, values, rank) in received.items():
            raw = STATE[tokens[position - 1], position - 1] @ WEIGHT.T
            assert_entries(raw, tokens[position], count, ids, values, rank)


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), st.sampled_from([-1, 0, 2, VOCAB])),
    min_size=1,
    max_size=4,
)


@settings(max_examples=30, deadline=None)
@given(PROMPTS, st.data(), st.sampled_from([1, 3 * VOCAB, 1 << 24]))
def test_prompt_logprobs_are_complete_for_any_chunks_and_preemptions(prompts, data, limit):
    requests = [
        make_request(slot, tokens, len(tokens), num_prompt_logprobs=count, client=slot + 10)
        for slot, (tokens, count) in enumerate(prompts)
    ]
    prefill = Prefill(*requests)
    batch = prefill.batch
    preemptions = data.draw(st.integers(0, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_mp.core.worker.sampling.logprobs.MAX_LOGIT_ELEMENTS", limit)
        while (batch.num_computed_tokens[batch.order] < batch.num_tokens[batch.order]).any():
            order = data.draw(st.permutations(batch.order.tolist()))
            left = {row: int(batch.num_tokens[row] - batch.num_computed_tokens[row]) for row in order}
            counts = {row: data.draw(st.integers(1, most)) for row, most in left.items() if most}
            prefill.step(counts)
            for row in [row for row in counts if batch.num_computed_tokens[row] == batch.num_tokens[row]]:
                if batch.num_tokens[row] < batch.num_prompt_tokens[row] + 2:
                    batch.token_ids[row, batch.num_tokens[row]] = 3
                    batch.num_tokens[row] += 1
            if preemptions and data.draw(st.booleans()):
                preemptions -= 1
                victim = batch.request(data.draw(st.sampled_from(batch.order.tolist())))
                batch.remove(victim.row)
                batch.add(victim, np.array([1], np.int32))
    for request, (_, count) in zip(requests, prompts, strict=True):
        if count == -1:
            assert not prefill.received[request.slot]
        else:
            prefill.assert_complete(request, count)
    assert prefill.largest <= max(1, limit // VOCAB)


def test_prompt_of_one_token_has_no_logprobs():
    request = make_request(0, [4], 1, num_prompt_logprobs=3, client=10)
    prefill = Prefill(request)
    prefill.step({0: 1})
    assert prefill.received == {0: {}}
    assert prefill.largest == 0


def test_output_of_a_recovered_request_is_no_part_of_its_prompt():
    request = make_request(0, [4, 5, 6, 7, 8], 3, num_prompt_logprobs=1, client=10)
    prefill = Prefill(request)
    prefill.step({0: 4})
    prefill.step({0: 1})
    prefill.assert_complete(request, 1)
    assert list(prefill.received[0]) == [1, 2]


def test_chunk_up_to_the_last_but_one_prompt_token_predicts_the_last():
    request = make_request(0, [4, 5, 6, 7], 4, num_prompt_logprobs=0, client=10)
    prefill = Prefill(request)
    for count, known in ((1, [1]), (2, [1, 2, 3]), (1, [1, 2, 3])):
        prefill.step({0: count})
        assert list(prefill.received[0]) == known
    prefill.assert_complete(request, 0)
