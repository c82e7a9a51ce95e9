"""Pausing, with a stand-in for the model: which requests run, which wait, and when the caller is answered."""

import pytest
from support.stand_in_engine import Engine

from vllm_mp.core.scheduler import pause


def engine_with(num_requests, steps=1, **config):
    """Return an engine that has run `steps` steps with `num_requests` requests of 8 tokens."""
    engine = Engine(**config)
    for slot in range(num_requests):
        engine.add(slot)
    for _ in range(steps):
        engine.step()
    return engine


def num_outputs(engine):
    return [len(engine.outputs.get(slot, [])) for slot in range(len(engine.outputs))]


def test_abort_ends_every_request_and_new_requests_wait_for_resume():
    engine = engine_with(3, max_num_seqs=2)
    assert engine.pause.pause("abort", True).done()
    assert engine.ends == {0: "abort", 1: "abort", 2: "abort"}
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.add(3)
    assert engine.step() is None
    assert engine.scheduler.num_waiting == 1
    assert engine.scheduler.is_paused
    engine.pause.resume()
    assert not engine.scheduler.is_paused
    engine.run()
    assert engine.outputs[3] == [7] * 8


def test_wait_lets_requests_end_and_holds_new_requests_back():
    engine = engine_with(2, max_num_seqs=1, policy="priority")
    done = engine.pause.pause("wait", True)
    engine.add(2, priority=-5)
    engine.run()
    assert engine.ends == {0: "length", 1: "length"}
    assert done.done()
    assert engine.scheduler.num_waiting == 1
    assert engine.scheduler.is_paused
    engine.pause.resume()
    engine.run()
    assert engine.ends[2] == "length"


def test_wait_is_answered_by_the_step_that_ends_the_last_request():
    engine = engine_with(1)
    done = engine.pause.pause("wait", True)
    for _ in range(6):
        engine.step()
        assert not done.done()
    engine.step()
    assert done.done()


def test_wait_is_answered_when_the_last_request_is_aborted():
    engine = engine_with(1)
    done = engine.pause.pause("wait", True)
    engine.scheduler.abort(0, 0)
    engine.pause.settle()
    assert done.result() is None


def test_wait_clears_the_cache_only_if_asked():
    for clears, counts in ((True, [20]), (False, [4])):
        engine = Engine()
        engine.add(0, prompt=list(range(100, 120)))
        engine.step()
        engine.pause.pause("wait", clears)
        engine.run()
        engine.pause.resume()
        engine.add(1, prompt=list(range(100, 120)))
        assert engine.step().counts.tolist() == counts


def test_keep_stops_running_requests_and_resume_continues_them():
    engine = engine_with(3, steps=3, max_num_seqs=2)
    assert engine.pause.pause("keep", False).done()
    assert engine.step() is None
    assert not engine.scheduler.has_work
    engine.add(3)
    assert num_outputs(engine) == [3, 3]
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 2)
    engine.pause.resume()
    assert engine.step().counts.tolist() == [1, 1]
    engine.run()
    assert num_outputs(engine) == [8] * 4
    assert engine.scheduler.num_preemptions == 0


def test_after_keep_with_a_cleared_cache_everything_is_recomputed():
    engine = engine_with(2, steps=3)
    engine.pause_for("keep", True)
    assert engine.pool.num_free == engine.pool.num_blocks
    engine.pause.resume()
    assert engine.step().counts.tolist() == [7, 7], "five prompt tokens and all but the last of three output tokens"
    engine.run()
    assert num_outputs(engine) == [8, 8]


def test_the_second_of_two_keeps_may_clear_the_cache():
    engine = engine_with(1, steps=3)
    engine.pause.pause("keep", False)
    engine.pause_for("keep", True)
    engine.pause.resume()
    assert engine.step().counts.tolist() == [7]
    engine.run()


def test_pausing_twice_and_resuming_twice_works():
    engine = engine_with(1)
    first, second = (engine.pause.pause("wait", True) for _ in range(2))
    engine.run()
    assert first.done()
    assert second.done()
    assert engine.pause.pause("wait", True)
    engine.pause.settle()
    for _ in range(2):
        engine.pause.resume()
    engine.add(1)
    engine.run()
    assert engine.ends == {0: "length", 1: "length"}


def test_requests_held_by_a_pause_stay_held_when_its_mode_changes():
    engine = engine_with(1, steps=2)
    engine.pause.pause("keep", False)
    engine.add(1)
    done = engine.pause.pause("wait", False)
    engine.run()
    assert done.done()
    assert engine.ends == {0: "length"}
    engine.pause.pause("abort", False)
    assert engine.ends == {0: "length", 1: "abort"}


