"""What a machine without a core does: it runs ranks for one core after another, and leaves none behind."""

import contextlib
import socket
import subprocess
import sys
import threading

import msgspec
import psutil
import pytest
import zmq
from support.nodes import node_configs

from vllm_mp.core.parallel import worker_processes
from vllm_mp.core.parallel.messages import Reply
from vllm_mp.core.parallel.node_messages import ANSWER
from vllm_mp.core.parallel.node_ranks import NodeRanks
from vllm_mp.core.parallel.rank_host import RankHost, RefusedError
from vllm_mp.core.parallel.rank_state import WorkerFailedError
from vllm_mp.keys.curve_keys import make_client_key, make_server_key, read_client_key

RANK = """
import json, mmap, socket, sys
import msgspec
from vllm_mp.core.parallel.ring import MessageRing
launch = json.loads(sys.stdin.readline())
rank, says = launch["rank"], socket.socket(fileno=launch["socket"])
ring = MessageRing(mmap.mmap(launch["memory"], 0), 0, 3, launch["layout"]["message_slot"])
while (message := ring.read(rank - 1, launch["event"], [says.fileno()])) is not None:
    if message == b"end":
        sys.exit(3)
    result = [message.decode(), launch["meeting_place"]]
    says.sendall(msgspec.msgpack.encode({"type": "reply", "number": rank, "result": result}))
"""
"""The program of a rank that repeats each message, and ends at `end`."""
POPEN = subprocess.Popen


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    return node_configs(tmp_path_factory.mktemp("nodes"), start_timeout_s=20.0)


@pytest.fixture(autouse=True)
def ranks_repeat_messages(monkeypatch):
    monkeypatch.setattr(
        worker_processes.subprocess, "Popen", lambda command, **options: POPEN([sys.executable, "-c", RANK], **options)
    )


class Serving:
    """A rank host that serves some cores in a thread."""

    def __init__(self, config, num_cores=1):
        self.error = None
        self._host = RankHost(config)
        self._thread = threading.Thread(target=self._serve, args=(num_cores,))
        self._thread.start()

    def _serve(self, num_cores):
        try:
            for _ in range(num_cores):
                self._host.serve_next_core()
        except Exception as error:
            self.error = error

    def join(self):
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.error


def receive_until(core, condition):
    for _ in range(1500):
        core.receive()
        if condition():
            return
        zmq.select(core.descriptors, [], [], 0.02)
    raise AssertionError("the condition did not become true")


def replies(core):
    receive_until(core, lambda: all(state.unread for state in core.ranks))
    return [state.unread.pop(0) for state in core.ranks]


def test_ranks_get_messages_and_answer_for_one_core_after_another(configs):
    own, other = configs
    with contextlib.closing(NodeRanks(own, "first")) as core:
        serving = Serving(other, num_cores=2)
        receive_until(core, lambda: core.ranks[1].pid)
        pids = [state.pid for state in core.ranks]
        for text in ("one", "two"):
            core.write([b"", text.encode()], lambda: None)
            assert replies(core) == [Reply(number=rank, result=[text, "first"]) for rank in (2, 3)]
    with contextlib.closing(NodeRanks(own, "second")) as core:
        receive_until(core, lambda: core.ranks[1].pid)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        core.write([b"three"], lambda: None)
        assert replies(core) == [Reply(number=rank, result=["three", "second"]) for rank in (2, 3)]
        pids = [state.pid for state in core.ranks]
    assert serving.join() is None
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_end_of_a_rank_is_told_and_ends_the_others(configs):
    own, other = configs
    with contextlib.closing(NodeRanks(own, "")) as core:
        serving = Serving(other)
        receive_until(core, lambda: core.ranks[1].pid)
        pids = [state.pid for state in core.ranks]
        core.write([b"end"], lambda: None)
        with pytest.raises(WorkerFailedError, match=r"node 1 .*: rank [23] \(process \d+\) ended with exit code 3"):
            receive_until(core, lambda: False)
    assert serving.join() is None
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_refused_machine_ends_with_the_reason(configs):
    own, other = configs
    cache = msgspec.structs.replace(other.cache_config, block_size=32)
    with contextlib.closing(NodeRanks(own, "")) as core:
        serving = Serving(msgspec.structs.replace(other, cache_config=cache))
        receive_until(core, lambda: serving.error)
    with pytest.raises(RefusedError, match="block_size=32 instead of 16"):
        raise serving.join()


