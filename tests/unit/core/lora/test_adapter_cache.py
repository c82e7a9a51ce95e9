"""The adapters that a core knows, with folders that are strings."""

import select
import threading
from types import SimpleNamespace

import pytest

from vllm_mp.core.lora import adapter_cache
from vllm_mp.core.lora.adapter_cache import AdapterCache, AdapterChangedError, NotOperatorOfAdapterError
from vllm_mp.requests.lora_request import AdapterRecord, LoRARequest


class Disk:
    """Folders whose contents the test decides; reading one may fail, or wait until the test lets it go on."""

    def __init__(self):
        self.contents = {}
        self.fails = {}
        self.waits = {}
        self.reads = []

    def read(self, path):
        self.reads.append(path)
        if path in self.waits:
            assert self.waits[path].wait(30)
        if path in self.fails:
            raise self.fails[path]
        content = self.contents.get(path, path)
        return f"weights of {content}", f"digest of {content}"


class Known:
    """A cache, and what it told its successor."""

    def __init__(self, max_in_memory=2, num_slots=1):
        self.disk = Disk()
        self.notes = []
        self.cache = AdapterCache(max_in_memory, num_slots, self.disk.read, lambda records: self.notes.append(records))

    def settle(self):
        """Wait until all loads have ended; return the reasons of those that failed."""
        failures = []
        while self.cache._loads or self.cache._queued:
            assert select.select([self.cache.fd], [], [], 30)[0], "a load ends"
            failures += [why for _, why in self.cache.take_loaded()]
        return failures

    def take_until(self, done):
        """Take the loads that end until the call `done` is answered."""
        while not done.done():
            assert select.select([self.cache.fd], [], [], 30)[0], "a load ends"
            self.cache.take_loaded()

    def add(self, number, path=None, load_inplace=False, name=None):
        done = self.cache.add(name or f"adapter {number}", number, path or f"/{number}", load_inplace)
        self.settle()
        return done.result(0)

    def find(self, number, may_open=True, digest="", path=None):
        return self.cache.find(lora(number, path), may_open, digest)

    @property
    def told_path(self):
        return self.notes[-1][0].path

    @property
    def told(self):
        """What the successor would know: (id, is pinned) by name."""
        return {record.name: (record.id, record.is_pinned) for record in self.notes[-1]}


def lora(number, path=None):
    return LoRARequest(f"adapter {number}", number, path or f"/{number}")


def test_adapter_is_listed_from_its_load_to_its_removal():
    known = Known()
    assert known.cache.ids() == []
    assert known.add(1)
    assert not known.add(1), "it is there already"
    assert known.cache.ids() == [1]
    assert known.disk.reads == ["/1"]
    assert known.cache.remove(1)
    assert not known.cache.remove(1)
    assert known.cache.ids() == []
    assert known.told == {}


def test_added_adapter_stays_known_when_its_memory_is_taken_away_and_is_read_again():
    known = Known(max_in_memory=2)
    for number in (1, 2, 3):
        known.add(number)
    assert known.cache.ids() == [1, 2, 3]
    assert known.find(1).weights is None, "the least recently used gave way"
    known.cache.load(known.find(1))
    known.settle()
    assert known.find(1).weights == "weights of /1"
    assert known.find(2).weights is None


def test_folder_whose_weights_have_changed_is_refused_until_it_is_loaded_in_place():
    known = Known(max_in_memory=1)
    known.add(1)
    known.add(2)
    known.disk.contents["/1"] = "other weights"
    known.cache.load(known.find(1))
    [why] = known.settle()
    assert "its files have changed since it was first loaded; call add_lora with load_inplace=True" in why
    assert known.add(1, load_inplace=True)
    assert known.find(1).weights == "weights of other weights"