def test_wait_fails_on_resume_or_keep_and_succeeds_on_abort():
    for next_call, outcome in (
        (lambda pause: pause.resume(), "resumed"),
        (lambda pause: pause.pause("keep", True), "keep"),
        (lambda pause: pause.pause("abort", False), None),
    ):
        engine = engine_with(1)
        done = engine.pause.pause("wait", True)
        next_call(engine.pause)
        engine.pause.settle()
        if outcome is None:
            assert done.result(0) is None
        else:
            with pytest.raises(RuntimeError, match=outcome):
                done.result(0)
        engine.pause.resume()
        engine.run()


def test_resume_is_carried_out_when_too_many_pauses_wait_for_another_pause(monkeypatch):
    monkeypatch.setattr(pause, "_MAX_DRAINS", 2)
    engine = engine_with(1)
    waiting = [engine.pause.pause("wait", True) for _ in range(2)]
    with pytest.raises(ValueError, match="too many calls wait for a pause: the limit is 2"):
        engine.pause.pause("wait", True)
    engine.pause.resume()
    assert not engine.scheduler.is_paused
    assert all(done.exception() for done in waiting)
    engine.run()


def test_wait_succeeds_on_resume_if_its_requests_have_just_ended():
    engine = engine_with(1)
    done = engine.pause.pause("wait", True)
    engine.scheduler.abort(0, 0)
    engine.pause.resume()
    assert done.result(0) is None


def test_held_and_stopped_requests_can_be_aborted():
    for clears in (True, False):
        engine = engine_with(2, max_num_seqs=1)
        engine.pause.pause("keep", clears)
        engine.add(2)
        assert [engine.scheduler.abort(0, slot).num_output_tokens for slot in range(3)] == [1, 0, 0]
        assert engine.scheduler.abort(0, 2) is None
        assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (0, 0)
        assert engine.pool.num_free == engine.pool.num_blocks
        engine.pause.resume()
        assert engine.step() is None


def test_invalid_arguments_are_refused_by_name_and_change_nothing():
    engine = engine_with(1)
    for mode, clears, error, words in (
        ("stop", True, ValueError, "abort, wait, keep, got 'stop'"),
        ("keep", 1, ValueError, "clear_cache"),
    ):
        with pytest.raises(error, match=words):
            engine.pause.pause(mode, clears)
    assert not engine.scheduler.is_paused


@pytest.mark.parametrize(("mode", "num_draining"), [("keep", 0), ("abort", 0), ("wait", 0)])
def test_inherited_pause_holds_every_request_until_resume(mode, num_draining):
    engine = Engine()
    engine.pause.enter(mode, num_draining)
    assert engine.scheduler.is_paused
    engine.add(0, output=[7, 7])
    engine.add(1, after_pause=True)
    assert engine.step() is None
    engine.pause.resume()
    engine.run()
    assert engine.ends == {0: "length", 1: "length"}
    assert engine.pauses == [("", 0)]


def test_inherited_wait_lets_the_requests_from_before_it_run_to_their_ends():
    engine = Engine()
    engine.pause.enter("wait", 2)
    engine.add(0, output=[7, 7])
    engine.add(1, after_pause=True)
    done = engine.pause.pause("wait", True)
    engine.run()
    assert engine.ends == {0: "length"}
    assert not done.done(), "the second request from before the pause has not come back"
    engine.add(2, client=1)
    engine.run()
    assert engine.ends == {0: "length", 2: "length"}
    assert done.result(0) is None
    engine.add(3)
    assert engine.step() is None, "every request from before the pause has ended"
    assert engine.pauses[-1] == ("wait", 0)
    engine.pause.resume()
    engine.run()
    assert engine.ends[1] == engine.ends[3] == "length"


def test_request_from_before_an_inherited_wait_counts_as_ended_if_it_does_not_come_back_in_time():
    engine = Engine()
    engine.pause.enter("wait", 2)
    done = engine.pause.pause("wait", True)
    engine.add(0)
    engine.run()
    assert not done.done()
    engine.pause._returning_until = 0.0
    engine.pause.settle()
    assert done.result(0) is None
    engine.add(1)
    assert engine.step() is None


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_inherited_wait_ends_with_another_mode(mode):
    engine = Engine()
    engine.pause.enter("wait", 2)
    engine.add(0)
    engine.pause_for(mode, False)
    engine.add(1)
    assert engine.step() is None
    assert engine.scheduler.num_waiting == (2 if mode == "keep" else 1)


def test_every_pause_is_noted_with_the_number_of_requests_that_may_still_run():
    engine = engine_with(2)
    engine.pause.pause("wait", True)
    engine.scheduler.abort(0, 0)
    engine.pause.settle()
    engine.pause.pause("keep", True)
    engine.pause.pause("wait", True)
    engine.run()
    engine.pause.resume()
    noted = [state for i, state in enumerate(engine.pauses) if state != engine.pauses[i - 1] or not i]
    assert noted == [("wait", 2), ("wait", 1), ("keep", 0), ("wait", 1), ("wait", 0), ("", 0)]
