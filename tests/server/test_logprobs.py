"""Log-probabilities of a response are converted beside the event loop if they are many."""

import asyncio
import threading

import pytest

from vllm_mp.outputs import Logprob
from vllm_mp.server.openai.logprobs import chat_logprobs, convert


@pytest.mark.parametrize(("num_positions", "is_inline"), [(0, True), (10, True), (5000, False)])
def test_many_positions_are_converted_in_another_thread(num_positions, is_inline):
    positions = [{7: Logprob(-0.5, 1, "a")}] * num_positions
    threads = []

    def call():
        threads.append(threading.get_ident())
        return chat_logprobs(positions, 1)

    converted = asyncio.run(convert(call, positions))
    assert len(converted.content) == num_positions
    assert (threads == [threading.get_ident()]) == is_inline
