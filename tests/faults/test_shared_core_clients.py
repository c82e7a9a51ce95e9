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

from vllm_mp import (
    AsyncEngineArgs,
    AsyncLLM,
    EngineDeadError,
    EngineGenerateError,
    RequestOutputKind,
    SamplingParams,
)
from vllm_mp.client.cores.sources.held_address import HeldAddress, listen_at
from vllm_mp.core_link.core_launch import CoreLaunch
from vllm_mp.testing.engines import answer, eventually, greedy, make_keys, replay_core, rest, standalone_core
from vllm_mp.testing.random_models import CONFIGS, save_random_model

pytestmark = pytest.mark.usefixtures("forked_programs")

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

    def __init__(self, address, reconnect_timeout=60.0, key_file=None):
        self.engine = AsyncLLM.connect(address, reconnect_timeout=reconnect_timeout, key_file=key_file)

    def close(self):
        self.engine.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random_model(CONFIGS["llama"], path)
    return path


@contextlib.contextmanager
def shared_core(folder, tmp_path, before):
    """Run a shared core in a process that first executes `before`; yield its address. Kill it at the end."""
    options = {"skip_tokenizer_init": True, "device": "cpu", "num_threads": 1, "check_invariants": True}
    args = AsyncEngineArgs(str(folder), dtype="float32", kv_cache_memory_bytes=2**22, **options)
    path = tmp_path / "parent.sock"
    with contextlib.closing(HeldAddress(f"ipc://{tmp_path}/core.sock")) as held, listen_at(path) as listener:
        launch = CoreLaunch(
            config=args.create_engine_config(),
            address=f"ipc://{path}",
            listener=listener.fileno(),
            incarnation=1,
            status_path=None,
            parent_pid=os.getpid(),
            public=held.public_address(),
        )
        code = before + "\nimport runpy\nrunpy.run_module('vllm_mp.core', run_name='__main__')\n"
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=[listener.fileno(), *held.descriptors]
        )
        try:
            process.stdin.write(msgspec.json.encode(launch) + b"\n")
            process.stdin.flush()
            yield held.address
        finally:
            process.kill()
            process.communicate()


def test_streams_of_a_client_that_was_dropped_for_not_reading_go_on_when_it_reads_again(folder, tmp_path, caplog):
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=20)
    prompts = [[number, 7, 9] for number in range(3, 19)]

    def tokens_of(outputs):
        return [output.outputs[0].token_ids for output in outputs]

    with contextlib.ExitStack() as stack:
        address = stack.enter_context(shared_core(folder, tmp_path, LIMIT_UNREAD))
        engine = stack.enter_context(contextlib.closing(Client(address))).engine

        async def run():
            expected = await asyncio.gather(*(answer(engine, prompt, params) for prompt in prompts))
            first = engine.cores.first.supervisor.core
            tasks = [asyncio.create_task(answer(engine, prompt, params)) for prompt in prompts]
            await eventually(lambda: _all_are_sent(engine, len(prompts)))
            _block_until(lambda: engine.cores.first.supervisor.core is not first)
            outputs = await asyncio.gather(*tasks)
            assert tokens_of(outputs) == tokens_of(expected)
            assert all(len(output.outputs[0].logprobs) == 100 for output in outputs)
            assert (await engine.core_status())["num_clients"] == 1

        with caplog.at_level(logging.WARNING):
            asyncio.run(run())
    assert "the core had dropped this client: it had not read" in caplog.text


def _block_until(condition):
    """Block the event loop, so that no message is read, until `condition()` is true."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def _all_are_sent(engine, count):
    return len(engine.cores.first.requests.live()) == count


FLAGS = (
    *("--skip-tokenizer-init", "--max-model-len", "128", "--kv-cache-memory-bytes", str(2**22), "--num-threads", "1"),
    *("--fault-injection", "slow@step=*,seconds=0.02; segv@request=poison", "--max-core-restarts", "5"),
)
"""Flags of a core that a request whose id contains "poison" kills, and whose streams last for some deaths."""


@contextlib.contextmanager
def engine_over_tcp(model, tmp_path):
    """Run `vllm-mp engine` over TCP; yield the arguments with which clients connect."""
    server_key, client_key = make_keys(tmp_path)
    log_path = tmp_path / "log"
    with (
        log_path.open("wb") as log,
        standalone_core(model, "tcp://127.0.0.1:0", *FLAGS, "--key-file", server_key, stderr=log) as process,
    ):
        while "listening on" not in (text := log_path.read_text()):
            assert process.poll() is None, text
            time.sleep(0.05)
        yield {"address": text.split("listening on ")[1].split()[0], "key_file": client_key}


@pytest.mark.slow
def test_poison_request_over_tcp_fails_alone_and_the_streams_of_other_clients_complete(folder, tmp_path):
    prompt = {"prompt_token_ids": list(range(20, 40))}
    with engine_over_tcp(folder, tmp_path) as arguments, contextlib.ExitStack() as stack:
        hostile, innocent = [stack.enter_context(contextlib.closing(Client(**arguments))).engine for _ in range(2)]

        async def run():
            expected = await answer(innocent, prompt, greedy(80, ignore_eos=True))
            stream = asyncio.create_task(answer(innocent, prompt, greedy(80, ignore_eos=True)))
            with pytest.raises(EngineGenerateError, match="SIGSEGV"):
                await answer(hostile, prompt, greedy(80), "poison")
            assert (await stream).outputs[0].token_ids == expected.outputs[0].token_ids
            assert (await innocent.core_status())["restarts"] <= 4
            for number in range(3):
                assert (await answer(innocent, prompt, greedy(9, ignore_eos=True))).finished
                with pytest.raises(EngineGenerateError, match="SIGSEGV"):
                    await answer(hostile, {"prompt_token_ids": [number, 9]}, greedy(80), f"poison {number}")
            assert (await innocent.core_status())["restarts"] > 5, "deaths with a culprit do not count"

        asyncio.run(asyncio.wait_for(run(), 250))
