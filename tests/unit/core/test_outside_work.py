"""What the core does outside of steps is on the status page, and alone if it tests a suspect."""

import select
import threading

import pytest

from vllm_mp.core.outside_work import OutsideWork
from vllm_mp.core_link.core_status import OutsideTask
from vllm_mp.core_link.status_page import StatusPage

DEADLINE_S = 10


class Worker:
    """A thread whose work lasts until `end`."""

    def __init__(self, outside, slot, alone=False):
        self.began, self.may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(outside, slot, alone), daemon=True)
        self._thread.start()

    def _run(self, outside, slot, alone):
        with outside.of([OutsideTask(0, slot, 0)], alone):
            self.began.set()
            self.may_end.wait(DEADLINE_S)

    def end(self):
        self.may_end.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def page():
    return StatusPage.create(None, 1)


@pytest.fixture
def outside(page):
    outside = OutsideWork(page)
    yield outside
    outside.close()


def slots(page):
    return sorted(slot for _, slot, _ in page.read().requests)


def test_work_of_threads_goes_on_together_and_is_published(outside, page):
    workers = [Worker(outside, slot) for slot in (1, 2)]
    for worker in workers:
        assert worker.began.wait(DEADLINE_S)
    assert slots(page) == [1, 2]
    workers[0].end()
    assert slots(page) == [2]
    workers[1].end()
    assert slots(page) == []


def test_work_that_must_be_alone_waits_for_the_rest_and_the_rest_for_it(outside, page):
    first = Worker(outside, 1)
    assert first.began.wait(DEADLINE_S)
    suspect = Worker(outside, 2, alone=True)
    while not outside.is_wanted:
        pass
    later = Worker(outside, 3)
    seen = []

    def beat():
        """Look at the page while the core's thread waits, and let the work end that is under way."""
        seen.append(slots(page))
        (suspect if suspect.began.is_set() else first).may_end.set()

    outside.run_alone(beat)
    assert [1] in seen
    assert [2] in seen
    assert all(len(entry) <= 1 for entry in seen)
    assert not select.select([outside.fd], [], [], 0)[0], "an idle core would not sleep"
    assert later.began.wait(DEADLINE_S)
    later.end()


def test_core_does_something_alone_and_calls_stay_on_the_page(outside, page):
    number = outside.begin([OutsideTask(5, 77)], is_suspect_call=True)
    assert outside.has_suspect_calls
    with outside.exclusively(lambda: None):
        worker = Worker(outside, 1)
        assert not worker.began.wait(0.05)
        assert page.read().calls == [(5, 77)]
    assert worker.began.wait(DEADLINE_S)
    worker.end()
    outside.end(number)
    assert page.read().calls == []
    assert not outside.has_suspect_calls


def test_nothing_waits_for_a_core_that_has_ended(outside):
    suspect = Worker(outside, 1, alone=True)
    outside.close()
    assert suspect.began.wait(DEADLINE_S)
    suspect.end()
