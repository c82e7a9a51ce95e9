"""What a client counts of the messages of a core, without a core."""

import errno
import time
from typing import Any

import numpy as np
import pytest

from vllm_mp import wire
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.live_requests import LiveRequests
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import GenerationStream
from vllm_mp.client.prompts.request import GenerationRequest
from vllm_mp.client.stats import Cells, CoreReading, Counter, EngineStats, FinishedRequest, Histogram, RestartCounter
from vllm_mp.requests.sampling_params import SamplingParams


class Client:
    """Statistics and streams as `Engine` connects them, with a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now + 5e8)
        self.stats = EngineStats(max_model_len=100)
        self.requests = OutputProcessor(LiveRequests(self.stats.note_end))
        self.finished: list[FinishedRequest] = []
        self.stats.add_listener(self.finished.append)
        self.num_tokens: dict[int, int] = {}

    def add(
        self,
        request_id: str,
        num_prompt_tokens: int = 4,
        arrived_s_ago: float = 0.0,
        adapter: str | None = None,
        **params: Any,
    ) -> list[int]:
        """Send a request that arrived some time ago; return its slots."""
        prompt = list(range(num_prompt_tokens))
        sampling = SamplingParams(**params)
        request = GenerationRequest(
            request_id, None, prompt, wire.pack_ids(prompt), sampling, arrival_time=time.time() - arrived_s_ago
        )
        completions = [Completion(index, sampling) for index in range(sampling.n)]
        stream = GenerationStream(request, completions)
        self.requests.requests.reserve(request_id)
        self.requests.enter(stream)
        self.stats.note_sent(stream, request.arrival_time, {}, adapter)
        slots = [completion.slot for completion in completions]
        self.num_tokens.update(dict.fromkeys(slots, 0))
        return slots

    def step(self, slots: list[int], after_s: float, queued: dict[int, float] | None = None, **more: Any) -> None:
        """Receive a token for each of `slots` after some time; `queued` has the queue times of first tokens."""
        self.now += after_s
        positions = [self.num_tokens[slot] for slot in slots]
        columns = wire.pack_tokens(np.array(slots), np.full(len(slots), 7), np.array(positions))
        for slot in slots:
            self.num_tokens[slot] += 1
        message = wire.StepOutput(1, 1, *columns, queued=list((queued or {}).items()), **more)
        self.stats.note_step(message)
        self.requests.process(message)

    def read(self, metric: Any) -> Any:
        return metric.read(self.stats.cells.total())


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    return Client(monkeypatch)


def finish(slot: int, num_tokens: int, reason: str = "length") -> wire.Finished:
    return wire.Finished(slot, num_tokens, reason)


def bucket_counts(reading: Any) -> dict[float, float]:
    bounds = [*reading.bounds, float("inf")]
    return {bound: count for bound, count in zip(bounds, reading.counts, strict=True) if count}


def test_the_record_of_a_request_has_the_moments_of_its_phases(client: Client) -> None:
    (slot,) = client.add("a", num_prompt_tokens=6, arrived_s_ago=0.5)
    sent = client.now
    client.step([slot], 3.0, {slot: 2.0}, cached=[(slot, 4)])
    client.step([slot], 0.25)
    client.step([slot], 0.25, finished=[finish(slot, 3)])
    (record,) = client.finished
    epoch = 5e8
    assert (record.request_id, record.finish_reason, record.error) == ("a", "length", None)
    assert (record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens) == (6, 4, 3)
    assert record.arrival_time == pytest.approx(sent - 0.5 + epoch)
    assert record.sent_time == pytest.approx(sent + epoch)
    assert record.scheduled_time == pytest.approx(sent + 2.0 + epoch)
    assert record.first_token_time == pytest.approx(sent + 3.0 + epoch)
    assert record.end_time == pytest.approx(sent + 3.5 + epoch)
    stats = client.stats
    sums = {
        name: client.read(getattr(stats, name)).sum
        for name in ("e2e_s", "queue_s", "prefill_s", "inference_s", "decode_s", "token_s", "first_token_s")
    }
    assert sums == pytest.approx(
        {"e2e_s": 4.0, "queue_s": 2.0, "prefill_s": 1.0, "inference_s": 1.5}
        | {"decode_s": 0.5, "token_s": 0.25, "first_token_s": 3.5}
    )
    assert (stats.prompt_tokens.value, stats.prefix_cache_queries.value, stats.prefix_cache_hits.value) == (6, 6, 4)
    assert client.read(stats.finished_requests) == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_times_between_tokens_are_counted_by_request_in_steps_of_changing_requests(client: Client) -> None:
    first, second = client.add("a")[0], client.add("b")[0]
    client.step([first], 1.0, {first: 0.0})
    client.step([first], 0.02)
    client.step([first], 0.02)
    client.step([first, second], 0.02, {second: 0.0})
    client.step([second], 0.3)
    client.step([first, second], 0.3)
    gaps = client.read(client.stats.between_tokens_s)
    # of the first request: three times 0.02 s, then 0.6 s; of the second: twice 0.3 s
    assert bucket_counts(gaps) == {0.025: 3, 0.3: 2, 0.75: 1}
    assert gaps.sum == pytest.approx(3 * 0.02 + 0.6 + 2 * 0.3)
    assert client.stats.generation_tokens.value == 8


def test_a_slot_that_another_request_takes_over_begins_without_a_time_between_tokens(client: Client) -> None:
    (slot,) = client.add("a")
    client.step([slot], 1.0, {slot: 0.0}, finished=[finish(slot, 1)])
    assert client.add("b") == [slot]
    client.step([slot], 1.0, {slot: 0.0})
    assert client.read(client.stats.between_tokens_s).count == 0
    client.step([slot], 1.0)
    assert client.read(client.stats.between_tokens_s).count == 1


def test_several_completions_are_one_request(client: Client) -> None:
    slots = client.add("a", num_prompt_tokens=5, n=2, max_tokens=20)
    client.step(slots, 1.0, dict.fromkeys(slots, 0.5))
    ends = [finish(slots[0], 1, "stop"), finish(slots[1], 1, "length")]
    client.requests.process(wire.StepOutput(1, 2, b"", b"", b"", finished=ends))
    stats = client.stats
    assert stats.prompt_tokens.value == 5
    assert client.read(stats.first_token_s).count == 1
    assert client.read(stats.params_n).sum == 2
    assert client.read(stats.params_max_tokens).sum == 20
    assert client.read(stats.request_generation_tokens).sum == 2
    assert client.read(stats.finished_requests)["length"] == 1
    assert [record.n for record in client.finished] == [2]


def test_aborted_and_failed_requests_are_counted_without_latencies(client: Client) -> None:
    (slot,) = client.add("a")
    client.step([slot], 1.0, {slot: 0.0})
    client.requests.abort("a")
    (other,) = client.add("b")
    ends = [wire.Finished(other, 0, "error", error="broken")]
    client.requests.process(wire.StepOutput(1, 2, b"", b"", b"", finished=ends))
    client.stats.note_unsent()
    assert client.read(client.stats.finished_requests) == {"stop": 0, "length": 0, "abort": 2, "error": 1}
    assert client.read(client.stats.e2e_s).count == 0
    assert [record.finish_reason for record in client.finished] == ["abort", "error"]
    assert "broken" in (client.finished[1].error or "")


def test_a_restart_is_counted_by_cause_with_the_time_to_the_next_token(client: Client) -> None:
    (slot,) = client.add("a")
    client.step([slot], 1.0, {slot: 0.0})
    client.now += 1.0
    death = client.stats.note_death("signal", client.now, "killed")
    assert [(restart.cause, restart.recovery_s) for restart in client.stats.restarts] == [("killed", None)]
    client.now += 0.5
    (later,) = client.add("b")
    client.stats.note_restart(death, client.requests.streams())
    client.step([slot], 1.5)
    client.step([slot], 1.0)
    stats = client.stats
    assert [(restart.recovery_s, restart.num_recovered) for restart in stats.restarts] == [(0.5, 1)]
    assert {kind: count for kind, count in stats.core_restarts.read().items() if count} == {"signal": 1}
    assert stats.recovered_requests.value == 1
    assert client.read(stats.recovery_s).sum == pytest.approx(2.0)
    client.step([slot, later], 1.0, {later: 0.0}, finished=[finish(slot, 4), finish(later, 1)])
    assert [(record.request_id, record.num_recoveries) for record in client.finished] == [("a", 1), ("b", 0)]


def test_recovery_lasts_until_a_moved_request_has_a_token_whatever_others_get(client: Client) -> None:
    (moved,), (other,) = client.add("a"), client.add("b")
    client.step([moved, other], 1.0, {moved: 0.0, other: 0.0})
    stream = client.requests.streams()[0]
    death = client.stats.note_death("signal", client.now, "killed")
    client.stats.note_recovered(death, [stream])
    client.step([other], 1.0)
    client.stats.note_restart(death, [])
    (later,) = client.add("c")
    client.step([other, later], 1.0, {later: 0.0})
    assert client.read(client.stats.recovery_s).count == 0
    client.step([other, moved], 1.0)
    client.step([other, moved], 1.0)
    recovery = client.read(client.stats.recovery_s)
    assert (recovery.count, recovery.sum) == (1, pytest.approx(3.0))


def test_moved_request_that_ends_without_a_token_has_no_recovery(client: Client) -> None:
    (slot,) = client.add("a")
    death = client.stats.note_death("signal", client.now + 1.0, "killed")
    client.stats.note_recovered(death, client.requests.streams())
    client.requests.abort("a")
    client.requests.process(wire.StepOutput(1, 1, b"", b"", b"", finished=[finish(slot, 0, "abort")]))
    assert client.add("b") == [slot]
    client.step([slot], 5.0, {slot: 0.0})
    assert client.read(client.stats.recovery_s).count == 0


def test_a_listener_that_raises_is_dropped_and_harms_no_other(client: Client, caplog: Any) -> None:
    calls: list[str] = []

    def fail(record: FinishedRequest) -> None:
        calls.append(record.request_id)
        raise RuntimeError("broken listener")

    client.stats.add_listener(fail)
    for request_id in ("a", "b"):
        (slot,) = client.add(request_id)
        client.step([slot], 1.0, {slot: 0.0}, finished=[finish(slot, 1)])
    assert calls == ["a"]
    assert [record.request_id for record in client.finished] == ["a", "b"]
    assert "broken listener" in caplog.text


def test_a_report_is_made_every_ten_seconds_while_tokens_arrive(client: Client) -> None:
    reports: list[float] = []
    client.stats.add_report(lambda: reports.append(client.stats.generation_tokens.value))
    (slot,) = client.add("a")
    client.step([slot], 1.0, {slot: 0.0})
    for _ in range(25):
        client.step([slot], 1.0)
    assert reports == [10, 20]


@pytest.mark.parametrize(
    "columns", [(b"\1", b"\0" * 4, b"\0\0"), (b"\xff" * 4, b"\0" * 4, b"\0\0")], ids=["too short", "unknown slot"]
)
def test_a_wrong_message_is_counted_without_an_error(client: Client, columns: tuple[bytes, bytes, bytes]) -> None:
    client.add("a")
    for _ in range(2):
        client.stats.note_step(wire.StepOutput(1, 1, *columns, queued=[(2**40, 1.0), (-1, 1.0)], cached=[(-1, 2)]))
    assert client.stats.generation_tokens.value == 2
    assert client.read(client.stats.between_tokens_s).count == 0


def test_quantiles_are_estimated_within_their_bucket() -> None:
    cells = Cells()
    histogram = Histogram(cells, (1, 2, 4))
    assert histogram.read(cells.total()).quantile(0.5) is None
    histogram.observe_all([0.5, 1.5, 1.5, 3.0])
    histogram.observe(100.0, 4)
    reading = histogram.read(cells.total())
    assert reading.counts == [1, 2, 1, 4]
    assert reading.sum == pytest.approx(406.5)
    assert reading.quantile(0.25) == pytest.approx(1.5)
    assert reading.quantile(0.99) == 4


@pytest.mark.parametrize("repeats", [1, 10])
def test_a_value_on_a_bound_counts_below_it(repeats: int) -> None:
    cells = Cells()
    single, many = Histogram(cells, (1, 2)), Histogram(cells, (1, 2))
    for value in (1.0, 2.0, 2.5):
        single.observe(value, repeats)
    many.observe_all([1.0, 2.0, 2.5] * repeats)
    assert single.read(cells.total()) == many.read(cells.total())
    assert single.read(cells.total()).counts == [repeats] * 3


def processes(count: int) -> list[tuple[Cells, Counter, Counter]]:
    made = []
    for _ in range(count):
        cells = Cells()
        made.append((cells, Counter(cells, ("a", "b")), Counter(cells, takes_maximum=True)))
    return made


def test_processes_that_share_a_folder_read_the_sum_or_the_maximum(tmp_path: Any) -> None:
    (one, events, deaths), (two, other_events, other_deaths) = processes(2)
    events.add(3, "a")
    one.share(tmp_path, "0")
    two.share(tmp_path, "1")
    events.add(1, "a")
    other_events.add(5, "b")
    deaths.add(2)
    other_deaths.add(1)
    for cells in (one, two):
        assert events.read(cells.total()) == {"a": 4, "b": 5}
        assert deaths.read(cells.total()) == {"": 2}


def test_the_successor_of_a_process_counts_on_in_its_file(tmp_path: Any) -> None:
    (one, events, _), (two, other_events, _) = processes(2)
    one.share(tmp_path, "0")
    events.add(3, "a")
    two.share(tmp_path, "0")
    other_events.add(1, "a")
    assert other_events.read(two.total()) == {"a": 4, "b": 0}
    with pytest.raises(RuntimeError, match="after `share`"):
        two.reserve(1)


def test_the_load_of_a_core_has_zeros_for_what_is_unknown() -> None:
    reading = CoreReading.of(3, {"num_running": 2, "free_blocks": 25, "total_blocks": 100})
    assert (reading.incarnation, reading.num_running, reading.num_waiting) == (3, 2, 0)
    assert reading.kv_cache_usage == 0.75


def test_restarts_of_a_shared_core_are_counted_once(tmp_path: Any) -> None:
    clients = [EngineStats(max_model_len=100) for _ in range(2)]
    for number, stats in enumerate(clients):
        stats.share(tmp_path, f"front-{number}")
        stats.core_restarts.add("connection")
    assert clients[0].core_restarts.read()["connection"] == 1


def test_a_parent_that_watches_the_core_counts_its_restarts_alone(tmp_path: Any) -> None:
    parent, stats = RestartCounter(), EngineStats(max_model_len=100)
    parent.share_as_parent(tmp_path)
    stats.share(tmp_path, "front-0")
    parent.add("hang")
    stats.core_restarts.add("connection")
    assert {kind: count for kind, count in stats.core_restarts.read().items() if count} == {"hang": 1}


def test_a_record_has_what_has_happened_since_the_record_before(client: Client) -> None:
    news: list[None] = []
    client.stats.begin_records(lambda: news.append(None))
    assert client.stats.take_record() is None
    slot, other = client.add("a", num_prompt_tokens=6, arrived_s_ago=0.5, max_tokens=9)[0], client.add("b")[0]
    client.step([slot, other], 3.0, {slot: 2.0, other: 2.0}, cached=[(slot, 4)])
    client.step([slot, other], 0.25)
    record = client.stats.take_record()
    assert len(news) == 1
    assert record is not None
    assert (record.num_prompt_tokens, record.num_generation_tokens) == (10, 4)
    prompts, lookups = record.prompt_token_stats, record.prefix_cache
    assert (prompts.computed, prompts.local_cache_hit, prompts.cached_tokens) == (6, 4, 4)
    assert (lookups.requests, lookups.queries, lookups.hits) == (2, 10, 4)
    assert record.time_to_first_tokens_iter == pytest.approx([3.5, 3.0])
    assert record.inter_token_latencies_iter == pytest.approx([0.25, 0.25])
    assert not record.finished_requests

    client.step([slot], 0.5, finished=[finish(slot, 3)])
    record = client.stats.take_record()
    assert len(news) == 2
    assert record is not None
    assert (record.num_prompt_tokens, record.num_generation_tokens) == (0, 1)
    assert record.inter_token_latencies_iter == pytest.approx([0.5])
    (finished,) = record.finished_requests
    assert (finished.request_id, finished.finish_reason, finished.max_tokens_param) == ("a", "length", 9)
    assert (finished.num_prompt_tokens, finished.num_cached_tokens, finished.num_generation_tokens) == (6, 4, 3)
    assert (record.n_params_iter, record.max_num_generation_tokens_iter) == ([1], [3])
    times = (finished.queued_time, finished.prefill_time, finished.decode_time, finished.inference_time)
    assert times == pytest.approx((2.0, 1.0, 0.75, 1.75))
    assert (finished.e2e_latency, finished.mean_time_per_output_token) == pytest.approx((4.25, 0.375))


def test_aborted_requests_are_recorded_without_the_phases_that_they_did_not_reach(client: Client) -> None:
    client.stats.begin_records(lambda: None)
    client.add("a", n=2)
    client.requests.abort("a")
    client.stats.note_unsent()
    record = client.stats.take_record()
    assert record is not None
    assert [(each.request_id, each.finish_reason, each.inference_time) for each in record.finished_requests] == [
        ("a", "abort", 0.0),
        (None, "abort", 0.0),
    ]
    assert not record.n_params_iter


def test_nothing_is_recorded_unless_asked_for(client: Client) -> None:
    (slot,) = client.add("a")
    client.step([slot], 1.0, {slot: 0.0})
    assert client.stats.take_record() is None
    client.stats.begin_records(lambda: None)
    client.step([slot], 1.0)
    client.stats.end_records()
    client.step([slot], 1.0)
    assert client.stats.take_record() is None


def test_live_requests_are_counted_by_their_adapter(client: Client) -> None:
    adapters = ("first", "first", "second", None)
    slots = [client.add(str(number), adapter=adapter)[0] for number, adapter in enumerate(adapters)]
    client.step(slots[1:], 1.0, dict.fromkeys(slots[1:], 0.0))
    assert client.stats.live_adapters() == ({"first": 1}, {"first": 1, "second": 1})
    client.requests.abort("0")
    assert client.stats.live_adapters() == ({}, {"first": 1, "second": 1})


def test_statistics_that_find_no_space_are_an_error_and_no_end_of_the_process(tmp_path, monkeypatch):
    def allocate(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", allocate)
    cells = Cells()
    cells.reserve(4)
    with pytest.raises(OSError, match="No space left"):
        cells.share(tmp_path, "front-0")
    cells.values[0] = 1  # the numbers of this process alone are still counted
    assert cells.total().tolist() == [1, 0, 0, 0]
