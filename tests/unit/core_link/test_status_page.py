"""The status page is shared, consistent, and survives the kill of its writer."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from vllm_mp.core_link import status_page
from vllm_mp.core_link.core_status import (
    AWAKE,
    NOT_SUSPENDED,
    CoreState,
    OutsideTask,
    SleepState,
    StepRequests,
    Suspension,
)
from vllm_mp.core_link.status_page import (
    DIGEST_BYTES,
    MAX_NOTED_CALLS,
    MAX_OUTSIDE_TASKS,
    MAX_STEP_REQUESTS,
    MAX_TRIED,
    StatusPage,
)
from vllm_mp.requests.lora_request import AdapterRecord
from vllm_mp.wire import MAX_CLIENTS, NO_DIGEST, ModelDigest


@contextlib.contextmanager
def python(code, *arguments):
    """Run `code` in a process. Kill it at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ids(*values):
    return np.array(values, np.uint32)


def same(values):
    """Return step requests whose client, slot and number of output tokens are all `values`."""
    return StepRequests(values, values, values)


READ = """
import json, sys
from pathlib import Path
from vllm_mp.core_link.status_page import StatusPage
page = StatusPage.open(Path(sys.argv[1]))
for _ in sys.stdin:
    print(json.dumps(page.read()._asdict()), flush=True)
"""


def test_page_is_read_in_another_process(tmp_path):
    page = StatusPage.create(str(tmp_path / "page"), 7)
    with python(READ, tmp_path / "page") as reader:

        def read_there():
            reader.stdin.write("\n")
            reader.stdin.flush()
            return json.loads(reader.stdout.readline())

        status = read_there()
        assert (status["incarnation"], status["pid"]) == (7, os.getpid())
        assert status["state"] == CoreState.STARTING
        page.enter(CoreState.LOADING, 0.25)
        status = read_there()
        assert (status["state"], status["load_progress"]) == (CoreState.LOADING, 0.25)
        page.begin_step(41, StepRequests(ids(0, 1), ids(5, 65_536), ids(0, 70_000)))
        status = read_there()
        assert (status["state"], status["step"]) == (CoreState.STEPPING, 41)
        assert status["step_requests"] == [[0, 5, 0], [1, 65_536, 70_000]]
        page.end_step(num_running=3, num_waiting=4, free_blocks=50, total_blocks=60)
        status = read_there()
        assert (status["state"], status["step"], status["step_requests"]) == (CoreState.IDLE, 41, [])
        assert (status["num_running"], status["num_waiting"]) == (3, 4)
        assert (status["free_blocks"], status["total_blocks"]) == (50, 60)
        page.enter(CoreState.STOPPED)
        assert read_there()["state"] == CoreState.STOPPED


def test_requests_are_on_the_page_only_while_their_step_runs(tmp_path):
    writer = StatusPage.create(str(tmp_path / "page"), 1)
    reader = StatusPage.open(tmp_path / "page")
    assert reader.read().step_requests == []
    for step, slots in enumerate([[1, 2, 3], [4], []], 1):
        writer.begin_step(step, StepRequests(ids(*[9] * len(slots)), ids(*slots), ids(*slots)))
        assert reader.read().step_requests == [(9, slot, slot) for slot in slots]
        writer.end_step(0, 0, 1, 1)
        assert reader.read().step_requests == []


def test_requests_of_a_step_that_ends_the_core_stay_on_the_page(tmp_path):
    writer = StatusPage.create(str(tmp_path / "page"), 1)
    writer.begin_step(4, StepRequests(ids(1), ids(7), ids(2)))
    writer.enter(CoreState.STOPPED)
    assert StatusPage.open(tmp_path / "page").read().step_requests == [(1, 7, 2)]


def test_work_outside_of_steps_is_on_the_page_until_it_ends(tmp_path):
    writer = StatusPage.create(str(tmp_path / "page"), 1)
    reader = StatusPage.open(tmp_path / "page")
    writer.begin_step(1, StepRequests(ids(1, 1), ids(3, 4), ids(10, 20)))
    writer.note_outside([OutsideTask(1, 3, 0), OutsideTask(2, 7, -5), OutsideTask(2, -(2**62))])
    writer.begin_message(OutsideTask(0, 9, -1))
    status = reader.read()
    assert sorted(status.requests) == [(0, 9, -1), (1, 3, 10), (1, 4, 20), (2, 7, -5)]
    assert status.calls == [(2, -(2**62))]
    writer.end_message()
    writer.note_outside([])
    assert reader.read().requests == reader.read().step_requests == [(1, 3, 10), (1, 4, 20)]
    assert reader.read().calls == []


