"""The scheduler, with a stand-in for the model: the test chooses the tokens of every step."""

import pytest
from support.stand_in_engine import BLOCK, EOS, OTHER_EOS, Engine

from vllm_mp.core.scheduler.request import NO_ROW


def test_request_runs_to_its_length_and_gives_back_all_blocks():
    engine = Engine()
    engine.add(3, num_prompt_tokens=5, max_tokens=8)
    engine.run()
    assert engine.outputs == {3: [7] * 8}
    assert engine.ends == {3: "length"}
    assert engine.pool.num_free == 100
    assert not engine.scheduler.has_work


def test_end_of_sequence_stops_a_request_unless_ignored():
    engine = Engine()
    engine.add(0)
    engine.add(1, ignore_eos=True)
    engine.add(2, stop_token_ids=[EOS], ignore_eos=True)
    engine.run(token=EOS)
    assert engine.ends == {0: "stop", 1: "length", 2: "stop"}
    assert [len(engine.outputs[i]) for i in range(3)] == [1, 8, 1]


def test_stop_reason_names_every_end_token_but_the_own_one_of_the_tokenizer():
    engine = Engine()
    engine.add(0)
    engine.add(1)
    engine.add(2, stop_token_ids=[EOS], ignore_eos=True)
    engine.run(lambda slot, position: OTHER_EOS if slot == 1 else EOS)
    assert engine.ends == dict.fromkeys(range(3), "stop")
    assert engine.stop_reasons == {0: None, 1: OTHER_EOS, 2: EOS}


def test_output_ends_at_the_context_length():
    engine = Engine(max_model_len=16)
    engine.add(0, num_prompt_tokens=10, max_tokens=1000)
    engine.run()
    assert len(engine.outputs[0]) == 6
    assert engine.ends == {0: "length"}


def test_step_never_exceeds_its_budget_and_long_prompts_take_several_steps():
    engine = Engine(budget=8, max_num_seqs=4)
    for slot, length in enumerate((20, 3, 9)):
        engine.add(slot, num_prompt_tokens=length)
    sizes = []
    while (step := engine.step()) is not None:
        sizes.append(int(step.counts.sum()))
        assert (step.counts[: step.num_decodes] == 1).all()
    assert max(sizes) == 8
    assert sizes[:2] == [8, 8]
    assert all(len(engine.outputs[slot]) == 8 for slot in range(3))


def test_running_requests_get_a_token_in_every_step_while_a_long_prompt_is_computed():
    engine = Engine(budget=8, max_num_seqs=4)
    engine.add(0, num_prompt_tokens=2, max_tokens=20)
    engine.step()
    engine.add(1, num_prompt_tokens=40)
    for count in range(2, 7):
        engine.step()
        assert len(engine.outputs[0]) == count


def test_without_chunked_prefill_a_prompt_is_computed_in_one_step():
    engine = Engine(budget=64, max_num_seqs=8, enable_chunked_prefill=False)
    for slot in range(6):
        engine.add(slot, num_prompt_tokens=30)
    while (step := engine.step()) is not None:
        assert set(step.counts.tolist()) <= {1, 30}
    assert all(len(output) == 8 for output in engine.outputs.values())


def test_several_partial_prefills_run_if_allowed():
    engine = Engine(budget=8, max_num_seqs=4, max_num_partial_prefills=2)
    engine.add(0, num_prompt_tokens=60, max_tokens=1)
    engine.add(1, num_prompt_tokens=8)
    for _ in range(2):
        assert sorted(engine.step().counts.tolist()) == [4, 4]
    assert len(engine.outputs[1]) == 1, "the short prompt does not wait for the long one"
    engine.run()


def test_last_request_in_order_is_preempted_if_blocks_run_out_and_loses_no_token():
    engine = Engine(num_blocks=8, max_num_seqs=4, max_model_len=32)
    for slot in range(4):
        engine.add(slot, num_prompt_tokens=4, max_tokens=20)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert all(engine.outputs[slot] == [7] * 20 for slot in range(4))
    assert engine.pool.num_free == 8


