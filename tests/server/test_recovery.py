"""Deaths of the core while answers are streamed over HTTP."""

import asyncio
import os
import signal

from support.server_process import StreamedAnswers

_NUM_STREAMS = 100
_TOKENS = 16


def _kill_during_streams(server, number):
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
    expected, texts, ends = _kill_during_streams(server, signal.SIGKILL)
    assert ends == ["length"] * _NUM_STREAMS
    assert texts == expected
    assert server.get("/health")[0] == server.get("/ready")[0] == 200
