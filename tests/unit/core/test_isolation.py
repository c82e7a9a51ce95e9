"""Suspects, which may have caused the death of an earlier core, run isolated until they are past it."""

import numpy as np
import pytest
from support.stand_in_engine import Engine

from vllm_mp.core.scheduler.request import NO_ROW
from vllm_mp.core.scheduler.step import ModelOutput


def slots_of(engine, step):
    return engine.batch.slot[step.rows].tolist()


def test_suspects_run_one_at_a_time_in_order_before_all_other_requests():
    engine = Engine()
    for slot in range(5):
        engine.add(slot, isolate_until_num_tokens=slot in (1, 3, 4))
    steps = []
    for _ in range(4):
        step = engine.scheduler.schedule()
        steps.append(slots_of(engine, step))
        engine.scheduler.launched(step, None, 1)
        engine.scheduler.update(ModelOutput(np.full(step.samples.sum(), 7)))
    assert steps[:3] == [[1], [3], [4]]
    assert sorted(steps[3]) == [0, 1, 2, 3, 4]


def test_every_suspect_completes_and_gives_back_its_blocks():
    engine = Engine()
    requests = [engine.add(slot, isolate_until_num_tokens=slot % 2 == 0, pooled=slot == 4) for slot in range(8)]
    engine.run()
    assert engine.ends == {slot: "stop" if slot == 4 else "length" for slot in range(8)}
    assert not any(request.isolate_until_num_tokens for request in requests)
    assert engine.pool.num_free == engine.pool.num_blocks


def test_suspects_run_in_order_of_priority():
    engine = Engine(policy="priority")
    for slot, priority in enumerate((3, 1, 2)):
        engine.add(slot, priority=priority, isolate_until_num_tokens=1)
    assert [slots_of(engine, engine.step()) for _ in range(3)] == [[1], [2], [0]]


def test_running_requests_wait_for_a_suspect_and_keep_their_blocks():
    engine = Engine()
    engine.add(0, max_tokens=20)
    engine.step()
    engine.add(1, isolate_until_num_tokens=1)
    engine.step()
    assert [len(engine.outputs[slot]) for slot in range(2)] == [1, 1]
    engine.step()
    assert [len(engine.outputs[slot]) for slot in range(2)] == [2, 2]
    assert engine.scheduler.num_preemptions == 0


def test_suspect_with_a_long_prompt_is_alone_in_each_of_its_steps():
    engine = Engine(budget=8)
    engine.add(0, num_prompt_tokens=4)
    engine.add(1, num_prompt_tokens=20, isolate_until_num_tokens=1)
    counts = []
    for _ in range(3):
        step = engine.step()
        assert step.rows.tolist() == [engine.batch.order[0]]
        counts.append(int(step.counts[0]))
    assert counts == [8, 8, 4]
    assert sorted(slots_of(engine, engine.step())) == [0, 1]


def test_last_output_token_of_a_suspect_is_computed_by_a_decode():
    engine = Engine(budget=8)
    engine.add(0, num_prompt_tokens=8, output=[7, 7, 7], max_tokens=9, isolate_until_num_tokens=4)
    steps = [engine.step() for _ in range(3)]
    assert [(step.counts.tolist(), step.num_decodes, step.samples.tolist()) for step in steps] == [
        ([8], 0, [False]),
        ([2], 0, [False]),
        ([1], 1, [True]),
    ]
    engine.run()
    assert engine.outputs[0] == [7] * 9


def test_prompt_of_a_suspect_without_output_is_computed_in_one_step():
    engine = Engine()
    engine.add(0, num_prompt_tokens=8, isolate_until_num_tokens=1)
    assert engine.step().counts.tolist() == [8]


def test_suspects_use_the_prefix_cache():
    engine = Engine()
    prompt = list(range(100, 116))
    for slot in range(2):
        engine.add(slot, prompt=[*prompt, slot], output=[7], isolate_until_num_tokens=2)
    engine.add(2, prompt=prompt, isolate_until_num_tokens=1, reads_cache=False)
    assert [engine.step().counts.tolist() for _ in range(4)] == [[17], [1], [1], [1]]
    assert engine.step().counts.tolist() == [16]