def test_first_request_in_order_is_never_preempted():
    engine = Engine(num_blocks=8, max_num_seqs=4, max_model_len=32)
    for slot in range(4):
        engine.add(slot, num_prompt_tokens=4, max_tokens=20)
    for count in range(1, 21):
        engine.step()
        assert len(engine.outputs[0]) == count


def test_fcfs_finishes_equal_requests_in_order_of_arrival():
    engine = Engine(max_num_seqs=2)
    for slot in range(6):
        engine.add(slot)
    engine.run()
    assert list(engine.ends) == [0, 1, 2, 3, 4, 5]


def test_priority_runs_lower_values_first():
    engine = Engine(num_blocks=8, max_num_seqs=1, max_model_len=32, policy="priority")
    for slot, priority in enumerate((5, 1, 3)):
        engine.add(slot, priority=priority)
    engine.run()
    assert list(engine.ends) == [1, 2, 0]


def test_priority_has_no_effect_with_fcfs():
    engine = Engine(num_blocks=8, max_num_seqs=1, max_model_len=32)
    for slot, priority in enumerate((5, 1, 3)):
        engine.add(slot, priority=priority)
    engine.run()
    assert list(engine.ends) == [0, 1, 2]


def test_abort_frees_row_and_blocks_of_running_and_waiting_requests():
    engine = Engine(max_num_seqs=1)
    running, waiting = engine.add(0), engine.add(1)
    engine.step()
    assert running.row != NO_ROW
    assert waiting.row == NO_ROW
    assert engine.scheduler.abort(0, 1).num_output_tokens == 0
    assert engine.scheduler.abort(0, 0).num_output_tokens == 1
    assert engine.scheduler.abort(0, 0) is None
    assert engine.pool.num_free == 100
    assert not engine.scheduler.has_work
    assert engine.step() is None
    assert engine.scheduler.num_waiting == 0


def test_prompt_computes_only_tokens_that_are_not_cached():
    engine = Engine(budget=64)
    shared = list(range(100, 120))
    engine.add(0, prompt=[*shared, 1, 2])
    engine.run()
    second = engine.add(1, prompt=[*shared, 3, 4, 5])
    assert engine.step().counts.tolist() == [3]
    assert second.num_cached_tokens == 20
    engine.run()


def test_replay_finds_cached_blocks_which_do_not_count_as_cached_because_it_may_have_computed_them():
    engine = Engine(budget=64)
    prompt = list(range(100, 122))
    engine.add(0, prompt=prompt)
    engine.run()
    replay = engine.add(1, prompt=prompt, is_replay=True)
    assert engine.step().counts.tolist() == [2]
    assert replay.num_cached_tokens == 0


def test_last_block_of_a_fully_cached_prompt_is_computed():
    engine = Engine(budget=64)
    prompt = list(range(100, 116))
    engine.add(0, prompt=prompt)
    engine.run()
    engine.add(1, prompt=prompt)
    assert engine.step().counts.tolist() == [BLOCK]


def test_next_turn_of_a_conversation_finds_the_output_of_the_turn_before():
    engine = Engine(budget=64)
    engine.add(0, prompt=list(range(100, 110)), max_tokens=12)
    engine.run(token=7)
    second = engine.add(1, prompt=[*range(100, 110), *[7] * 12, 50, 51])
    engine.step()
    assert second.num_cached_tokens == 20, "21 tokens of the first turn were computed: five full blocks"


def test_running_requests_share_blocks():
    engine = Engine(num_blocks=14, budget=64, max_num_seqs=4, max_model_len=48)
    prompt = list(range(100, 132))
    engine.add(0, prompt=prompt, max_tokens=4)
    engine.step()
    for slot in (1, 2):
        engine.add(slot, prompt=[*prompt, slot], max_tokens=4)
    engine.step()
    assert engine.scheduler.num_running == 3, "without sharing, each takes 9 of 14 blocks"
    engine.run()
    assert engine.scheduler.num_preemptions == 0


