"""Sleep and wake-up with a stand-in for the memory: which requests wait, what is restored, and the state on failure."""

import itertools

import pytest
from support.stand_in_engine import Engine

from vllm_mp.core.worker.memory.sleep import MemoryLostError
from vllm_mp.core_link.core_status import AWAKE, SleepState

BOTH = ("weights", "kv_cache")


def engine_with(num_requests, steps=3, **config):
    """Return an engine after `steps` steps with `num_requests` requests of 8 output tokens."""
    engine = Engine(**config)
    for slot in range(num_requests):
        engine.add(slot)
    for _ in range(steps):
        engine.step()
    return engine


def sleep(engine, *args):
    done = engine.sleep.sleep(*args)
    engine.settle_sleep()
    return done.result(0)


def wake_up(engine, *tags):
    done = engine.sleep.wake_up(*tags)
    engine.settle_sleep()
    return done.result(0)


@pytest.mark.parametrize(
    ("calls", "weights", "state"),
    [
        ([1], "host", SleepState(1, BOTH)),
        ([2], "disk", SleepState(2, BOTH)),
        ([1, 1], "host", SleepState(1, BOTH)),
        ([1, 2], "disk", SleepState(2, BOTH)),
        ([2, 1], "disk", SleepState(2, BOTH)),
        ([2, ["weights"]], "device", SleepState(2, ("kv_cache",))),
        ([2, ["kv_cache"]], "disk", SleepState(2, ("weights",))),
        ([2, ["kv_cache"], 1], "disk", SleepState(2, BOTH)),
        ([2, ["weights"], 1], "host", SleepState(1, BOTH)),
        ([1, ["weights"], ["weights"]], "device", SleepState(1, ("kv_cache",))),
        ([1, ["weights"], ["kv_cache"]], "device", AWAKE),
        ([1, ["kv_cache"], ["weights"]], "device", AWAKE),
        ([2, ["kv_cache", "weights"]], "device", AWAKE),
        ([1, []], "device", AWAKE),
        ([[], ["weights"], 1, [], []], "device", AWAKE),
    ],
)
def test_calls_of_sleep_and_wake_up_set_the_state_and_move_the_weights(calls, weights, state):
    engine = engine_with(2)
    for call in calls:
        sleep(engine, call) if isinstance(call, int) else wake_up(engine, *call)
    assert engine.sleep.state == state
    assert engine.memory.weights == weights
    assert engine.memory.cache == ("kv_cache" not in state.missing)
    assert engine.memory.is_whole == engine.scheduler.has_work == (state == AWAKE)
    assert (engine.states or [AWAKE])[-1] == state


@pytest.mark.parametrize(("level", "ahead"), list(itertools.product((1, 2), (0, 1))))
def test_live_and_new_requests_wait_while_asleep_and_complete_after_wake_up(level, ahead):
    engine = engine_with(3, max_num_seqs=2, ahead=ahead)
    sleep(engine, level)
    assert engine.pool.num_free == engine.pool.num_blocks
    given = {slot: len(tokens) for slot, tokens in engine.outputs.items()}
    engine.add(3)
    assert engine.step() is None
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 4)
    wake_up(engine)
    step = engine.step()
    assert step.counts.tolist() == [4 + given[0], 4 + given[1]], "all but the last token is computed again"
    engine.run()
    assert engine.outputs == {slot: [7] * 8 for slot in range(4)}
    assert engine.ends == dict.fromkeys(range(4), "length")


def test_no_cached_block_is_found_after_a_sleep():
    engine = Engine()
    engine.add(0, prompt=list(range(20)))
    engine.run()
    sleep(engine, 1)
    wake_up(engine)
    engine.add(1, prompt=list(range(20)))
    assert engine.step().counts.tolist() == [20]


def test_mode_abort_ends_live_requests_and_new_requests_wait():
    engine = engine_with(2, max_num_seqs=1)
    sleep(engine, 1, "abort")
    assert engine.ends == {0: "abort", 1: "abort"}
    engine.add(2)
    assert engine.step() is None
    wake_up(engine)
    engine.run()
    assert engine.ends[2] == "length"


def test_requests_of_a_sleeping_engine_can_be_aborted():
    engine = engine_with(1)
    sleep(engine, 2)
    engine.add(1)
    assert [engine.scheduler.abort(0, slot).num_output_tokens for slot in range(2)] == [3, 0]
    wake_up(engine)
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_pause_and_sleep_end_independently(mode):
    engine = engine_with(1)
    sleep(engine, 1)
    done = engine.pause_for(mode, True)
    engine.add(1)
    engine.pause.settle()
    assert done.done() == (mode != "wait")
    assert engine.step() is None
    if mode != "wait":
        engine.pause.resume()
        assert not engine.scheduler.is_paused
        assert engine.step() is None, "the core is still asleep"
        engine.pause_for(mode, True)
    wake_up(engine)
    engine.run()
    assert done.done()
    assert engine.outputs.get(1, []) == []
    engine.pause.resume()
    engine.run()
    assert engine.ends == ({0: "abort", 1: "abort"} if mode == "abort" else {0: "length", 1: "length"})


