"""A core process by itself: the failures that it survives, and its end after the others."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import msgspec
import pytest

from vllm_mp import AsyncEngineArgs, EngineStartError, SamplingParams, wire
from vllm_mp.client.cores.connection import CoreConnection
from vllm_mp.client.cores.sources.held_address import listen_at
from vllm_mp.core_link.core_launch import CoreLaunch
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.testing.random_models import CONFIGS, save_random_model

PROMPT = list(range(20, 40))
START = "import runpy\nrunpy.run_module('vllm_mp.core', run_name='__main__')\n"
FAIL = """
from vllm_mp.core.worker.model_runner import ModelRunner
import torch

def launch(self, step, batch, sampler):
    {failure}

ModelRunner.launch = launch
"""
HANG_WHEN_DESTROYED = """
import time
from vllm_mp.core.worker.model_runner import ModelRunner

class Graph:
    def __del__(self, sleep=time.sleep):
        sleep(1000)

def launch(self, step, batch, sampler):
    graph = Graph()
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

ModelRunner.launch = launch
"""
CHATTER = """
import logging, sys, warnings

def chatter():
    print("x" * 100_000, flush=True)
    sys.stderr.write("y\\n" * 10_000)
    warnings.warn("a warning")
    logging.getLogger("vllm_mp.core").error("an error")

from vllm_mp.core.ipc.request_handler import RequestHandler
receive = RequestHandler.receive
RequestHandler.receive = lambda self, admit: (chatter(), receive(self, admit))[1]
"""


class Core(NamedTuple):
    """A running core, and a client that it has welcomed."""

    process: subprocess.Popen
    client: CoreConnection
    welcome: wire.Welcome
    page: StatusPage

    def add(self, slot, max_tokens=8, **fields):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, seed=1, ignore_eos=True)
        self.client.send(wire.AddRequest(1, slot, f"request-{slot}", wire.pack_ids(PROMPT), params, **fields))

    def receive(self):
        while True:
            assert self.client._socket.poll(30_000), "the core did not answer within 30 s"
            message = wire.decode_core_message(self.client._socket.recv())
            if not isinstance(message, wire.StepOutput) or message.step:
                return message  # else a probe

    def answers(self, count):
        """Return the tokens of each slot, once `count` requests have finished."""
        tokens, ends = {}, []
        while len(ends) < count:
            output = self.receive()
            for slot, token, _ in zip(*wire.unpack_tokens(output), strict=True):
                tokens.setdefault(slot, []).append(token)
            ends += output.finished
        return tokens

    def end(self):
        """Close the core's standard input. Return its exit code."""
        self.process.stdin.close()
        return self.process.wait(30)


@contextlib.contextmanager
def core_process(output, before="", wrapper=(), popen=subprocess.Popen, inherited=()):
    """Run a core that waits for its launch line. Kill it at the end of the block."""
    command = [*wrapper, sys.executable, "-c", before + START]
    process = popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=inherited)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random_model(CONFIGS["llama"], path)
    return path


@pytest.fixture
def start(folder, tmp_path, core_template):
    """A function that starts cores. They are killed after the test.

    A core is forked from a process that has imported its modules, unless `imports` is true.
    """
    with contextlib.ExitStack() as stack:

        def start(before="", output=None, wrapper=(), imports=False):
            options = {"skip_tokenizer_init": True, "device": "cpu", "num_threads": 1, "check_invariants": True}
            args = AsyncEngineArgs(str(folder), dtype="float32", kv_cache_memory_bytes=2**22, **options)
            (tmp_path / "run").mkdir(exist_ok=True)
            path = tmp_path / "run" / "core.sock"
            listener = stack.enter_context(listen_at(path))
            launch = CoreLaunch(
                config=args.create_engine_config(),
                address=f"ipc://{path}",
                listener=listener.fileno(),
                incarnation=1,
                status_path=str(tmp_path / "page"),
                parent_pid=os.getpid(),
                operator_key=b"key",
            )
            output = output or stack.enter_context((tmp_path / "log").open("wb"))
            popen = subprocess.Popen if imports else core_template
            process = stack.enter_context(core_process(output, before, wrapper, popen, [listener.fileno()]))
            listener.close()
            process.stdin.write(msgspec.json.encode(launch) + b"\n")
            process.stdin.flush()
            client = stack.enter_context(contextlib.closing(CoreConnection(launch.address, operator_key=b"key")))

            def check():
                if process.poll() is not None:
                    raise EngineStartError((tmp_path / "log").read_text())

            welcome, _ = client.greet(60, check)
            return Core(process, client, welcome, StatusPage.open(tmp_path / "page"))

        yield start


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("raise ValueError('boom')", "ValueError: boom"),
        ("raise MemoryError", "MemoryError"),
        ("torch.empty(2**60)", "allocate"),
    ],
    ids=["ValueError", "MemoryError", "failed allocation"],
)
def test_exception_in_a_step_ends_the_core_and_its_requests_stay_on_the_status_page(start, tmp_path, failure, words):
    core = start(FAIL.format(failure=failure))
    core.add(3)
    assert core.process.wait(30) == 1
    log = (tmp_path / "log").read_text()
    assert "Traceback" in log
    assert words in log
    status = core.page.read()
    assert status.state == CoreState.STEPPING
    assert status.step_requests == [(core.welcome.client, 3, -len(PROMPT))]