def test_requests_that_arrive_together_compute_their_common_prefix_once():
    engine = Engine(num_blocks=200, budget=256, max_num_seqs=64, max_model_len=64)
    prompt = list(range(100, 141))
    requests = [engine.add(slot, prompt=[*prompt, slot], max_tokens=4) for slot in range(64)]
    step = engine.step()
    assert step.counts.tolist() == [42] + [2] * 63
    assert [request.num_cached_tokens for request in requests] == [0] + [40] * 63
    engine.run()
    assert engine.scheduler.num_preemptions == 0, "without sharing, each takes 12 of 200 blocks"
    assert all(output == [7] * 4 for output in engine.outputs.values())


def test_long_prompt_is_shared_as_soon_as_its_last_chunk_is_scheduled():
    engine = Engine(budget=16, max_num_seqs=4)
    prompt = list(range(100, 140))
    first, second = (engine.add(slot, prompt=[*prompt, slot]) for slot in range(2))
    assert [engine.step().counts.tolist() for _ in range(3)] == [[16], [16], [9, 1]]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 40)


def test_scheduled_chunks_of_a_prompt_in_progress_are_shared():
    engine = Engine(budget=16, max_num_seqs=4, max_num_partial_prefills=2)
    prompt = list(range(100, 140))
    for slot in range(2):
        engine.add(slot, prompt=[*prompt, slot])
    engine.step()
    assert engine.batch.request(1).num_cached_tokens == 8
    engine.run()


def test_block_is_found_in_the_step_in_which_a_running_request_fills_it():
    engine = Engine()
    engine.add(0, prompt=[1, 2, 3], max_tokens=20, ignore_eos=True)
    engine.step(token=7)
    second = engine.add(1, prompt=[1, 2, 3, 7, 9])
    assert engine.step().counts.tolist() == [1, 1]
    assert second.num_cached_tokens == BLOCK


def test_request_outlives_the_request_whose_blocks_it_shares():
    engine = Engine()
    for slot in range(2):
        engine.add(slot, prompt=list(range(100, 111)), max_tokens=8)
    engine.step()
    engine.scheduler.abort(0, 0)
    engine.run()
    assert engine.outputs[1] == [7] * 8


def test_request_that_shares_nothing_neither_finds_nor_leaves_cached_blocks():
    engine = Engine(budget=128)
    prompt = list(range(100, 120))
    requests = [engine.add(slot, prompt=prompt, salt=salt) for slot, salt in enumerate([None, None, "", None])]
    assert engine.step().counts.tolist() == [20, 20, 20, 20]
    engine.run()
    again = engine.add(4, prompt=prompt)
    engine.run()
    assert [request.num_cached_tokens for request in [*requests, again]] == [0, 0, 0, 0, 16]


def test_request_that_does_not_read_the_cache_still_leaves_cached_blocks():
    engine = Engine(budget=64)
    prompt = list(range(100, 120))
    first = engine.add(0, prompt=prompt, reads_cache=False)
    second = engine.add(1, prompt=prompt)
    third = engine.add(2, prompt=prompt, reads_cache=False)
    assert engine.step().counts.tolist() == [20, 4, 20]
    assert [request.num_cached_tokens for request in (first, second, third)] == [0, 16, 0]
    engine.run()


def test_requests_with_different_salts_share_no_blocks():
    engine = Engine(budget=64)
    prompt = list(range(100, 120))
    engine.add(0, prompt=prompt, salt="one")
    engine.run()
    other, same = engine.add(1, prompt=prompt, salt="two"), engine.add(2, prompt=prompt, salt="one")
    engine.run()
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 16)


def test_no_block_is_found_after_forget_prefixes():
    engine = Engine(budget=64)
    prompt = list(range(100, 120))
    engine.add(0, prompt=prompt)
    engine.run()
    engine.cache.forget_prefixes()
    request = engine.add(1, prompt=prompt)
    assert engine.step().counts.tolist() == [20]
    assert request.num_cached_tokens == 0


