"""Suspects, which may have caused the death of an earlier core, run isolated by groups until they are past it."""

import pytest
from support.stand_in_engine import Engine

from vllm_mp.core.scheduler.request import NO_ROW


def slots_of(engine, step):
    return engine.batch.slot[step.rows].tolist()


def steps_of(engine, count):
    """Return the slots of each of the next `count` steps, sorted."""
    return [sorted(slots_of(engine, engine.step())) for _ in range(count)]


def test_groups_take_turns_with_all_other_requests():
    engine = Engine()
    for slot in range(5):
        engine.add(slot, isolate_until_num_tokens=slot in (1, 3, 4))
    assert steps_of(engine, 6) == [[1], [0, 1, 2], [3], [0, 1, 2, 3], [4], [0, 1, 2, 3, 4]]


def test_requests_of_a_group_run_together_and_each_leaves_the_group_when_it_is_past_the_death():
    engine = Engine()
    engine.add(0)
    for slot, isolate_until in ((1, 2), (2, 1), (3, 2)):
        engine.add(slot, isolate_until_num_tokens=isolate_until, isolation_group=7)
    assert steps_of(engine, 4) == [[1, 2, 3], [0, 2], [1, 3], [0, 1, 2, 3]]


def test_groups_run_one_after_the_other():
    engine = Engine()
    for slot in range(4):
        engine.add(slot, isolate_until_num_tokens=2, isolation_group=slot % 2)
    assert steps_of(engine, 6) == [[0, 2], [0, 2], [0, 2], [1, 3], [0, 2], [1, 3]]


def test_clients_have_groups_of_their_own():
    engine = Engine()
    engine.add(0, client=1, isolate_until_num_tokens=1, isolation_group=5)
    engine.add(1, client=2, isolate_until_num_tokens=1, isolation_group=5)
    assert steps_of(engine, 3) == [[0], [0], [1]]


def test_group_that_waits_for_rows_is_tested_in_parts():
    engine = Engine(max_num_seqs=2)
    for slot in range(4):
        engine.add(slot, max_tokens=3, isolate_until_num_tokens=1, isolation_group=1)
    engine.run()
    assert engine.ends == dict.fromkeys(range(4), "length")


def test_requests_that_arrive_during_a_search_begin_at_once():
    engine = Engine()
    for slot in range(4):
        engine.add(slot, max_tokens=20, isolate_until_num_tokens=20, isolation_group=1)
    engine.step()
    engine.add(9, max_tokens=3)
    assert steps_of(engine, 6) == [[9], [0, 1, 2, 3]] * 3
    assert engine.ends == {9: "length"}


@pytest.mark.parametrize("ahead", [0, 1])
def test_group_is_alone_on_the_device_after_its_only_request_is_aborted(ahead):
    engine = Engine(ahead=ahead)
    engine.add(0)
    engine.add(1, isolate_until_num_tokens=5)
    step = engine.scheduler.schedule()
    engine.launch(step, lambda slot, position: 7, ())
    engine.scheduler.abort(0, 1)
    assert engine.scheduler.schedule() is None
    engine.process_all_but(0)
    assert slots_of(engine, engine.scheduler.schedule()) == [0]


def test_every_suspect_completes_and_gives_back_its_blocks():
    engine = Engine()
    requests = [engine.add(slot, isolate_until_num_tokens=slot % 2 == 0, pooled=slot == 4) for slot in range(8)]
    engine.run()
    assert engine.ends == {slot: "stop" if slot == 4 else "length" for slot in range(8)}
    assert not any(request.isolate_until_num_tokens for request in requests if request.slot != 4)
    assert engine.pool.num_free == engine.pool.num_blocks


def test_suspects_run_in_order_of_priority():
    engine = Engine(policy="priority")
    for slot, priority in enumerate((3, 1, 2)):
        engine.add(slot, priority=priority, isolate_until_num_tokens=1)
    assert steps_of(engine, 5) == [[1], [1], [2], [1, 2], [0]]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_group_and_all_other_requests_take_turns_in_a_pipeline(num_stages):
    engine = Engine(num_stages=num_stages, ahead=num_stages - 1)
    for slot in range(4):
        engine.add(slot, max_tokens=40)
    for slot in (4, 5):
        engine.add(slot, max_tokens=9, isolate_until_num_tokens=9, isolation_group=1)
    steps = []
    while 4 not in engine.ends:
        step = engine.scheduler.schedule()
        if step is not None:
            steps.append(slots_of(engine, step))
            engine.launch(step, lambda slot, position: 7, ())
        engine.process_all_but(0 if step is None else num_stages - 1)
    assert [sorted(slots) for slots in steps] == [[4, 5], [0, 1, 2, 3]] * 8 + [[4, 5]]


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
    steps = [engine.step() for _ in range(6)]
    assert [(slots_of(engine, step), int(step.counts[0])) for step in steps[:5]] == [
        ([1], 8),
        ([0], 4),
        ([1], 8),
        ([0], 1),
        ([1], 4),
    ]
    assert sorted(slots_of(engine, steps[5])) == [0, 1]


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
    assert [engine.step().counts.tolist() for _ in range(7)] == [[17], [1], [1], [1], [1], [1], [1, 1]]
    assert engine.step().counts.tolist() == [16]


@pytest.mark.parametrize("config", [{"max_num_seqs": 2}, {"num_blocks": 15}])
def test_other_requests_give_up_row_and_blocks_for_a_suspect(config):
    engine = Engine(**config)
    for slot in range(2):
        engine.add(slot, num_prompt_tokens=12, max_tokens=20)
    engine.step()
    assert engine.scheduler.num_running == 2
    suspect = engine.add(2, num_prompt_tokens=40, max_tokens=4, isolate_until_num_tokens=1)
    assert steps_of(engine, 3) == [[2], [0], [2]]
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
    assert steps_of(engine, 5) == [[0], [0], [0], [0], [1]]


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
        assert slots_of(engine, engine.step()) in ([0], [1]), "also when it needs blocks of other requests"
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