def test_paused_engine_stays_paused_after_wake_up():
    engine = engine_with(1)
    engine.pause_for("keep", False)
    sleep(engine, 2)
    wake_up(engine)
    assert engine.step() is None
    engine.pause.resume()
    engine.run()
    assert engine.outputs == {0: [7] * 8}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("failing", ["restore_weights", "restore_cache", "prepare"])
@pytest.mark.parametrize("error", [RuntimeError("no memory"), ValueError("no file"), OSError("no file"), MemoryError()])
def test_failed_wake_up_takes_no_memory_and_can_be_repeated(level, failing, error):
    engine = engine_with(2)
    sleep(engine, level)
    engine.memory.fails = {failing: error}
    with pytest.raises(RuntimeError, match=rf"stays asleep.*{type(error).__name__}: {error}.*call wake_up again"):
        wake_up(engine)
    assert engine.sleep.state == SleepState(level, BOTH)
    assert (engine.memory.weights, engine.memory.cache) == (("host", "disk")[level - 1], False)
    assert engine.step() is None
    wake_up(engine)
    engine.run()
    assert engine.outputs == {0: [7] * 8, 1: [7] * 8}


@pytest.mark.parametrize(("first", "second"), [BOTH, BOTH[::-1]])
def test_failed_wake_up_keeps_the_memory_that_an_earlier_wake_up_restored(first, second):
    engine = engine_with(1)
    sleep(engine, 1)
    wake_up(engine, first)
    engine.memory.fails = {"prepare": RuntimeError("no room for graphs")}
    with pytest.raises(RuntimeError, match=f"cannot restore {second}"):
        wake_up(engine)
    assert engine.sleep.state == SleepState(1, (second,))
    assert (engine.memory.weights == "device", engine.memory.cache) == (first == "weights", first == "kv_cache")


def test_wake_up_raises_errors_other_than_missing_memory_or_files():
    engine = engine_with(1)
    sleep(engine, 1)
    engine.memory.fails = {"restore_weights": KeyError("a bug")}
    with pytest.raises(KeyError):
        wake_up(engine)
    assert engine.sleep.state == SleepState(1, BOTH)


def test_engine_continues_when_the_weights_do_not_fit_in_host_memory():
    engine = engine_with(2)
    engine.memory.fails = {"offload_weights": RuntimeError("no memory")}
    with pytest.raises(RuntimeError, match=r"continues as before: no memory; .*level=2"):
        sleep(engine, 1, "abort")
    assert engine.sleep.state == AWAKE
    engine.run()
    assert engine.ends == {0: "length", 1: "length"}


def test_weights_that_are_lost_end_the_core():
    engine = engine_with(1)
    engine.memory.fails = {"offload_weights": MemoryLostError("rank 1: no memory")}
    with pytest.raises(MemoryLostError, match="rank 1: no memory"):
        sleep(engine, 1)


def test_state_is_noted_before_a_call_is_answered():
    engine = engine_with(1)
    noted = []
    engine.sleep.sleep(1).add_done_callback(lambda _: noted.append(list(engine.states)))
    engine.sleep.wake_up().add_done_callback(lambda _: noted.append(list(engine.states)))
    engine.settle_sleep()
    assert noted == [[SleepState(1, BOTH)], [SleepState(1, BOTH), AWAKE]]


@pytest.mark.parametrize("level", [0, 3, -1, True, 1.0, "1", None])
def test_invalid_levels_are_refused_by_name_and_change_nothing(level):
    engine = engine_with(1)
    with pytest.raises(ValueError, match=f"level must be 1, .* or 2, .*, got {level!r}"):
        engine.sleep.sleep(level)
    assert not engine.sleep.is_due


def test_invalid_modes_and_tags_are_refused_by_name_and_change_nothing():
    engine = engine_with(1)
    for mode in ("wait", None, 1):
        with pytest.raises(ValueError, match=f"mode must be one of keep, abort, got {mode!r}; .*pause"):
            engine.sleep.sleep(1, mode)
    for tags in (("weight",), ("weights", None), (1,)):
        with pytest.raises(ValueError, match=f"tags must be a list of weights and kv_cache, .* got {tags[-1]!r}"):
            engine.sleep.wake_up(*tags)
    assert not engine.sleep.is_due


@pytest.mark.parametrize(
    ("state", "weights", "cache"),
    [
        (AWAKE, "device", True),
        (SleepState(1, BOTH), "host", False),
        (SleepState(2, BOTH), "disk", False),
        (SleepState(1, ("kv_cache",)), "device", False),
        (SleepState(2, ("weights",)), "disk", True),
    ],
)
def test_core_enters_the_sleep_of_its_predecessor(state, weights, cache):
    engine = Engine()
    engine.sleep.enter(state)
    assert (engine.memory.weights, engine.memory.cache, engine.sleep.state) == (weights, cache, state)
    engine.add(0)
    if state.missing:
        assert engine.step() is None
        wake_up(engine)
    engine.run()
    assert engine.ends == {0: "length"}


def test_core_drops_the_weights_that_its_predecessor_could_keep_in_host_memory():
    engine = Engine()
    engine.memory.fails = {"offload_weights": RuntimeError("no memory")}
    engine.sleep.enter(SleepState(1, BOTH))
    assert engine.memory.weights == "disk"
    assert engine.sleep.state == SleepState(2, BOTH)
