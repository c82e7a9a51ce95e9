"""Clients of a shared core: those that lose it find it again, and those that harm it lose their connection."""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time

import msgspec
import pytest

from vllm_mp import AsyncEngineArgs, AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams
from vllm_mp.core_launch import CoreLaunch
from vllm_mp.testing.engines import answer, eventually, greedy, replay_core, rest
from vllm_mp.testing.random_models import CONFIGS, save_random_model

LONG = SamplingParams(max_tokens=10_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
LIMIT_UNREAD = """
from vllm_mp.core.ipc import clients
clients._MAX_UNREAD_BYTES = 2**17
"""


def test_client_that_lost_its_core_fails_live_streams_and_finds_the_next_core(default_model, tmp_path):
    with contextlib.ExitStack() as stack:
        core = stack.enter_context(contextlib.ExitStack())
        address = core.enter_context(replay_core(tmp_path, "--rate", "100"))
        hasty, patient = [
            stack.enter_context(contextlib.closing(Client(address, timeout))).engine for timeout in (0.5, 60)
        ]

        async def run():
            stream = hasty.generate([1, 2, 3], LONG)
            await anext(stream)
            core.close()
            with pytest.raises(EngineDeadError, match="connection"):
                await rest(stream)
            with pytest.raises(EngineDeadError, match="no core answers"):
                await answer(hasty, [1, 2, 3], greedy(3))
            assert hasty.is_running
            assert not hasty.errored
            waiting = asyncio.create_task(answer(patient, [1, 2, 3], greedy(3)))
            await eventually(lambda: _is_waiting(patient))
            core.enter_context(replay_core(tmp_path, "--rate", "100"))
            assert (await waiting).finished
            await eventually(lambda: _is_answered(hasty))

        asyncio.run(run())


async def _is_waiting(engine):
    return await engine.get_num_unfinished_requests() == 1


async def _is_answered(engine):
    with contextlib.suppress(EngineDeadError):
        return (await answer(engine, [1, 2, 3], greedy(3))).finished


class Client:
    """A connected engine that `close` shuts down."""

    def __init__(self, address, reconnect_timeout=60.0):
        self.engine = AsyncLLM.connect(address, reconnect_timeout=reconnect_timeout)

    def close(self):
        self.engine.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random_model(CONFIGS["llama"], path)
    return path


@contextlib.contextmanager
def shared_core(folder, address, before):
    """Run a shared core in a process that first executes `before`. Kill it at the end of the block."""
    options = {"skip_tokenizer_init": True, "device": "cpu", "num_threads": 1, "check_invariants": True}
    args = AsyncEngineArgs(str(folder), dtype="float32", kv_cache_memory_bytes=2**22, **options)
    launch = CoreLaunch(
        config=args.create_engine_config(),
        address=address,
        incarnation=1,
        status_path=None,
        supervised=True,
        is_shared=True,
        parent_pid=os.getpid(),
    )
    code = before + "\nimport runpy\nrunpy.run_module('vllm_mp.core', run_name='__main__')\n"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_streams_of_a_client_that_was_dropped_for_not_reading_go_on_when_it_reads_again(folder, tmp_path, caplog):
    address = f"ipc://{tmp_path}/core.sock"
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=20)
    prompts = [[number, 7, 9] for number in range(3, 19)]

    def tokens_of(outputs):
        return [output.outputs[0].token_ids for output in outputs]

    with shared_core(folder, address, LIMIT_UNREAD), contextlib.closing(Client(address)) as client:
        engine = client.engine

        async def run():
            expected = await asyncio.gather(*(answer(engine, prompt, params) for prompt in prompts))
            first = engine._supervisor.core
            tasks = [asyncio.create_task(answer(engine, prompt, params)) for prompt in prompts]
            await eventually(lambda: _all_are_sent(engine, len(prompts)))
            _block_until(lambda: engine._supervisor.core is not first)
            outputs = await asyncio.gather(*tasks)
            assert tokens_of(outputs) == tokens_of(expected)
            assert all(len(output.outputs[0].logprobs) == 100 for output in outputs)
            assert (await engine.core_status())["num_clients"] == 1

        with caplog.at_level(logging.WARNING):
            asyncio.run(run())
    assert "the core had dropped this client: it had not read" in caplog.text


def _block_until(condition):
    """Block the event loop, so that no message is read, until `condition()` is true."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def _all_are_sent(engine, count):
    return len(engine._requests.live()) == count