@pytest.mark.parametrize("config", [{"max_num_seqs": 2}, {"num_blocks": 15}])
def test_other_requests_give_up_row_and_blocks_for_a_suspect(config):
    engine = Engine(**config)
    for slot in range(2):
        engine.add(slot, num_prompt_tokens=12, max_tokens=20)
    engine.step()
    assert engine.scheduler.num_running == 2
    suspect = engine.add(2, num_prompt_tokens=40, max_tokens=4, isolate_until_num_tokens=1)
    assert slots_of(engine, engine.step()) == [2]
    engine.step()
    assert not suspect.isolate_until_num_tokens
    assert engine.scheduler.num_preemptions == 1
    assert engine.batch.request(0).slot == 0, "the last in order was preempted"
    engine.run()
    assert [len(engine.outputs[slot]) for slot in range(3)] == [20, 20, 4]


def test_next_suspect_runs_after_a_suspect_fails():
    engine = Engine()
    for slot in range(2):
        engine.add(slot, isolate_until_num_tokens=1)
    engine.step(failing=[0])
    assert engine.ends == {0: "error"}
    assert slots_of(engine, engine.step()) == [1]


@pytest.mark.parametrize("num_steps", [0, 1])
def test_suspect_can_be_aborted_while_it_waits_or_runs(num_steps):
    engine = Engine(budget=8)
    suspect = engine.add(0, num_prompt_tokens=20, isolate_until_num_tokens=1)
    engine.add(1)
    for _ in range(num_steps):
        engine.step()
    assert (suspect.row == NO_ROW) == (num_steps == 0)
    assert engine.scheduler.abort(0, 0).num_output_tokens == 0
    assert slots_of(engine, engine.step()) == [1]
    engine.run()
    assert engine.pool.num_free == engine.pool.num_blocks


def test_pause_applies_to_suspects():
    engine = Engine(budget=8)
    engine.add(0, num_prompt_tokens=20, isolate_until_num_tokens=1)
    engine.step()
    engine.pause_for("keep", clears_cache=True)
    engine.add(1, isolate_until_num_tokens=1)
    assert engine.step() is None
    engine.pause.resume()
    assert [slots_of(engine, engine.step()) for _ in range(4)] == [[0], [0], [0], [1]]


def test_suspect_held_back_by_a_pause_does_not_delay_other_requests():
    engine = Engine()
    engine.add(0)
    engine.step()
    engine.pause_for("wait", clears_cache=False)
    engine.add(1, isolate_until_num_tokens=1)
    engine.run()
    assert engine.ends == {0: "length"}
    engine.pause.resume()
    assert slots_of(engine, engine.step()) == [1]


def test_suspect_goes_on_after_its_cached_blocks_are_forgotten():
    engine = Engine(budget=8)
    engine.add(0, num_prompt_tokens=20, isolate_until_num_tokens=1)
    engine.step()
    engine.cache.forget_prefixes()
    engine.run()
    later = engine.add(1, prompt=list(range(100, 120)))
    engine.step()
    assert later.num_cached_tokens == 0


def test_suspect_stays_isolated_until_it_is_past_the_death():
    engine = Engine(num_blocks=6, max_num_seqs=2)
    engine.add(0, num_prompt_tokens=6, max_tokens=10)
    engine.step()
    engine.add(1, num_prompt_tokens=6, max_tokens=14, isolate_until_num_tokens=12)
    while len(engine.outputs.get(1, [])) < 12:
        assert slots_of(engine, engine.step()) == [1], "also when it needs blocks of other requests"
    assert engine.scheduler.num_preemptions > 0
    engine.run()
    assert engine.ends == {0: "length", 1: "length"}


@pytest.mark.parametrize("isolate_until", [-1, -(2**40)])
def test_negative_count_of_a_hostile_client_isolates_until_the_first_token(isolate_until):
    engine = Engine()
    engine.add(0)
    engine.add(1, isolate_until_num_tokens=isolate_until)
    assert slots_of(engine, engine.step()) == [1]
    assert sorted(slots_of(engine, engine.step())) == [0, 1]
    engine.run()
    assert engine.ends == {0: "length", 1: "length"}
