"""A batch of decodes that does not change gets the same step again, with the effects of a step that was chosen."""

import itertools
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.stand_in_engine import BLOCK, EOS, Engine

from vllm_mp.core.scheduler.cache.seal_table import SealTable
from vllm_mp.core.scheduler.step import RepeatedStep
from vllm_mp.core.worker.step_inputs import RepeatedInputs, step_inputs

NUM_BLOCKS = 30


def to_host(arrays):
    return [torch.from_numpy(array) for array in arrays]


def ids_of(slot, position):
    return 1000 * slot + int(position) + 10


def run(steps, abort_at):
    """Run requests that join, end and are aborted; return the seal table and the batch after each step."""
    memory = bytearray(SealTable.num_bytes(NUM_BLOCKS + 1, BLOCK))
    engine = Engine(NUM_BLOCKS, table=SealTable(memory, NUM_BLOCKS + 1, BLOCK))
    states = []
    for number in range(60):
        if number in (0, 1, 2, 25):
            # They reach the ends of blocks in different steps. The second ends by its length, the third at a token.
            engine.add(number, 5 + number % 3, max_tokens=14 if number == 1 else 50, stop_token_ids=[2030])
        if number == abort_at:
            engine.end([(0, engine.scheduler.abort(0, 25))])
        if number == 45:
            engine.cache.forget_prefixes()
        steps.append(engine.step(ids_of))
        batch = engine.batch
        counters = (batch.num_tokens, batch.num_computed_tokens, batch.num_registered, batch.num_blocks)
        states.append((bytes(memory), *(column.tolist() for column in counters), engine.pool.num_free))
    return states, engine.outputs, engine.ends


@pytest.mark.parametrize("abort_at", [40, 41])  # before a step in which a row begins a block, and before another
def test_repeated_steps_write_what_chosen_steps_write(abort_at):
    steps = []
    repeated = run(steps, abort_at)
    assert sum(step is before for before, step in itertools.pairwise(steps)) > 30
    with patch.object(RepeatedStep, "can_repeat", lambda *_: False):
        assert run([], abort_at) == repeated


def test_preemption_within_repeated_steps_loses_no_token():
    engine = Engine(num_blocks=8)
    for slot in range(3):
        engine.add(slot, num_prompt_tokens=6, max_tokens=12)
    engine.run(ids_of)
    assert engine.scheduler.num_preemptions > 0
    assert engine.outputs == {slot: [ids_of(slot, position) for position in range(12)] for slot in range(3)}


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_end_token_ends_a_request_of_a_repeated_step_unless_ignored(ignore_eos):
    engine = Engine()
    engine.add(0, max_tokens=20, ignore_eos=ignore_eos)
    engine.add(1, max_tokens=20, ignore_eos=True)
    engine.run(lambda slot, position: EOS if position == 10 else 7)
    assert [len(engine.outputs[slot]) for slot in (0, 1)] == [20 if ignore_eos else 11, 20]


def test_row_without_a_token_in_a_repeated_step_ends_with_an_error():
    engine = Engine()
    engine.add(0, max_tokens=20)
    engine.add(1, max_tokens=20)
    for _ in range(4):
        engine.step()
    engine.step(failing=(1,))
    assert engine.ends == {1: "error"}
    engine.run()
    assert [len(engine.outputs[slot]) for slot in (0, 1)] == [20, 4]


def test_inputs_of_repeated_steps_are_those_of_chosen_steps():
    engine = Engine(max_model_len=128)
    for slot in range(3):
        engine.add(slot, num_prompt_tokens=5 + slot, max_tokens=60)
    engine.step(ids_of)
    inputs, previous, num_repeated = None, None, 0
    while (step := engine.scheduler.schedule()) is not None:
        if step is not previous:
            inputs, previous = RepeatedInputs(step, BLOCK), step
        else:
            num_repeated += 1
        inputs.advance(engine.batch)
        *tensors, metadata = inputs.latest()
        *expected, of_chosen = step_inputs(step, engine.batch, BLOCK, to_host)
        metadata = metadata._replace(block_table=metadata.block_table[:, : of_chosen.block_table.shape[1]])
        for field, tensor, other in zip(("ids", "positions"), tensors, expected, strict=True):
            assert torch.equal(tensor, other), field
        for field, value, other in zip(metadata._fields, metadata, of_chosen, strict=True):
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, field
        engine.launch(step, ids_of, ())
        engine.process_all_but(0)
    assert num_repeated > 50
    assert np.unique([len(output) for output in engine.outputs.values()]).tolist() == [60]
