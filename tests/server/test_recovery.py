"""Deaths of the core while answers are streamed over HTTP."""

import asyncio
import os
import signal

import pytest
from support.server_process import StreamedAnswers, served

from vllm_mp.model_store import DEFAULT_MODEL

_NUM_STREAMS = 100
_TOKENS = 16


def _signal_during_streams(server, number):
    """Stream with and without a signal to the core; return both texts and the ends of the disturbed streams."""
    prompts = [f"The number {index} is" for index in range(_NUM_STREAMS)]
    expected = asyncio.run(StreamedAnswers(server, prompts, _TOKENS).run())
    first = server.core_pid()

    async def disturbed():
        answers = StreamedAnswers(server, prompts, _TOKENS)
        running = asyncio.create_task(answers.run())
        await answers.is_halfway.wait()
        assert set(answers.ends) == {None}
        os.kill(first, number)
        return await running, answers.ends

    texts, ends = asyncio.run(disturbed())
    assert server.core_pid() != first
    return expected, texts, ends


def test_kill_of_the_core_during_100_streams_ends_with_100_complete_answers(server):
    expected, texts, ends = _signal_during_streams(server, signal.SIGKILL)
    assert ends == ["length"] * _NUM_STREAMS
    assert texts == expected
    assert server.get("/health")[0] == server.get("/ready")[0] == 200


@pytest.mark.slow
def test_core_that_hangs_during_100_streams_is_replaced_and_all_answers_are_complete(default_model, tmp_path):
    with served(DEFAULT_MODEL, tmp_path, "--engine-iteration-timeout-s", "10") as server:
        server.wait_until_ready()
        expected, texts, ends = _signal_during_streams(server, signal.SIGSTOP)
    assert ends == ["length"] * _NUM_STREAMS
    assert texts == expected
