"""A client that harms a shared core in every way that a client can, until it is killed.

    python -m vllm_mp.testing.faults.hostile_client ADDRESS KEY_FILE SEED

KEY_FILE is empty for a Unix socket.
"""

import asyncio
import contextlib
import itertools
import random
import sys
import time

import zmq

from vllm_mp import AsyncLLM, RequestOutputKind, SamplingParams, wire
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.errors import EngineError
from vllm_mp.testing.fuzzing import ClientFrames

_CONNECT_S = 60.0
_ACT_S = 3.0
"""Duration of each act."""
_NUM_FLOODING = 300
_NUM_UNREAD = 64


def _greeted(address: str, key_file: str | None) -> CoreConnection:
    """Return a connection to the core after its welcome. Raises EngineStartError if there is no core in time."""
    connection = CoreConnection(address, key_file)
    try:
        connection.greet(_CONNECT_S, lambda: None)
    except BaseException:
        connection.close()
        raise
    return connection


def _forge(address: str, key_file: str | None, seed: int) -> None:
    """Send frames with errors in bytes, structure and values."""
    connection = _greeted(address, key_file)
    frames = iter(ClientFrames(seed, connection.incarnation, 49152))
    end = time.monotonic() + _ACT_S
    while time.monotonic() < end:
        with contextlib.suppress(zmq.Again):
            connection._socket.send_multipart(next(frames).frames, zmq.NOBLOCK)
        while connection._socket.poll(0):
            connection._socket.recv_multipart()
    connection.close()


def _never_read(address: str, key_file: str | None, seed: int) -> None:
    """Ask for large outputs and read none of them."""
    connection = _greeted(address, key_file)
    params = SamplingParams(max_tokens=300, ignore_eos=True, logprobs=20, seed=seed)
    for slot in range(_NUM_UNREAD):
        connection.send(wire.AddRequest(connection.incarnation, slot, f"unread-{slot}", wire.pack_ids([slot]), params))
    time.sleep(_ACT_S)
    connection.close()


async def _flood(llm: AsyncLLM, seed: int) -> None:
    """Send many requests at once, and drop them in the middle."""
    params = SamplingParams(max_tokens=200, ignore_eos=True, seed=seed, output_kind=RequestOutputKind.DELTA)
    streams = [
        asyncio.ensure_future(_consume(llm, f"Flood number {number} of {seed}", params))
        for number in range(_NUM_FLOODING)
    ]
    await asyncio.sleep(_ACT_S)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)


async def _consume(llm: AsyncLLM, prompt: str, params: SamplingParams) -> None:
    async for _ in llm.generate(prompt, params):
        pass


async def _command(llm: AsyncLLM) -> None:
    """Ask for what concerns all clients of the core."""
    for call in (llm.pause_generation, llm.sleep, llm.reset_prefix_cache, llm.start_profile):
        with contextlib.suppress(EngineError, PermissionError, ValueError):
            await asyncio.wait_for(call(), _ACT_S)


def main() -> None:
    """Play the acts in turn, for ever."""
    address, key_file, seed = sys.argv[1], sys.argv[2] or None, int(sys.argv[3])
    chance = random.Random(seed)

    async def through_engine() -> None:
        llm = await asyncio.to_thread(AsyncLLM.connect, address, key_file=key_file, timeout=_CONNECT_S)
        try:
            await _flood(llm, chance.randrange(2**32))
            await _command(llm)
        finally:
            llm.shutdown()

    for act in itertools.cycle((_forge, _never_read, None)):
        with contextlib.suppress(EngineError, OSError, zmq.ZMQError):
            if act is None:
                asyncio.run(through_engine())
            else:
                act(address, key_file, chance.randrange(2**32))


if __name__ == "__main__":
    main()
