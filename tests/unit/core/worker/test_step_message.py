"""Steps as messages: other ranks keep the same rows as the core, also when rows change their requests."""

import random

import numpy as np
import pytest
import torch

from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.worker.sampling.host_copies import all_to_device
from vllm_mp.core.worker.step_inputs import step_inputs
from vllm_mp.core.worker.step_message import (
    ARGMAX,
    LOGITS,
    NO_LOGITS,
    MessageError,
    RowMirror,
    StepEncoder,
    decode_step,
    message_bytes,
)
from vllm_mp.requests.sampling_params import SamplingParams

SEQS, MODEL_LEN, BLOCK = 4, 64, 4


def add_request(batch, chance):
    count = chance.randrange(1, MODEL_LEN - 20)
    tokens = np.array([chance.randrange(1000) for _ in range(count)], np.int32)
    request = Request(0, 0, "request", SamplingParams(), tokens, count, MODEL_LEN, (0, batch.tenancy.sum()))
    blocks = np.array([chance.randrange(1, 10_000) for _ in range(-(-count // BLOCK))], np.int32)
    row = batch.add(request, blocks)
    if batch.rope_positions is not None and chance.random() < 0.5:
        batch.rope_positions[:, row] = np.array([chance.choices(range(MODEL_LEN), k=MODEL_LEN) for _ in range(3)])
    batch.adapter_slot[row], batch.second_text_at[row] = chance.randrange(-1, 3), chance.randrange(0, 3)


def next_step(batch, chance):
    """Return a step of some rows, one token of those that have computed all but one, and chunks of the others."""
    rows = np.array(chance.sample(batch.order.tolist(), chance.randrange(1, len(batch) + 1)))
    left = batch.num_tokens[rows] - batch.num_computed_tokens[rows]
    counts = np.array([chance.randrange(1, count + 1) for count in left.tolist()])
    order = np.argsort(counts != 1, kind="stable")
    rows, counts = rows[order], counts[order]
    decodes = int((counts == 1).sum())
    awaits = np.arange(decodes)[: chance.randrange(0, 2)]
    awaited = np.array([chance.randrange(SEQS) for _ in awaits], np.int64)
    return ScheduledStep.of(batch, rows, counts, decodes, awaits, awaited)


def finish(batch, step, chance):
    """Count the step's tokens, and give rows that have computed all of theirs another token and perhaps a block."""
    batch.num_computed_tokens[step.rows] += step.counts
    for row in step.rows[step.samples].tolist():
        if chance.random() < 0.2 or batch.num_tokens[row] == MODEL_LEN:
            batch.remove(row)
            continue
        batch.token_ids[row, batch.num_tokens[row]] = chance.randrange(1000)
        batch.num_tokens[row] += 1
        if batch.num_tokens[row] > batch.num_blocks[row] * BLOCK:
            batch.block_table[row, batch.num_blocks[row]] = chance.randrange(1, 10_000)
            batch.num_blocks[row] += 1


def on_cpu(arrays):
    return all_to_device(arrays, torch.device("cpu"))


@pytest.mark.parametrize("has_rope_positions", [False, True])
def test_other_ranks_lay_out_the_same_inputs_in_random_runs(has_rope_positions):
    chance = random.Random(0)
    batch = Batch(SEQS, MODEL_LEN, BLOCK, [], has_rope_positions)
    encoder, mirror = StepEncoder(SEQS), RowMirror(SEQS, MODEL_LEN, BLOCK, has_rope_positions)
    largest = 0
    for step_number in range(400):
        while not len(batch) or (not batch.is_full and chance.random() < 0.5):
            add_request(batch, chance)
        step = next_step(batch, chance)
        if step_number % 7 == 0:
            step = step._replace(attention_ends=np.arange(step.counts.sum()))
        sampling = (NO_LOGITS, ARGMAX, LOGITS)[step_number % 3]
        isolates, returns_all = step_number % 2 == 0, step_number % 5 == 0
        data = b"".join(encoder.encode(step, batch, sampling, isolates, None, returns_all))
        largest = max(largest, len(data))
        message = decode_step(memoryview(data), mirror)
        assert (message.sampling, message.isolates, message.returns_all) == (sampling, isolates, returns_all)
        for name in ("rows", "counts", "samples", "awaits", "awaited"):
            assert np.array_equal(getattr(message.step, name), getattr(step, name)), name
        own = step_inputs(step, batch, BLOCK, on_cpu)
        theirs = step_inputs(message.step, mirror, BLOCK, on_cpu)
        assert torch.equal(own[0], theirs[0])
        assert torch.equal(own[1], theirs[1])
        assert torch.equal(own[2].cell_mapping, theirs[2].cell_mapping)
        assert own[2].host_seq_lens == theirs[2].host_seq_lens
        assert own[2].num_decodes == theirs[2].num_decodes
        slots = [
            None if inputs[2].adapter_slots is None else inputs[2].adapter_slots.tolist() for inputs in (own, theirs)
        ]
        assert slots[0] == slots[1]
        ends = [
            None if inputs[2].attention_ends is None else inputs[2].attention_ends.tolist() for inputs in (own, theirs)
        ]
        assert ends[0] == ends[1]
        assert (ends[0] is None) == (step_number % 7 != 0)
        assert np.array_equal(batch.second_text_at[step.rows], mirror.second_text_at[step.rows])
        # Blocks past the end of a row are never read.
        for row, length in enumerate(own[2].host_seq_lens):
            width = -(-length // BLOCK)
            assert torch.equal(own[2].block_table[row, :width], theirs[2].block_table[row, :width])
        finish(batch, step, chance)
    assert largest <= message_bytes(SEQS, SEQS * MODEL_LEN, MODEL_LEN // BLOCK)


def test_decode_of_a_long_row_is_a_short_message():
    batch = Batch(SEQS, 4096, BLOCK, [])
    tokens = np.arange(4000, dtype=np.int32)
    request = Request(0, 0, "long", SamplingParams(), tokens, 4000, 4096, (0, 0))
    batch.add(request, np.arange(1000, dtype=np.int32))
    encoder = StepEncoder(SEQS)
    first = ScheduledStep.of(batch, np.array([0]), np.array([3999]), 0)
    assert sum(map(len, encoder.encode(first, batch))) > 16_000
    batch.num_computed_tokens[0] = 3999
    second = ScheduledStep.of(batch, np.array([0]), np.array([1]), 1)
    assert sum(map(len, encoder.encode(second, batch, LOGITS))) < 150


@pytest.mark.parametrize("length", [0, 8, 56, 100])
def test_message_that_no_core_sends_is_refused(length):
    with pytest.raises(MessageError, match=f"a step of {length} bytes cannot be decoded"):
        decode_step(memoryview(b"\x07" * length), RowMirror(SEQS, MODEL_LEN, BLOCK))