def test_adapter_that_was_loaded_for_a_request_is_forgotten_after_its_memory():
    known = Known(max_in_memory=1)
    adapter = known.find(1)
    known.cache.load(adapter)
    known.settle()
    assert known.cache.ids() == [1]
    known.add(2)
    assert known.cache.ids() == [2]


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [("other", "/1", "lora_name 'adapter 1', got 'other'"), ("adapter 1", "/other", "lora_path '/1', got '/other'")],
)
def test_id_of_another_adapter_is_refused_unless_it_is_loaded_in_place(name, path, words):
    known = Known()
    known.add(1)
    with pytest.raises(ValueError, match=f"lora_int_id 1 belongs to the adapter with {words}"):
        known.cache.add(name, 1, path, False)
    with pytest.raises(ValueError, match=words):
        known.cache.find(LoRARequest(name, 1, path), True)
    assert known.add(1, path, load_inplace=True, name=name)
    assert known.cache.find(LoRARequest(name, 1, path), True).path == path


def test_requests_keep_their_weights_when_others_are_loaded_in_place():
    known = Known()
    known.add(1)
    before = known.find(1)
    before.requests[0, 0] = "a live request"
    known.disk.contents["/1"] = "new"
    assert known.add(1, load_inplace=True)
    after = known.find(1)
    assert (before.weights, after.weights) == ("weights of /1", "weights of new")
    assert before.number != after.number, "they share no cached prefixes"
    before.requests.clear()
    known.cache.release(before)
    assert before.weights is None


def test_same_weights_loaded_in_place_change_nothing():
    known = Known()
    known.add(1)
    before = known.find(1)
    assert known.add(1, load_inplace=True)
    assert known.find(1) is before


def test_load_that_fails_says_why_and_leaves_everything_as_it_was():
    known = Known()
    known.disk.fails["/1"] = ValueError("rank 99 is above max_lora_rank=16")
    done = known.cache.add("adapter 1", 1, "/1", False)
    known.settle()
    with pytest.raises(RuntimeError, match=r"adapter 'adapter 1' \(id 1\) cannot be loaded: rank 99"):
        done.result(0)
    assert known.cache.ids() == []
    del known.disk.fails["/1"]
    known.add(1)
    known.disk.fails["/1"] = OSError("the disk is gone")
    done = known.cache.add("adapter 1", 1, "/1", True)
    known.settle()
    with pytest.raises(RuntimeError, match="OSError: the disk is gone"):
        done.result(0)
    assert known.cache.ids() == [1]
    assert known.find(1).weights == "weights of /1"


def test_slow_loads_delay_no_other(monkeypatch):
    monkeypatch.setattr(adapter_cache, "_SLOW_LOAD_S", 0.0)
    known = Known(max_in_memory=8)
    numbers = range(1, 9)
    assert len(numbers) > adapter_cache._MAX_LOADS
    known.disk.waits = {f"/{number}": threading.Event() for number in numbers}
    slow = [known.cache.add(f"adapter {number}", number, f"/{number}", False) for number in numbers]
    fast = known.cache.add("adapter 9", 9, "/9", False)
    assert not known.cache.is_busy
    while not fast.done():
        assert select.select([known.cache.fd], [], [], 30)[0]
        known.cache.take_loaded()
    assert known.cache.ids() == [9]
    assert not any(done.done() for done in slow)
    for event in known.disk.waits.values():
        event.set()
    known.settle()
    assert all(done.result(0) for done in slow)


