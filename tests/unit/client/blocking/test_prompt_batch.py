"""A batch of requests on a core that has room for few of them."""

import asyncio

import pytest

from vllm_mp.client.blocking.progress_bar import ProgressBar
from vllm_mp.client.blocking.prompt_batch import Batch, BatchRequest
from vllm_mp.client.threads.loop_thread import LoopThread
from vllm_mp.errors import NoRoomError
from vllm_mp.outputs import RequestFailure, RequestOutput


class Room:
    """Answers requests while fewer than `limit` of them are live, and refuses the others."""

    def __init__(self, limit):
        self.limit = limit
        self.num_live = self.num_refused = 0

    async def answer(self, number):
        if self.num_live >= self.limit:
            self.num_refused += 1
            raise NoRoomError("no room")
        self.num_live += 1
        await asyncio.sleep(0)
        self.num_live -= 1
        yield RequestOutput(str(number), None, [], None, [], True)


@pytest.fixture
def thread():
    thread = LoopThread()
    yield thread
    thread.close()


def run(thread, room, count):
    requests = [BatchRequest(i, str(i), 1, lambda i=i: room.answer(i)) for i in range(count)]
    return Batch(thread, 8, ProgressBar(False, count), count).run(requests)


def test_requests_without_room_start_again_when_others_have_ended(thread):
    room = Room(2)
    assert [output.request_id for output in run(thread, room, 40)] == [str(i) for i in range(40)]
    assert 0 < room.num_refused < 40


def test_request_without_room_for_it_alone_fails(thread):
    outputs = run(thread, Room(0), 3)
    assert all(isinstance(output, RequestFailure) and isinstance(output.error, NoRoomError) for output in outputs)