def test_more_work_outside_of_steps_than_the_page_has_room_for_is_left_out(tmp_path):
    writer = StatusPage.create(str(tmp_path / "page"), 1)
    writer.note_outside([OutsideTask(0, slot, 0) for slot in range(MAX_OUTSIDE_TASKS + 5)])
    requests = StatusPage.open(tmp_path / "page").read().requests
    assert requests == [(0, slot, 0) for slot in range(MAX_OUTSIDE_TASKS)]


def test_latest_constraints_that_passed_their_trials_are_on_the_page(tmp_path):
    page = StatusPage.create(str(tmp_path / "page"), 1)
    reader = StatusPage.open(tmp_path / "page")
    assert reader.tried() == []
    tried = [number.to_bytes(DIGEST_BYTES, "big") for number in range(MAX_TRIED + 2)]
    for digest in tried[:3]:
        page.note_tried(digest)
    assert reader.tried() == tried[:3]
    for digest in tried[3:]:
        page.note_tried(digest)
    assert reader.tried() == tried[2:]


def test_step_larger_than_the_page_shows_the_requests_that_fit(tmp_path):
    writer = StatusPage.create(str(tmp_path / "page"), 1)
    slots = np.arange(MAX_STEP_REQUESTS + 5, dtype=np.uint32)
    writer.begin_step(1, StepRequests(np.zeros_like(slots), slots, slots))
    requests = StatusPage.open(tmp_path / "page").read().step_requests
    assert requests == [(0, slot, slot) for slot in range(MAX_STEP_REQUESTS)]


def test_ages_count_from_the_last_beat_and_from_the_change_of_state(tmp_path, monkeypatch):
    now = 1_000_000_000_000
    monkeypatch.setattr("time.monotonic_ns", lambda: now)
    writer = StatusPage.create(str(tmp_path / "page"), 1)
    reader = StatusPage.open(tmp_path / "page")
    writer.begin_step(1, same(ids(0)))
    now += 2_000_000_000
    assert (reader.read().heartbeat_age, reader.read().state_age) == (2.0, 2.0)
    writer.beat()
    now += 500_000_000
    assert (reader.read().heartbeat_age, reader.read().state_age) == (0.5, 2.5)


WRITE_AND_WAIT = """
import sys
import numpy as np
from vllm_mp.core_link.core_status import StepRequests
from vllm_mp.core_link.status_page import StatusPage
page = StatusPage.create(sys.argv[1], 3)
page.end_step(num_running=2, num_waiting=1, free_blocks=4, total_blocks=9)
clients, slots = np.array([0, 0, 2], np.uint32), np.array([8, 9, 1], np.uint32)
page.begin_step(17, StepRequests(clients, slots, np.array([3, 4, 5])))
print("in the step", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("open_first", [True, False], ids=["opened before", "opened after"])
def test_page_outlives_a_killed_writer_and_names_its_step(tmp_path, open_first):
    path = tmp_path / "page"
    with python(WRITE_AND_WAIT, path) as writer:
        assert writer.stdout.readline() == "in the step\n"
        page = StatusPage.open(path) if open_first else None
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
        status = (page or StatusPage.open(path)).read()
    assert (status.incarnation, status.pid, status.state, status.step) == (3, writer.pid, CoreState.STEPPING, 17)
    assert status.step_requests == [(0, 8, 3), (0, 9, 4), (2, 1, 5)]
    assert (status.num_running, status.num_waiting, status.free_blocks, status.total_blocks) == (2, 1, 4, 9)


def test_incomplete_page_is_not_opened(tmp_path):
    path = tmp_path / "page"
    assert StatusPage.open(path) is None
    path.write_bytes(b"")
    assert StatusPage.open(path) is None
    StatusPage.create(str(path), 1)
    whole = path.read_bytes()
    assert StatusPage.open(path) is not None
    path.write_bytes(whole[:-1])
    assert StatusPage.open(path) is None
    path.write_bytes(bytes(len(whole)))
    assert StatusPage.open(path) is None, "the right size, but no magic number yet"


def test_only_the_owner_may_read_the_page(tmp_path):
    previous = os.umask(0)
    try:
        StatusPage.create(str(tmp_path / "page"), 1)
    finally:
        os.umask(previous)
    assert (tmp_path / "page").stat().st_mode & 0o777 == 0o600


def test_new_incarnation_starts_with_an_empty_page(tmp_path):
    old = StatusPage.create(str(tmp_path / "page"), 1)
    old.end_step(5, 6, 7, 8)
    old.begin_step(9, same(ids(1)))
    StatusPage.create(str(tmp_path / "page"), 2)
    status = StatusPage.open(tmp_path / "page").read()
    assert (status.incarnation, status.step, status.num_running, status.step_requests) == (2, 0, 0, [])


def test_page_without_a_path_works_in_its_process():
    page = StatusPage.create(None, 1)
    page.begin_step(1, StepRequests(ids(2), ids(3), ids(4)))
    assert page.read().step_requests == [(2, 3, 4)]


class SlowSlots:
    """Slots whose copy waits, like a writer that lost its processor in the middle of a write."""

    def __init__(self, slots, begun, go_on):
        self.slots, self.begun, self.go_on = slots, begun, go_on

    def __len__(self):
        return len(self.slots)

    def __getitem__(self, part):
        self.begun.set()
        assert self.go_on.wait(30)
        return self.slots[part]


def test_reader_waits_for_a_writer_that_is_interrupted_in_a_write(tmp_path):
    writer = StatusPage.create(str(tmp_path / "page"), 1)
    reader = StatusPage.open(tmp_path / "page")
    writer.begin_step(1, same(ids(1, 1)))
    begun, go_on = threading.Event(), threading.Event()
    requests = StepRequests(ids(2, 2), SlowSlots(ids(2, 2), begun, go_on), ids(2, 2))
    write = threading.Thread(target=writer.begin_step, args=(2, requests))
    write.start()
    assert begun.wait(30)
    # Longer than a busy machine takes the processor from a process.
    threading.Timer(0.03, go_on.set).start()
    try:
        status = reader.read()
    finally:
        go_on.set()
        write.join()
    assert (status.step, status.step_requests) == (2, [(2, 2, 2), (2, 2, 2)])


WRITE_WITHOUT_END = """
import sys, time
import numpy as np
from vllm_mp.core_link.core_status import StepRequests
from vllm_mp.core_link.status_page import StatusPage
page = StatusPage.create(sys.argv[1], 1)
step = 0

