"""The load of `tools/bench front`: complete streams are counted, anything else is an error."""

import asyncio
import os

import pytest

from vllm_mp.testing.measuring import http_front


@pytest.fixture
def model(server):
    """The name of the model that the server serves."""
    return server.get("/v1/models")[1]["data"][0]["id"]


def test_every_token_and_event_of_the_streams_is_counted(server, model):
    counts = asyncio.run(http_front.stream_load(server.url, model, streams=3, output_len=8))
    assert counts.tokens == 3 * 8
    assert 3 <= counts.events <= counts.tokens
    assert counts.num_bytes > 100 * counts.events


def test_server_uses_processor_time_for_its_streams(server, model, monkeypatch):
    monkeypatch.setattr(http_front, "SERVED_NAME", model)
    monkeypatch.setattr(http_front, "_MIN_EVENTS", 0.0)
    figures = http_front.measure_front(server.url, server.pid, streams=2, output_len=16)
    assert list(figures) == [http_front.front_name(2)]
    assert 0 < figures[http_front.front_name(2)] < 1e7


def test_merged_tokens_are_an_error(server, model, monkeypatch):
    monkeypatch.setattr(http_front, "SERVED_NAME", model)
    monkeypatch.setattr(http_front, "_MIN_EVENTS", 1.5)
    with pytest.raises(RuntimeError, match="lower --rate"):
        http_front.measure_front(server.url, server.pid, streams=2, output_len=4)


def test_response_that_is_not_a_complete_stream_is_an_error(server):
    with pytest.raises(RuntimeError, match=r"not a complete stream.*404"):
        asyncio.run(http_front.stream_load(server.url, "no-such-model", streams=1, output_len=4))


def test_processors_are_given_back_after_a_measurement():
    available = os.sched_getaffinity(0)
    with http_front._pinned(os.getppid()):
        assert len(os.sched_getaffinity(0)) == max(1, len(available) - 1)
    assert os.sched_getaffinity(0) == available