def test_core_whose_device_failed_ends_without_releasing_device_objects(start, tmp_path):
    core = start(HANG_WHEN_DESTROYED)
    core.add(3)
    assert core.process.wait(30) == 1
    assert "illegal memory access" in (tmp_path / "log").read_text()
    assert core.page.read().step_requests == [(core.welcome.client, 3, -len(PROMPT))]


@pytest.mark.parametrize("kind", ["full", "closed", "broken"])
def test_core_serves_requests_while_its_log_cannot_be_written(start, kind):
    wrapper = ["sh", "-c", 'exec "$0" "$@" >&- 2>&-'] if kind == "closed" else []
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as broken, open("/dev/full", "wb") as full:
        core = start(CHATTER, output=broken if kind == "broken" else full, wrapper=wrapper)
    for slot in range(3):
        core.add(slot)
    assert sorted(core.answers(3)) == [0, 1, 2]
    assert core.end() == 0


def test_core_whose_socket_is_removed_with_its_folder_serves_connected_clients(start, tmp_path):
    core = start()
    shutil.rmtree(tmp_path / "run")
    core.add(0)
    assert len(core.answers(1)[0]) == 8
    assert core.end() == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert core.page.read().state == CoreState.STOPPED


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda signum: signum.name)
def test_core_ends_by_the_signal_that_stops_it(start, signum):
    core = start()
    core.add(0, max_tokens=1000)
    core.receive()
    core.process.send_signal(signum)
    assert core.process.wait(30) == -signum


def test_suspects_continue_at_their_output_position(start):
    core = start()
    core.add(0, max_tokens=12)
    (whole,) = core.answers(1).values()
    for slot in range(1, 5):
        core.add(
            slot,
            max_tokens=12,
            output=wire.pack_ids(whole[: 3 * slot - 3]),
            isolate_until_num_tokens=0 if slot == 3 else 3 * slot,
        )
    answers = core.answers(4)
    assert answers == {slot: whole[3 * slot - 3 :] for slot in range(1, 5)}


def test_failed_import_is_reported(start, tmp_path):
    with pytest.raises(EngineStartError, match="import of torch halted"):
        start("import sys\nsys.modules['torch'] = None\n", imports=True)
    assert "import of torch halted" in (tmp_path / "log").read_text()


def wait_for_heartbeats(page):
    """Wait for two heartbeats on the status page."""
    for _ in range(2):
        deadline, age = time.monotonic() + 30, page.read().heartbeat_age
        while (now := page.read().heartbeat_age) >= age:
            assert time.monotonic() < deadline, "no heartbeat within 30 s"
            age = now
            time.sleep(0.001)


def test_core_writes_heartbeats_while_idle_and_while_paused(start):
    core = start()
    wait_for_heartbeats(core.page)
    core.add(0, max_tokens=100)
    core.receive()
    core.client.send(wire.Call(1, 5, "pause", ["keep", False]))
    while not isinstance(core.receive(), wire.Reply):
        pass
    wait_for_heartbeats(core.page)
    assert core.page.read().state == CoreState.IDLE
    assert core.page.read().num_running == 1