def pause():
    end = time.perf_counter_ns() + 300_000
    while time.perf_counter_ns() < end:
        pass

print("writing", flush=True)
while True:
    step += 1
    same = np.full(step % 7 * 40, step, np.uint32)
    page.begin_step(step, StepRequests(same, same, same))
    pause()
    page.end_step(step, step, step, step)
    pause()
"""


def test_reader_that_races_the_writer_never_sees_half_a_write(tmp_path, monkeypatch):
    # On a busy machine the writer may wait for a processor in the middle of a write.
    monkeypatch.setattr(status_page, "_WRITE_TIMEOUT_S", 30)
    with python(WRITE_WITHOUT_END, tmp_path / "page") as writer:
        assert writer.stdout.readline() == "writing\n"
        page = StatusPage.open(tmp_path / "page")
        last, changes = 0, 0
        while changes < 100:
            status = page.read()
            assert status.num_running == status.num_waiting == status.free_blocks == status.total_blocks
            if status.state == CoreState.STEPPING:
                assert status.step_requests == [(status.step,) * 3] * (status.step % 7 * 40)
                assert status.num_running == status.step - 1
            else:
                assert status.step_requests == []
                assert status.num_running == status.step or status.state == CoreState.STARTING
            assert status.step >= last, "time runs forward"
            changes += status.step != last
            last = status.step
        assert writer.poll() is None


def test_page_of_a_writer_that_ended_within_a_write_is_read_without_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(status_page, "_WRITE_TIMEOUT_S", 60)
    writer = StatusPage.create(str(tmp_path / "page"), 1)
    writer.begin_step(7, StepRequests(*np.full((3, 2), 5, np.uint32)))
    writer._header[status_page._Field.SEQUENCE] += 1  # as a kill leaves it
    reader = StatusPage.open(tmp_path / "page")
    reader.note_end_of_writer()
    started = time.monotonic()
    assert reader.read().step_requests == [(5, 5, 5)] * 2
    assert time.monotonic() - started < 30


def test_tokens_of_clients_are_on_the_page_until_they_leave(tmp_path):
    writer = StatusPage.create(str(tmp_path / "page"), 1)
    reader = StatusPage.open(tmp_path / "page")
    writer.note_client(0, b"\0" * 16)
    writer.note_client(2**40, b"0123456789abcde\0")
    writer.note_client(5, b"short")
    assert reader.tokens() == {0: b"\0" * 16, 2**40: b"0123456789abcde\0", 5: b"short".ljust(16, b"\0")}
    writer.forget_client(2**40)
    writer.forget_client(77)
    writer.note_client(6, b"f" * 16)
    assert set(reader.tokens()) == {0, 5, 6}


def test_page_has_a_place_for_every_client_and_no_more():
    page = StatusPage.create(None, 1)
    for client in range(MAX_CLIENTS + 1):
        page.note_client(client, b"t" * 16)
    assert list(page.tokens()) == list(range(MAX_CLIENTS))


def test_status_line_is_short_for_any_number_of_requests():
    page = StatusPage.create(None, 1)
    many = np.arange(5000, dtype=np.uint32)
    page.begin_step(17, same(many))
    assert "STEPPING" in str(page.read())
    assert "step 17 with 5000 requests" in str(page.read())
    assert len(str(page.read())) < 300


def test_corrupted_page_can_be_read():
    page = StatusPage.create(None, 1)
    page._header[3:] = -77
    page._step_requests[:] = -1
    status = page.read()
    assert status.state == page.state == CoreState.STOPPED
    assert page.model == NO_DIGEST
    page._header[3:] = 2**62
    assert page.read().state == CoreState.STOPPED
    assert page.model == NO_DIGEST


@pytest.mark.parametrize(
    "suspension",
    [
        NOT_SUSPENDED,
        Suspension(1, "", 0, SleepState(1, ("weights", "kv_cache")), (5,)),
        Suspension(2, "wait", 3, SleepState(2, ("kv_cache",)), (2**63 - 1, -(2**63))),
        Suspension(2**40, "keep", calls=tuple(range(MAX_NOTED_CALLS))),
    ],
)
def test_pause_and_sleep_stay_on_the_page_in_every_state(suspension):
    page = StatusPage.create(None, 1)
    page.note_suspension(Suspension(1, "abort", 9, SleepState(2, ("weights",)), tuple(range(70, 130))))
    page.note_suspension(suspension)
    page.enter(CoreState.LOADING, 0.5)
    page.end_step(0, 1, 2, 3)
    assert page.read().suspension == suspension
    assert ("asleep at level" in str(page.read())) == bool(suspension.sleep.missing)
    assert ("paused" in str(page.read())) == bool(suspension.pause)


def test_impossible_sleep_reads_as_awake():
    page = StatusPage.create(None, 1)
    for level, missing in ((9, 3), (1, 0), (0, 3), (-1, -1)):
        page._header[14:16] = level, missing
        assert page.read().suspension.sleep == AWAKE
    for mode in (-1, 4, 2**62):
        page._header[17] = mode
        assert page.read().suspension.pause == ""


class ChangingAdapters:
    """The bytes of the adapters on a page; `change` is called once, before they are read."""

    def __init__(self, array, change):
        self.array, self.change = array, change

    def __setitem__(self, key, value):
        self.array[key] = value

    def __getitem__(self, key):
        change, self.change = self.change, lambda: None
        change()
        return self.array[key]


def test_adapters_of_a_core_that_lives_are_read_whole(monkeypatch):
    page = StatusPage.create(None, 1)
    earlier, later = ([AdapterRecord(n, name, "/folder") for n in range(5)] for name in ("poet", "other"))
    page.note_adapters(earlier)

    def change():
        for adapters in (earlier[:1], later):  # the latter are written over those that are read
            page.note_adapters(adapters)

    monkeypatch.setattr(page, "_adapters", ChangingAdapters(page._adapters, change))
    assert page.adapters() == later


def test_model_stays_on_the_page_until_its_weights_are_dropped(tmp_path):
    writer = StatusPage.create(str(tmp_path / "page"), 1)
    reader = StatusPage.open(tmp_path / "page")
    assert reader.model == NO_DIGEST
    for digest in (ModelDigest("w" * 32, "c" * 32, "t" * 32), NO_DIGEST, ModelDigest("dummy 7", "c", "t")):
        writer.note_model(digest)
        assert reader.model == digest


def test_page_says_how_large_a_step_is_and_what_its_limit_is(tmp_path):
    writer = StatusPage.create(str(tmp_path / "page"), 1)
    reader = StatusPage.open(tmp_path / "page")
    assert (reader.step_limit_s, reader.steps_wait) == (0.0, False)
    writer.begin_step(1, same(ids(1, 2)), 48, 1_500_000_000)
    assert reader.step_limit_s == 1.5
    assert "step 1 with 2 requests and 48 tokens, " in str(reader.read())
    writer.end_step(2, 0, 5, 10)
    assert reader.step_limit_s == 0.0, "what comes between two steps has no limit"
    writer.begin_step(2, same(ids(1)))
    assert reader.step_limit_s == 0.0
    writer.note_waits()
    assert reader.steps_wait
