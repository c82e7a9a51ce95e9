"""The feed of the page: what snapshots say, and when they are made."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from vllm_mp.client.stats import CoreReading, EngineStats
from vllm_mp.config import MultiModalConfig
from vllm_mp.server.http import live_feed
from vllm_mp.server.http.admission import Admission
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.http.live_feed import LiveFeed


class Engine:
    """A stand-in for an engine whose statistics and core the test sets."""

    def __init__(self):
        self.stats = EngineStats(1000, True)
        self.model_config = SimpleNamespace(served_model_name="a model", max_model_len=1000, images=None)
        self.vllm_config = SimpleNamespace(multimodal_config=MultiModalConfig(limit_mm_per_prompt={"image": 2}))
        self.status = {"incarnation": 1, "state": "IDLE"}
        self.load = CoreReading(1, 3, 2, 25, 100, 0, 0, False, False)
        self.num_readings = 0

    async def read_core_load(self, timeout):
        self.num_readings += 1
        return self.load

    def last_core_status(self):
        return self.status

    async def get_num_unfinished_requests(self):
        return 5


class Viewer:
    """A viewer of a feed."""

    def __init__(self, feed):
        self.events = feed.events()

    async def next(self):
        """Return the next message: the greeting, or a snapshot."""
        event = await anext(self.events)
        return json.loads(event.partition(b"data: ")[2])

    async def snapshot(self, is_wanted=lambda snapshot: True):
        """Return the next snapshot that `is_wanted`."""
        while True:
            message = await self.next()
            if "state" in message and is_wanted(message):
                return message

    async def watch_until_the_end(self):
        async for _ in self.events:
            pass


@pytest.fixture(autouse=True)
def _short_interval(monkeypatch):
    monkeypatch.setattr(live_feed, "_INTERVAL_S", 0.01)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def admission():
    return Admission(10)


@pytest.fixture
def feed(engine, admission):
    return LiveFeed(engine, admission, max_body_bytes=1000)


def test_snapshot_says_what_runs(engine, feed):
    async def main():
        viewer = Viewer(feed)
        greeting = await viewer.next()
        assert (greeting["model"], greeting["max_model_len"], greeting["history"]) == ("a model", 1000, [])
        snapshot = await viewer.snapshot()
        assert (snapshot["num_running"], snapshot["num_waiting"], snapshot["num_live"]) == (3, 2, 5)
        assert (snapshot["kv_cache_usage"], snapshot["incarnation"], snapshot["state"]) == (0.75, 1, "running")
        assert snapshot["output_tokens_per_s"] is None
        assert snapshot["time_to_first_token"] is None
        await viewer.events.aclose()

    asyncio.run(main())


def test_greeting_says_which_images_the_page_may_send(engine, feed):
    async def greeting():
        viewer = Viewer(feed)
        message = await viewer.next()
        await viewer.events.aclose()
        return message["images"]

    assert asyncio.run(greeting()) is None
    engine.model_config.images = object()
    limits = asyncio.run(greeting())
    assert (limits["max_images"], limits["max_body_bytes"]) == (2, 1000)
    engine.vllm_config.multimodal_config.limit_mm_per_prompt = {"image": 0}
    assert asyncio.run(greeting()) is None


def test_share_of_accepted_drafts_is_shown_if_there_are_any(engine, feed):
    async def run():
        viewer = Viewer(feed)
        without = await viewer.snapshot()
        engine.load = engine.load._replace(num_draft_tokens=8, num_accepted_tokens=6)
        return without["accepted_drafts"], (await viewer.snapshot())["accepted_drafts"]

    assert asyncio.run(run()) == (None, 0.75)


def test_rates_and_percentiles_are_those_of_their_windows_alone(engine, feed, monkeypatch):
    async def main():
        engine.stats.first_token_s.observe(9.0, 1000)  # before the viewer came
        viewer = Viewer(feed)
        await viewer.snapshot()
        engine.stats.generation_tokens.add(500)
        engine.stats.first_token_s.observe(0.015, 100)
        snapshot = await viewer.snapshot(lambda snapshot: snapshot["output_tokens_per_s"])
        assert 0.01 < snapshot["time_to_first_token"]["p50"] < snapshot["time_to_first_token"]["p99"] < 0.02
        await viewer.snapshot(lambda snapshot: snapshot["output_tokens_per_s"] == 0)
        monkeypatch.setattr(live_feed, "_LATENCY_WINDOW_S", 0.05)
        await viewer.snapshot(lambda snapshot: snapshot["time_to_first_token"] is None)
        await viewer.events.aclose()

    asyncio.run(main())


def test_viewers_share_snapshots_and_without_viewers_none_is_made(engine, feed):
    async def main():
        viewers = [Viewer(feed) for _ in range(20)]
        for viewer in viewers:
            await viewer.next()
        snapshots = [await viewer.snapshot() for viewer in viewers]
        assert len({snapshot["time"] for snapshot in snapshots}) <= engine.num_readings < 20
        for viewer in viewers:
            await viewer.events.aclose()
        num_readings = engine.num_readings
        await asyncio.sleep(0.05)
        assert engine.num_readings == num_readings
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_new_viewer_gets_the_points_of_the_last_minutes(feed, monkeypatch):
    async def main():
        first = Viewer(feed)
        times = [(await first.snapshot())["time"] for _ in range(5)]
        second = Viewer(feed)
        history = (await second.next())["history"]
        assert [point["time"] for point in history] == times[:-1]
        assert (await second.next())["time"] == times[-1]
        monkeypatch.setattr(live_feed, "_HISTORY_S", 0.03)
        await first.snapshot(lambda snapshot: snapshot["time"] > times[-1] + 0.03)
        third = Viewer(feed)
        assert times[-1] not in [point["time"] for point in (await third.next())["history"]]
        for viewer in (first, second, third):
            await viewer.events.aclose()

    asyncio.run(main())


def test_death_and_restart_of_the_core_are_shown_with_cause_and_recovery(engine, feed):
    async def main():
        viewer = Viewer(feed)
        await viewer.snapshot()
        cause = "the core process 7 ended with signal SIGKILL; its log is in /tmp/x\nsecret line"
        engine.status = {"incarnation": 1, "state": "RECOVERING", "reason": cause}
        death = engine.stats.note_death("signal", time.monotonic(), cause)
        snapshot = await viewer.snapshot(lambda snapshot: snapshot["state"] == "restarting")
        assert snapshot["cause"] == "the core process 7 ended with signal SIGKILL"
        assert [restart["recovery_s"] for restart in snapshot["restarts"]] == [None]
        engine.status = {"incarnation": 2, "state": "IDLE"}
        engine.stats.note_restart(death, [])
        snapshot = await viewer.snapshot(lambda snapshot: snapshot["state"] == "running")
        (restart,) = snapshot["restarts"]
        assert (snapshot["incarnation"], restart["num_recovered"]) == (2, 0)
        assert restart["recovery_s"] > 0
        await viewer.events.aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "load", "state"),
    [
        ({"state": "LOADING"}, {}, "loading"),
        ({"state": "DEAD", "reason": "gone"}, {}, "dead"),
        ({"state": "IDLE"}, {"is_paused": True}, "paused"),
        ({"state": "STEPPING"}, {"is_paused": True, "is_sleeping": True}, "asleep"),
    ],
)
def test_state_is_that_of_the_core(engine, feed, status, load, state):
    async def main():
        engine.status |= status
        engine.load = engine.load._replace(**load)
        viewer = Viewer(feed)
        assert (await viewer.snapshot())["state"] == state
        await viewer.events.aclose()

    asyncio.run(main())


def test_feed_ends_when_the_server_has_drained(feed, admission):
    async def main():
        viewer = Viewer(feed)
        async with admission.admit(1):
            await viewer.snapshot()
            admission.refuse("is shutting down")
            await viewer.snapshot(lambda snapshot: snapshot["state"] == "draining")
            await viewer.snapshot()
        await viewer.watch_until_the_end()

    asyncio.run(main())


def test_failure_of_a_snapshot_ends_the_feed_of_its_viewers_and_a_new_viewer_starts_another(engine, feed, caplog):
    async def main():
        viewer = Viewer(feed)
        await viewer.snapshot()
        status, engine.status = engine.status, {}
        await viewer.watch_until_the_end()
        assert "the feed of the page failed" in caplog.text
        engine.status = status
        again = Viewer(feed)
        await again.snapshot()
        await again.events.aclose()

    asyncio.run(main())


def test_number_of_viewers_is_limited(feed, monkeypatch):
    monkeypatch.setattr(live_feed, "MAX_VIEWERS", 2)

    async def main():
        viewers = [Viewer(feed), Viewer(feed)]
        for viewer in viewers:
            feed.check_capacity()
            await viewer.next()
        with pytest.raises(ApiError, match="2 pages show this server already"):
            feed.check_capacity()
        await viewers[0].events.aclose()
        feed.check_capacity()
        await viewers[1].events.aclose()

    asyncio.run(main())