def test_blocks_that_build_on_forgotten_blocks_are_not_found():
    engine = Engine(budget=8)
    prompt = list(range(100, 130))
    running = engine.add(0, prompt=prompt)
    engine.step()
    stale = set(engine.batch.block_table[running.row, : engine.batch.num_blocks[running.row]].tolist())
    engine.cache.forget_prefixes()
    engine.run()
    again = engine.add(1, prompt=prompt)
    engine.run()
    assert again.num_cached_tokens == 0
    later = engine.add(2, prompt=prompt)
    engine.step()
    assert later.num_cached_tokens == 28, "blocks of requests that started later are found"
    assert stale.isdisjoint(engine.batch.block_table[later.row, :7].tolist())


def test_preempted_prompt_does_not_count_its_own_blocks_as_cached():
    engine = Engine(budget=8)
    request = engine.add(0, prompt=list(range(100, 130)))
    engine.step()
    engine.scheduler.preempt_all()
    engine.run()
    assert engine.ends == {0: "length"}
    assert request.num_cached_tokens == 0


def test_prefix_of_the_next_request_is_looked_up_once_while_there_is_no_room(monkeypatch):
    engine = Engine(num_blocks=12, max_num_seqs=4)
    prompt = list(range(100, 130))
    engine.add(0, prompt=prompt, max_tokens=12)
    engine.add(1, prompt=list(range(200, 230)))
    lookups = []
    find = engine.pool.find
    monkeypatch.setattr(engine.pool, "find", lambda hashes: lookups.append(1) or find(hashes))
    for _ in range(10):
        engine.step()
    assert len(engine.batch) == 1
    assert len(lookups) <= 2
    engine.run()
    assert engine.ends == {0: "length", 1: "length"}


def test_pooling_requests_need_no_room_to_grow():
    engine = Engine(num_blocks=8, budget=64)
    for slot in range(8):
        engine.add(slot, num_prompt_tokens=4, pooled=True)
    assert len(engine.step().rows) == 8


def test_least_recently_used_block_is_evicted_first():
    engine = Engine(num_blocks=12, budget=64, max_num_seqs=1, max_model_len=32)
    old, recent, filler = list(range(100, 116)), list(range(200, 216)), list(range(300, 325))
    for slot, prompt in enumerate((recent, old, recent, filler)):
        engine.add(slot, prompt=prompt, max_tokens=1)
        engine.run()
    engine.add(4, prompt=recent, max_tokens=1)
    assert engine.step().counts.tolist() == [BLOCK]
    engine.add(5, prompt=old, max_tokens=1)
    assert engine.step().counts[0] > BLOCK


def test_sampling_columns_of_a_pooling_request_are_neutral():
    engine = Engine(max_num_seqs=1)
    engine.add(0, stop_token_ids=[9], min_tokens=2, max_tokens=3)
    engine.run()
    engine.add(1, pooled=True)
    engine.scheduler.schedule()
    batch = engine.batch
    assert [batch.is_pooled[0], batch.stops_at_eos[0], batch.has_stop_ids[0]] == [True, False, False]
    assert batch.min_total_tokens[0] == 0
    with pytest.raises(RuntimeError, match="pooling request"):
        _ = batch.request(0).sampling


def test_time_in_the_queue_is_reported_once_with_the_first_token(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("vllm_mp.core.scheduler.waiting.waiting_queue.time.monotonic", lambda: now[0])
    engine = Engine(budget=8, max_num_seqs=1)
    engine.add(0, num_prompt_tokens=20, max_tokens=2)
    engine.add(1, num_prompt_tokens=4, max_tokens=2)
    now[0] += 1
    engine.step()
    assert engine.queue_times == {}, "the prompt takes several steps"
    now[0] += 1
    for _ in range(2):
        engine.step()
    assert engine.queue_times == {0: 1.0}
    now[0] += 1
    engine.run()
    assert engine.queue_times == {0: 1.0, 1: 3.0}


def test_time_in_the_queue_ends_when_a_request_is_first_admitted(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("vllm_mp.core.scheduler.waiting.waiting_queue.time.monotonic", lambda: now[0])
    engine = Engine(budget=8)
    engine.add(0, num_prompt_tokens=20)
    engine.step()
    engine.scheduler.preempt_all()
    now[0] += 5
    engine.run()
    assert engine.queue_times == {0: 0.0}
