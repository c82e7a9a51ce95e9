"""Deaths of the core while answers are streamed over HTTP."""

import asyncio
import os
import signal

import pytest
from support.engine_fixtures import SHORT_STEPS
from support.server_process import StreamedAnswers, served

pytestmark = pytest.mark.usefixtures("forked_programs")

_NUM_STREAMS = 100
_TOKENS = 16


def _signal_during_streams(server, number):
    """Stream with and without a signal to the core; return both texts and the ends of the disturbed streams.

    Streams that end before the signal, on a busy machine, are sent again.
    """
    prompts = [f"The number {index} is" for index in range(_NUM_STREAMS)]
    expected = asyncio.run(StreamedAnswers(server, prompts, _TOKENS).run())
    first = server.core_pid()

    async def disturbed():
        for _ in range(10):
            answers = StreamedAnswers(server, prompts, _TOKENS)
            running = asyncio.create_task(answers.run())
            await answers.is_halfway.wait()
            if set(answers.ends) == {None}:
                break
            await running
        assert set(answers.ends) == {None}, "streams ended too early each time"
        os.kill(first, number)
        return await running, answers.ends

    texts, ends = asyncio.run(disturbed())
    assert server.core_pid() != first
    return expected, texts, ends


@pytest.fixture(scope="module")
def small_server(small_model, tmp_path_factory):
    flags = ("--num-threads", "1", "--fault-injection", SHORT_STEPS, "--engine-iteration-timeout-s", "5")
    with served(small_model, tmp_path_factory.mktemp("small"), *flags) as server:
        server.wait_until_ready()
        yield server


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.essential), signal.SIGSTOP], ids=["killed", "hangs"]
)
def test_death_of_the_core_during_100_streams_ends_with_100_complete_answers(small_server, number):
    expected, texts, ends = _signal_during_streams(small_server, number)
    assert ends == ["length"] * _NUM_STREAMS
    assert texts == expected
    assert small_server.get("/health")[0] == small_server.get("/ready")[0] == 200
