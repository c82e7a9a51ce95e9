"""The invariants hold after any sequence of events, and each broken invariant is reported."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stand_in_engine import BLOCK, EOS, Engine

from vllm_mp.config import SpeculativeConfig
from vllm_mp.core.scheduler.invariants import InvariantError, check_invariants

LENGTH = 32
PROMPTS = st.builds(
    lambda shared, own: [7] * shared + own, st.integers(0, 20), st.lists(st.integers(7, 8), min_size=1, max_size=11)
)
"""Prompts that often begin alike, also with output tokens of other requests."""


def chosen_token(slot, position):
    """Return the token for a position, always the same. Few of these tokens end a request."""
    return (7, 8, 8, 7, 8, 7, 7, 8, 7, 8, EOS)[(7 * slot + 3 * position + position // 5) % 11]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
ACTIONS = ["add"] * 4 + ["step"] * 6 + ["abort", "abort", "fail", "forget", "pause", "resume"]
ACTIONS += ["sleep", "wake_up", "wake_up"]


def let_events_happen(data):
    """Let events happen in an interleaving that `data` draws, check the invariants after each, and end all requests."""
    ahead = data.draw(st.integers(0, 1))
    engine = Engine(
        num_blocks=data.draw(st.integers(LENGTH // BLOCK, 20)),
        max_num_seqs=data.draw(st.integers(1, 6)),
        max_model_len=LENGTH,
        budget=data.draw(st.integers(6, 24)),
        max_num_partial_prefills=data.draw(st.integers(1, 3)),
        policy=data.draw(st.sampled_from(["fcfs", "priority"])),
        ahead=ahead,
        speculation=SpeculativeConfig(**NGRAM) if not ahead and data.draw(st.booleans()) else None,
    )
    live, limits, drains, clients = set(), {}, [], {}
    for slot in range(data.draw(st.integers(1, 50))):
        action = data.draw(st.sampled_from(ACTIONS))
        if action == "add":
            prompt, limit = data.draw(PROMPTS), data.draw(st.integers(1, 40))
            pooled = data.draw(st.sampled_from([0, 0, 1, 3]))
            length = 0 if pooled else min(limit, LENGTH - len(prompt))
            output = data.draw(st.lists(st.integers(7, 8), max_size=max(0, length - 1)))
            clients[slot] = data.draw(st.sampled_from([0, 0, 1, 2]))
            engine.add(
                slot,
                client=clients[slot],
                pooled=pooled,
                output=output,
                isolate_until_num_tokens=data.draw(st.sampled_from([0, 0, 1, 3])),
                isolation_group=data.draw(st.integers(0, 2)),
                prompt=prompt,
                max_tokens=limit,
                priority=data.draw(st.integers(-2, 2)),
                salt=data.draw(st.sampled_from(["", "", "tenant", None])),
                reads_cache=data.draw(st.sampled_from([True, True, False])),
                presence_penalty=data.draw(st.sampled_from([0, 0, 0, 0, 1])),
                ignore_eos=data.draw(st.booleans()),
            )
            live.add(slot)
            limits[slot] = length
        elif action == "abort" and live:
            victim = data.draw(st.sampled_from(sorted(live)))
            live.discard(victim)
            end = engine.scheduler.abort(clients[victim], victim)
            assert (end is None) == (victim in engine.ends)
            if end is not None:
                engine.end([(clients[victim], end)])
        elif action == "forget":
            engine.pool.forget_all()
        elif action == "pause":
            mode, clears = data.draw(st.sampled_from(["abort", "wait", "keep"])), data.draw(st.booleans())
            drains.append(engine.pause_for(mode, clears))
            if mode == "abort":
                assert not engine.scheduler.num_running
                assert not engine.scheduler.num_waiting
        elif action == "resume":
            engine.pause.resume()
        elif action == "sleep":
            engine.sleep.sleep(data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from(["keep", "abort"])))
            engine.settle_sleep()
        elif action == "wake_up":
            engine.memory.fails = data.draw(st.sampled_from([{}, {}, {"prepare": RuntimeError()}]))
            engine.sleep.wake_up(*data.draw(st.lists(st.sampled_from(["weights", "kv_cache"]))))
            engine.settle_sleep()
            assert bool(engine.sleep.state.missing) != engine.memory.is_whole
        else:
            failing = data.draw(st.sets(st.sampled_from(sorted(live)), max_size=2)) if live and action == "fail" else ()
            engine.step(chosen_token, failing)
        engine.pause.settle()
        check_invariants(engine.scheduler)
    engine.memory.fails = {}
    engine.sleep.wake_up()
    engine.settle_sleep()
    engine.run(chosen_token)
    engine.pause.resume()
    engine.run(chosen_token)
    assert all(drain.done() for drain in drains)
    assert live <= set(engine.ends)
    for slot in live:
        if engine.ends[slot] == "length":
            assert len(engine.outputs.get(slot, [])) == limits[slot]
        elif engine.ends[slot] == "stop" and engine.outputs.get(slot):
            assert engine.outputs[slot].index(EOS) == len(engine.outputs[slot]) - 1
    assert set(engine.ends.values()) <= {"length", "stop", "abort", "error"}
    assert engine.pool.num_free == engine.pool.num_blocks


@settings(max_examples=40)
@given(data=st.data())
def test_no_request_row_or_block_is_lost_in_any_interleaving_of_events(data):
    let_events_happen(data)


@pytest.mark.slow
@settings(max_examples=200, derandomize=False)
@given(data=st.data())
def test_no_request_row_or_block_is_lost_in_many_interleavings_of_events(data):
    let_events_happen(data)


def running_engine(ahead=0):
    """Two running requests with shared blocks, and two that wait; with `ahead` 1 a step is pending."""
    engine = Engine(max_num_seqs=2, ahead=ahead)
    for slot in range(4):
        engine.add(slot, prompt=list(range(100, 110)))
    engine.step()
    check_invariants(engine.scheduler)
    return engine


def lose_a_block(engine):
    engine.pool._free.popitem()


def use_a_block_twice(engine):
    engine.batch.block_table[1, 2] = engine.batch.block_table[0, 2]


def write_a_shared_block(engine):
    engine.batch.num_computed_tokens[1] = BLOCK


def forget_a_user(engine):
    engine.pool._num_users[engine.batch.block_table[0, 0]] -= 1


def use_the_padding_block(engine):
    engine.batch.block_table[0, 2] = 0


def free_a_row_twice(engine):
    engine.batch._free_rows.append(0)


def lose_a_row(engine):
    engine.batch.order = engine.batch.order[:1]


def disorder_the_rows(engine):
    engine.batch.order = engine.batch.order[::-1]


def let_a_request_wait_twice(engine):
    engine.scheduler.waiting.add(engine.scheduler.waiting.first())


def let_a_running_request_wait(engine):
    engine.scheduler.waiting.add(engine.batch.request(0))


def lose_a_waiting_request(engine):
    turns = engine.scheduler.waiting.turns
    turns.remove(turns.requests()[-1])


def miscount_the_waiting(engine):
    engine.scheduler.waiting.turns._num_requests += 1


def run_while_asleep(engine):
    engine.scheduler._is_asleep = True


def hold_back_without_a_pause(engine):
    queue = engine.scheduler.waiting
    request = queue.turns.requests()[-1]
    queue.turns.remove(request)
    queue._held[0, request.slot] = request


def forget_which_group_runs(engine):
    engine.batch.request(1).isolate_until_num_tokens = 1


def let_a_request_run_with_a_group(engine):
    engine.batch.is_isolated[1] = True


def let_a_suspect_wait_without_its_group(engine):
    engine.scheduler.waiting.first().isolate_until_num_tokens = 1


def let_a_request_wait_with_a_group(engine):
    request = engine.scheduler.waiting.first()
    engine.scheduler.waiting.remove(request)
    engine.scheduler.waiting.isolated.add(request)


def compute_more_tokens_than_are_known(engine):
    engine.batch.num_computed_tokens[0] = engine.batch.num_tokens[0] + 1


def register_a_block_under_another_hash(engine):
    block = int(engine.batch.block_table[0, 0])
    del engine.pool._block_of[engine.pool._hash_of[block]]
    engine.pool._hash_of[block] = b"other"
    engine.pool._block_of[b"other"] = block


def register_a_block_too_early(engine):
    engine.batch.request(0).hashes.append(b"early")
    engine.pool.register(int(engine.batch.block_table[0, 2]), b"early")


def leave_a_hash_behind(engine):
    engine.pool._block_of[b"left"] = 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lose_a_block, "a block is free exactly if it has no user"),
        (use_a_block_twice, "the users of a block are the rows that have it"),
        (write_a_shared_block, "blocks that row 1 will write have no other user"),
        (forget_a_user, "the users of a block are the rows that have it"),
        (use_the_padding_block, "row 0 has no padding among its blocks"),
        (free_a_row_twice, "every row is either in use or free, once; broken by .0"),
        (lose_a_row, r"a live request is found; broken by \[\(0, 1\)\]"),
        (disorder_the_rows, "rows are in the order of their requests"),
        (let_a_request_wait_twice, "waiting requests are counted"),
        (let_a_running_request_wait, r"a live request is found once.*\(0, 0\)"),
        (lose_a_waiting_request, r"a live request is found; broken by \[\(0, 3\)\]"),
        (miscount_the_waiting, "waiting requests are counted"),
        (run_while_asleep, r"no request has a row while the scheduler sleeps; broken by \[\(0, 0\), \(0, 1\)\]"),
        (hold_back_without_a_pause, r"only a paused scheduler holds requests back; broken by \[\(0, 3\)\]"),
        (forget_which_group_runs, r"a suspect has a row only while its group runs; broken by \[\(0, 1\)\]"),
        (let_a_request_run_with_a_group, r"the rows of suspects are isolated; broken by \[1\]"),
        (let_a_suspect_wait_without_its_group, r"a suspect waits with its group; broken by \[\(0, 2\)\]"),
        (let_a_request_wait_with_a_group, r"that waits with a group is a suspect; broken by \[\(0, 2\)\]"),
        (compute_more_tokens_than_are_known, "the last token is not computed, .*; broken by .0"),
        (register_a_block_under_another_hash, "found under the hash of row 0 at index 0"),
        (register_a_block_too_early, "found under the hash of row 0 at index 2, of computed tokens"),
        (leave_a_hash_behind, "a block and its hash lead to each other"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_invariant_is_named(damage, words):
    engine = running_engine()
    damage(engine)
    with pytest.raises(InvariantError, match=words):
        check_invariants(engine.scheduler)


def queue_a_pending_step_twice(engine):
    engine.scheduler.pending_steps.append(engine.scheduler.pending_steps.oldest)


def forget_the_tokens_of_a_pending_step(engine):
    engine.batch.num_computed_tokens[0] -= 1


def add_a_token_behind_an_awaited_token(engine):
    engine.batch.num_tokens[0] += 1


def let_a_suspect_share_a_step(engine):
    request = engine.batch.request(0)
    request.isolate_until_num_tokens = 1
    engine.batch.is_isolated[0] = True
    engine.scheduler.isolation.group = request.isolation


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (queue_a_pending_step_twice, r"pending steps are queued once, in their order; broken by \[1, 1\]"),
        (forget_the_tokens_of_a_pending_step, "the tokens of pending steps count as computed; broken by .0"),
        (add_a_token_behind_an_awaited_token, "an awaited token is the last of its row; broken by .0"),
        (let_a_suspect_share_a_step, "a pending step of a group has no other rows, .*; broken by .0"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_broken_invariant_of_pending_steps_is_named(damage, words):
    engine = running_engine(ahead=1)
    damage(engine)
    with pytest.raises(InvariantError, match=words):
        check_invariants(engine.scheduler)
