"""Calls that change the pause or the sleep are carried out once, and every change is on the status page."""

from concurrent.futures import Future

import pytest

from vllm_mp.core.suspension_record import SuspensionRecord
from vllm_mp.core_link.core_status import AWAKE, NOT_SUSPENDED, SleepState, Suspension
from vllm_mp.core_link.status_page import MAX_NOTED_CALLS, StatusPage


class Core:
    """A record, the page it writes, and what it told the clients."""

    def __init__(self, inherited=NOT_SUSPENDED):
        self.page, self.told, self.log = StatusPage.create(None, 1), [], []
        self.record = SuspensionRecord(self.page, inherited, self.told.append)

    def suspension(self):
        return self.page.read().suspension

    def call(self, call_id, result=None):
        """Carry out a call that returns or raises `result`."""

        def run(argument):
            self.log.append((call_id, argument))
            if isinstance(result, Exception):
                raise result
            return result

        return self.record.carry_out(call_id, run, "argument")


def test_each_change_has_a_generation_of_its_own_and_is_on_the_page():
    core = Core()
    core.record.note_pause("wait", 2)
    core.record.note_pause("wait", 1)
    assert core.suspension() == Suspension(1, "wait", 1)
    core.record.note_sleep(SleepState(1, ("kv_cache",)))
    core.record.note_sleep(SleepState(1, ("kv_cache",)))
    core.record.note_pause("keep", 0)
    assert core.suspension() == Suspension(3, "keep", 0, SleepState(1, ("kv_cache",)))
    core.record.note_pause("", 0)
    core.record.note_sleep(AWAKE)
    assert core.suspension() == core.record.state == Suspension(5)
    assert core.told == [False, True, False]


def test_successor_inherits_the_suspension_and_counts_on():
    inherited = Suspension(7, "keep", 0, SleepState(2, ("weights", "kv_cache")), (1, 2))
    core = Core(inherited)
    assert core.suspension() == inherited
    core.record.note_pause("", 0)
    assert core.suspension() == inherited._replace(generation=8, pause="")
    assert core.told == [True, False]


def test_call_is_carried_out_once_in_a_core_and_its_successors():
    first = Core()
    assert first.call(5, "result") == "result"
    assert first.call(5) is None
    second = Core(first.suspension())
    assert second.call(5) is None
    assert second.call(6, "other") == "other"
    assert (first.log, second.log) == ([(5, "argument")], [(6, "argument")])


def test_call_counts_as_carried_out_when_its_future_is_done():
    core, done = Core(), Future()
    assert core.call(5, done) is done
    assert core.call(5, done) is done
    assert core.suspension().calls == ()
    done.set_result(None)
    assert core.suspension().calls == (5, 5)
    assert core.call(5) is None


def test_call_that_another_call_has_ended_fails_again_and_changes_nothing():
    core, done = Core(), Future()
    core.call(5, done)
    done.set_exception(RuntimeError("generation was resumed"))
    with pytest.raises(ValueError, match="another call has ended it"):
        Core(core.suspension()).call(5)


def test_refused_call_is_not_noted():
    core = Core()
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            core.call(5, ValueError("wrong"))
    assert len(core.log) == 2


def test_latest_calls_are_noted_and_ids_that_do_not_fit_the_page_are_not():
    core = Core()
    for call_id in (2**64 - 1, -(2**63), *range(200)):
        core.call(call_id)
    assert core.suspension().calls == tuple(range(200 - MAX_NOTED_CALLS, 200))