def test_system_without_threads_fails_the_load_alone(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    known = Known()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        done = known.cache.add("adapter 1", 1, "/1", False)
        known.settle()
    with pytest.raises(RuntimeError, match="cannot be loaded: RuntimeError: can't start new thread"):
        done.result(0)
    assert known.add(1)


def test_few_adapters_are_loaded_at_a_time_and_the_others_in_their_order():
    known = Known(max_in_memory=8)
    known.disk.waits = {f"/{number}": threading.Event() for number in range(1, 9)}
    done = [known.cache.add(f"adapter {number}", number, f"/{number}", False) for number in range(1, 9)]
    assert known.cache.is_busy
    assert sorted(known.disk.reads) == [f"/{number}" for number in range(1, adapter_cache._MAX_LOADS + 1)]
    for event in known.disk.waits.values():
        event.set()
    known.settle()
    assert all(each.result(0) for each in done)


def test_client_that_is_no_operator_uses_known_adapters_and_names_no_folder():
    known = Known()
    known.add(1)
    assert known.find(1, may_open=False, path="/another/machine").path == "/1"
    with pytest.raises(NotOperatorOfAdapterError, match="have an operator call add_lora"):
        known.find(2, may_open=False)
    with pytest.raises(ValueError, match="lora_name"):
        known.cache.find(LoRARequest("other", 1, "/1"), False)
    assert known.disk.reads == ["/1"]


def test_pinned_adapter_keeps_its_memory_and_is_not_pinned_beyond_the_slots():
    known = Known(max_in_memory=1, num_slots=1)
    known.add(1)
    assert known.cache.pin(1)
    assert known.cache.pin(1)
    assert known.told == {"adapter 1": (1, True)}
    known.add(2)
    assert known.find(1).weights is not None
    with pytest.raises(ValueError, match="all 1 slots are pinned"):
        known.cache.pin(2)
    with pytest.raises(ValueError, match=r"adapter 'adapter 2' \(id 2\) can never run"):
        known.find(2)
    with pytest.raises(ValueError, match="no adapter with id 7"):
        known.cache.pin(7)
    assert known.cache.remove(1)
    assert known.cache.pin(2)


def test_last_slot_is_not_pinned_while_requests_use_another_adapter():
    known = Known(num_slots=1)
    known.add(1)
    known.add(2)
    known.find(2).requests[0, 0] = "a live request"
    with pytest.raises(ValueError, match="to the last slot while requests use adapter 'adapter 2'"):
        known.cache.pin(1)
    known.find(2).requests.clear()
    assert known.cache.pin(1)


def test_replaced_adapter_serves_the_requests_that_use_it_though_all_slots_are_pinned():
    known = Known(num_slots=1)
    known.add(1)
    known.cache.pin(1)
    known.find(1).requests[0, 0] = "a live request"
    known.disk.contents["/1"] = "new"
    known.add(1, load_inplace=True)
    successor = Known(num_slots=1)
    successor.cache.restore(known.notes[-1])
    assert successor.find(1).is_pinned
    assert not successor.find(1, digest="digest of /1").is_current


def test_removed_adapter_serves_the_requests_that_use_it():
    known = Known()
    known.add(1)
    adapter = known.find(1)
    adapter.requests[0, 0] = "a live request"
    assert known.cache.remove(1)
    assert adapter.weights is not None
    adapter.requests.clear()
    known.cache.release(adapter)
    assert adapter.weights is None


@pytest.mark.parametrize("change", ["replaced", "removed", "removed, and its id is used again"])
def test_successor_keeps_the_weights_of_requests_whose_adapter_was_replaced_or_removed(change):
    known = Known(num_slots=2)
    known.add(1)
    before = known.find(1)
    before.requests[0, 0] = "a live request"
    if change != "replaced":
        known.cache.remove(1)
    if change != "removed":
        known.add(1, path="/other", load_inplace=change == "replaced", name="adapter 1")
    for _ in range(2):  # the second core dies before the request has come back
        successor = Known(num_slots=2)
        successor.cache.restore(known.notes[-1])
        known = successor
    assert known.cache.ids() == ([] if change == "removed" else [1])
    for may_open in (True, False):
        found = known.find(1, may_open, "digest of /1")
        assert (found.number, found.path, found.is_current) == (before.number, "/1", False)
    found.requests[0, 0] = SimpleNamespace(isolate_until_num_tokens=0, task=None)
    known.cache.load(found)
    assert not known.settle()
    assert found.weights == "weights of /1"
    assert known.cache.ids() == ([] if change == "removed" else [1]), "it is not listed"
    if change == "removed":
        with pytest.raises(NotOperatorOfAdapterError):
            known.find(1, may_open=False)
    else:
        assert known.find(1, may_open=False).path == "/other", "new requests use the current adapter"


def test_request_of_a_replaced_adapter_whose_files_have_changed_must_be_sent_again():
    known = Known()
    known.add(1)
    known.find(1).requests[0, 0] = "a live request"
    known.disk.contents["/1"] = "new"
    known.add(1, load_inplace=True)
    successor = Known()
    successor.disk.contents["/1"] = "new"
    successor.cache.restore(known.notes[-1])
    successor.cache.load(successor.find(1, digest="digest of /1"))
    [why] = successor.settle()
    assert "its files have changed since it was first loaded; send the request again" in why


@pytest.mark.parametrize("is_replaced", [True, False])
def test_requests_come_back_to_an_adapter_that_was_replaced_or_removed_right_after_the_death(is_replaced):
    known = Known()
    known.add(1)
    successor = Known()
    successor.cache.restore(known.notes[-1])
    if is_replaced:
        successor.add(1, path="/other", load_inplace=True)
    else:
        successor.cache.remove(1)
    for each in (successor, Known()):
        if each is not successor:
            each.cache.restore(successor.notes[-1])
        found = each.find(1, may_open=False, digest="digest of /1")
        assert (found.path, found.is_current) == ("/1", False)


def test_request_comes_back_to_the_folder_from_which_it_has_its_weights_though_another_had_the_same():
    known = Known()
    known.disk.contents |= {"/1": "equal", "/copy": "equal"}
    known.add(1)
    for path in ("/copy", "/1"):
        successor = Known()
        successor.disk.contents |= known.disk.contents
        successor.cache.restore(known.notes[-1])
        assert successor.cache.remove(1)
        successor.add(1, path=path)
        known = successor
    for may_open in (True, False):
        found = known.find(1, may_open=may_open, digest="digest of equal")
        assert (found.path, found.is_current) == ("/1", True)
    assert known.find(1, digest="digest of equal", path="/copy").path == "/copy"


def test_failed_load_does_not_forget_the_adapter_that_was_loaded_in_its_place():
    known = Known()
    known.disk.waits["/slow"] = threading.Event()
    known.disk.fails["/slow"] = OSError("no such folder")
    first = known.cache.add("adapter 1", 1, "/slow", False)
    second = known.cache.add("adapter 1", 1, "/1", True)
    known.take_until(second)
    known.disk.waits["/slow"].set()
    [why] = known.settle()
    assert "no such folder" in why
    assert first.exception(0) is not None
    assert known.cache.ids() == [1]
    assert known.find(1).path == "/1"


def test_number_of_retired_adapters_without_requests_is_bounded(monkeypatch):
    monkeypatch.setattr(adapter_cache, "_MAX_UNUSED_RETIRED", 2)
    known = Known()
    for number in range(1, 6):
        known.add(number)
        adapter = known.find(number)
        adapter.requests[0, 0] = "a live request"
        known.cache.remove(number)
        if number > 1:
            adapter.requests.clear()
            known.cache.release(adapter)
    assert [record.id for record in known.notes[-1]] == [1, 3, 4, 5], "the last was in use when it was removed"


def test_successor_knows_the_adapters_and_pins_and_compares_the_digest():
    known = Known(num_slots=2)
    known.add(1)
    known.add(2)
    known.cache.pin(2)
    successor = Known(num_slots=2)
    successor.cache.restore(known.notes[-1])
    assert successor.cache.ids() == [1, 2]
    assert successor.find(2).is_pinned
    assert successor.disk.reads == [], "it loads what requests need"
    successor.disk.contents["/1"] = "other weights"
    for number in (1, 2):
        successor.cache.load(successor.find(number))
    [why] = successor.settle()
    assert why.startswith("adapter 'adapter 1' (id 1) cannot be loaded: its files have changed")
    assert successor.find(2).weights is not None


def test_request_is_not_continued_with_other_weights():
    known = Known()
    known.add(1)
    assert known.find(1, digest="digest of /1")
    with pytest.raises(AdapterChangedError, match="have changed since this request began; send it again"):
        known.find(1, digest="digest of what was there")
    adapter = known.find(2, digest="digest of what was there")
    known.cache.load(adapter)
    [why] = known.settle()
    assert "its files have changed" in why


@pytest.mark.parametrize(
    "arguments", [("", 1, "/1", False), ("x", 0, "/1", False), ("x", "1", "/1", False), (1, 1, 1, 1)]
)
def test_arguments_that_cannot_work_are_refused(arguments):
    known = Known()
    with pytest.raises(ValueError, match="lora_"):
        known.cache.add(*arguments)
    for number in ("1", None, 1.0, [1]):
        assert not known.cache.remove(number)
        with pytest.raises(ValueError, match="no adapter with id"):
            known.cache.pin(number)


def test_adapters_of_the_configuration_are_loaded_first_or_the_core_does_not_start():
    known = Known(max_in_memory=1)
    known.cache.load_first([lora(1), lora(2)])
    assert known.cache.ids() == [1, 2]
    assert known.disk.reads == ["/1", "/2"]
    known.disk.fails["/3"] = FileNotFoundError("no folder")
    with pytest.raises(ValueError, match="id 3\\) cannot be loaded"):
        known.cache.load_first([lora(3)])


def test_record_names_everything_that_a_successor_needs():
    known = Known()
    known.add(1)
    [record] = known.notes[-1]
    number = known.cache.find(lora(1), may_open=True).number
    assert record == AdapterRecord(1, "adapter 1", "/1", "digest of /1", True, False, number, True)
    successor = Known()
    successor.cache.restore([record])
    assert successor.cache.find(lora(1), may_open=True).number == number
    successor.add(2)
    assert successor.cache.find(lora(2), may_open=True).number != number


@pytest.mark.parametrize("slow", ["/first", "/second"])
@pytest.mark.parametrize("former", ["/1", "/second"])
def test_latest_of_two_loads_in_place_at_the_same_time_counts(slow, former):
    known = Known(max_in_memory=4)
    known.add(1, path=former)
    known.disk.waits[slow] = threading.Event()
    calls = {path: known.cache.add("adapter 1", 1, path, True) for path in ("/first", "/second")}
    [quick] = calls.keys() - {slow}
    known.take_until(calls[quick])
    known.disk.waits[slow].set()
    known.settle()
    assert [done.result(0) for done in calls.values()] == [True, True]
    assert known.told_path == "/second"
    assert known.find(1, path="/second").weights == "weights of /second"
    assert known.cache.ids() == [1]
    assert all(record.path != "/first" for record in known.notes[-1])


@pytest.mark.parametrize("load_inplace", [True, False])
def test_adapter_that_is_removed_during_its_load_is_not_listed_after_it(load_inplace):
    known = Known(max_in_memory=4)
    if load_inplace:
        known.add(1)
    known.disk.waits["/1"] = threading.Event()
    done = known.cache.add("adapter 1", 1, "/1", load_inplace)
    assert known.cache.remove(1)
    assert not known.cache.remove(1)
    later = known.cache.add("adapter 1", 1, "/later", False)
    known.take_until(later)
    known.disk.waits["/1"].set()
    assert not known.settle()
    assert done.result(0)
    assert known.find(1, path="/later").weights == "weights of /later"
    assert [record.path for record in known.notes[-1]] == ["/later"]
    assert list(known.cache._in_memory) == [known.find(1, path="/later")], "what was removed takes no memory"


def test_adapters_beyond_what_a_successor_can_be_told_of_are_refused():
    known = Known()
    path = "/" + 3000 * "x"
    for number in range(1, 86):
        known.add(number, path=f"{path}{number}")
    with pytest.raises(ValueError, match="too many adapters are added: 85; remove one of them first"):
        known.add(86, path=f"{path}86")
    assert known.cache.remove(1)
    assert known.add(86, path=f"{path}86")


def test_replaced_weights_stay_in_memory_while_requests_need_them():
    known = Known(max_in_memory=1)
    known.add(1)
    before = known.find(1)
    before.requests[0, 0] = "a live request"
    known.disk.contents["/1"] = "new"
    known.add(1, load_inplace=True)
    known.add(2)
    assert before.weights == "weights of /1"