@pytest.mark.parametrize("rubbish", [b"\xc1", b"\x82\xa4type\xa7refused\xa6reason\xa1\xff", b"\x91" * 100_000])
def test_machine_ends_when_the_core_answers_what_no_core_answers(rubbish, configs, monkeypatch):
    def answer(self, identity, answer):
        self._socket.send_multipart([identity, ANSWER, rubbish])

    monkeypatch.setattr(NodeRanks, "_answer", answer)
    own, other = configs
    with contextlib.closing(NodeRanks(own, "")) as core:
        serving = Serving(other)
        receive_until(core, lambda: serving.error)
    with pytest.raises(RefusedError, match=r"answers what no core answers: .* install one version of vllm-mp"):
        raise serving.join()


def test_machine_whose_key_is_unknown_ends_with_the_remedy(configs, tmp_path):
    own, other = configs
    server = read_client_key(other.parallel_config.node_key_file).server
    make_client_key(tmp_path / "stranger.key", server)
    parallel = msgspec.structs.replace(other.parallel_config, node_key_file=str(tmp_path / "stranger.key"))
    with contextlib.closing(NodeRanks(own, "")), pytest.raises(RefusedError, match="does not know the key of this"):
        RankHost(msgspec.structs.replace(other, parallel_config=parallel)).serve_next_core()


def test_machine_without_a_core_ends(configs):
    _, other = configs
    limits = msgspec.structs.replace(other.liveness_config, start_timeout_s=0.3)
    with pytest.raises(RefusedError, match=r"no core at tcp://.* has taken this machine for start_timeout_s=0.3 s"):
        RankHost(msgspec.structs.replace(other, liveness_config=limits)).serve_next_core()


def test_machine_joins_a_core_that_follows_another_program_at_its_address(configs):
    own, other = configs
    parallel = own.parallel_config
    with socket.create_server((parallel.master_addr, parallel.master_port)) as listener:
        serving = Serving(other)
        for _ in range(2):
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 503 No\r\n\r\n")
                with contextlib.suppress(ConnectionResetError):
                    while peer.recv(4096):
                        pass
    with contextlib.closing(NodeRanks(own, "")) as core:
        receive_until(core, lambda: core.ranks[1].pid)
    assert serving.join() is None


def test_machine_with_the_key_for_another_core_says_so(configs, tmp_path):
    own, other = configs
    make_client_key(tmp_path / "other.key", make_server_key(tmp_path / "server.key").public)
    parallel = msgspec.structs.replace(other.parallel_config, node_key_file=str(tmp_path / "other.key"))
    limits = msgspec.structs.replace(other.liveness_config, start_timeout_s=1.0)
    config = msgspec.structs.replace(other, parallel_config=parallel, liveness_config=limits)
    with contextlib.closing(NodeRanks(own, "")), pytest.raises(RefusedError, match="made with that core's public key"):
        RankHost(config).serve_next_core()


def test_rank_host_that_follows_its_parent_ends_when_its_standard_input_does(configs):
    command = [sys.executable, "-P", "-m", "vllm_mp.core", "--rank-host", "--follow-parent"]
    process = POPEN(command, stdin=subprocess.PIPE)
    try:
        process.stdin.write(msgspec.json.encode(configs[1]) + b"\n")
        process.stdin.close()
        assert process.wait(20) == 0
    finally:
        process.kill()
