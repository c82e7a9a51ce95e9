"""What a core does about rank hosts of other machines that are strangers, join wrongly, hang or say rubbish."""

import contextlib
import re

import msgspec
import pytest
import zmq
from support.nodes import node_configs
from zmq.utils import z85

from vllm_mp import __version__
from vllm_mp.core.parallel.messages import PROTOCOL, Joined, Ready, shared_options
from vllm_mp.core.parallel.node_messages import ANSWER, MESSAGE, Answer, Beats, Hello, RanksFailed, Said, Started
from vllm_mp.core.parallel.node_ranks import NodeRanks
from vllm_mp.core.parallel.rank_state import WorkerFailedError
from vllm_mp.keys.curve_keys import read_client_key, read_server_key

DEEP = b"\x91" * 100_000 + b"\xc0"
"""Lists in lists, deeper than any decoder follows."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return node_configs(tmp_path_factory.mktemp("nodes"))[0]


@pytest.fixture
def core(config):
    ranks = NodeRanks(config, "tcp://127.0.0.1:1")
    yield ranks
    ranks.close()


class Host:
    """A peer of the core that says what a test wants."""

    def __init__(self, config, core, key=None):
        self._core = core
        parallel = config.parallel_config
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        key = key or read_client_key(f"{parallel.node_key_file.removesuffix('core.key')}rank-host.key")
        self.socket.curve_publickey, self.socket.curve_secretkey, self.socket.curve_serverkey = key
        self.socket.connect(f"tcp://{parallel.master_addr}:{parallel.master_port}")

    def say(self, *messages):
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def receive(self, timeout_s=10.0):
        """Let the core receive until it has sent something; return its frames, or None if it sends nothing."""
        for _ in range(int(timeout_s / 0.02)):
            self._core.receive()
            if self.socket.poll(20):
                return self.socket.recv_multipart()
        return None

    def answer(self):
        kind, answer = self.receive()
        assert kind == ANSWER
        return msgspec.msgpack.decode(answer, type=Answer)


@pytest.fixture
def connect(config, core):
    """A function that connects a peer; all are closed after the test."""
    hosts = []

    def connect(*messages, key=None):
        hosts.append(Host(config, core, key))
        hosts[-1].say(*messages)
        return hosts[-1]

    yield connect
    for host in hosts:
        host.socket.close()


def hello(config, **changes):
    fields = {
        "node": 1,
        "protocol": PROTOCOL,
        "package": __version__,
        "machine": "b",
        "options": shared_options(config),
    }
    return Hello(**{**fields, **changes})


def receive_until(core, condition):
    for _ in range(500):
        core.receive()
        if condition():
            return
        zmq.select(core.descriptors, [], [], 0.02)
    raise AssertionError("the condition did not become true")


def test_rank_host_with_the_same_options_joins_and_gets_messages(config, core, connect):
    host = connect(hello(config))
    assert host.answer().meeting_place == "tcp://127.0.0.1:1"
    joined = Joined(rank=3, protocol=PROTOCOL, package=__version__, digest="")
    host.say(
        Started(pids=[71, 72]), Said(rank=3, said=joined), Said(rank=3, said=Ready(rank=3)), Beats(num_beats=[5, 6])
    )
    receive_until(core, lambda: core.ranks[1].num_beats == 6)
    assert [state.name for state in core.ranks] == ["rank 2 (node 1, b, process 71)", "rank 3 (node 1, b, process 72)"]
    assert core.ranks[1].unread == [joined, Ready(rank=3)]
    assert core.machines == ["b"]
    core.write([b"one", b"two"], lambda: None)
    while (frames := host.receive())[0] != MESSAGE:
        pass
    assert frames == [MESSAGE, b"one", b"two"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 99}, "it has protocol 99 and version .*; install one version of vllm-mp"),
        ({"package": "9.9"}, "version 9.9, and the core has"),
        ({"node": 2}, "node_rank=2: the other machines have the numbers 1 to 1"),
        ({"options": {"max_model_len": 7}}, "other options than the core: .*dtype=None instead of 'auto'"),
    ],
)
def test_rank_host_that_cannot_join_is_told_why_and_the_core_waits_on(changes, reason, config, core, connect, caplog):
    refused = connect(hello(config, **changes)).answer()
    assert re.search(reason, refused.reason)
    assert f"a rank host is refused: {refused.reason}" in caplog.text
    assert connect(hello(config)).answer().meeting_place


def test_places_of_files_may_differ_from_machine_to_machine(config, core, connect):
    places = {"path": "/b/llama", "tokenizer": "/b/llama", "revision": "main", "download_dir": "/b"}
    model = msgspec.structs.replace(config.model_config, **places)
    other = msgspec.structs.replace(config, model_config=model)
    assert connect(hello(config, options=shared_options(other))).answer().meeting_place


def test_difference_of_options_is_named_with_both_values(config, core, connect):
    options = {**shared_options(config), "max_num_seqs": 7}
    assert "max_num_seqs=7 instead of 256" in connect(hello(config, options=options)).answer().reason


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\xc1",
        b"",
        Beats(num_beats=[1, 2]),
        msgspec.msgpack.encode({"type": "hello"}),
        b"\x82\xa4type\xa5hello\xa7machine\xa1\xff",
        b"\x82\xa4type\xa5hello\xa7options\x81\xa1x" + DEEP,
        msgspec.msgpack.encode({"type": "hello", "machine": "b" * 1000}),
    ],
    ids=["no message", "empty", "another message", "no fields", "not UTF-8", "deep", "long name"],
)
def test_rubbish_of_a_peer_that_has_not_joined_is_refused(rubbish, config, core, connect):
    assert "first" in connect(rubbish).answer().reason
    assert connect(hello(config)).answer().meeting_place


def test_flood_of_a_peer_fills_no_log_and_holds_up_no_step(config, core, connect, caplog, monkeypatch):
    answered, answer = [], core._answer
    monkeypatch.setattr(core, "_answer", lambda *args: answered.append(args) or answer(*args))
    flood = connect(*[b"\xc1"] * 500)
    while core._socket.poll(500):
        before = len(answered)
        core.receive()
        assert len(answered) - before <= 100
    assert len(answered) == 500
    assert caplog.text.count("a rank host is refused") == 64
    assert flood.answer().reason
    assert connect(hello(config)).answer().meeting_place


def test_number_of_a_machine_that_has_joined_is_refused(config, core, connect):
    assert connect(hello(config)).answer().meeting_place
    assert "node_rank=1 is taken by the machine b" in connect(hello(config, machine="c")).answer().reason


def test_stranger_without_an_authorized_key_gets_no_word_through(config, core, connect, caplog):
    public, secret = map(z85.decode, zmq.curve_keypair())
    server = read_server_key(config.parallel_config.node_key_file).public
    stranger = connect(key=(public, secret, server))
    with contextlib.suppress(zmq.Again):  # raised if the core has refused the stranger by now
        stranger.socket.send(msgspec.msgpack.encode(hello(config)), zmq.DONTWAIT)
    receive_until(core, lambda: "is refused; see `vllm-mp keys allow`" in caplog.text)
    assert connect(hello(config)).answer().meeting_place
    assert not stranger.socket.poll(0)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\xc1",
        Beats(num_beats=[1]),
        Started(pids=[]),
        Said(rank=1, said=Ready(rank=1)),
        "a second Hello",
        b"\x82\xa4type\xacranks_failed\xa5error\xa1\xff",
        b"\x83\xa4type\xa4said\xa4rank\x02\xa4said\x83\xa4type\xa5reply\xa6number\x01\xa6result" + DEEP,
    ],
    ids=["no message", "missing beats", "missing ranks", "other rank", "a second Hello", "not UTF-8", "deep"],
)
def test_rank_host_that_says_rubbish_is_the_end(rubbish, config, core, connect):
    host = connect(hello(config))
    host.answer()
    host.say(hello(config) if isinstance(rubbish, str) else rubbish)
    with pytest.raises(WorkerFailedError, match=r"node 1 \(b\) says what no rank host says"):
        receive_until(core, lambda: False)


def test_rank_that_says_more_than_it_was_asked_is_the_end(config, core, connect):
    host = connect(hello(config))
    host.answer()
    host.say(*[Said(rank=3, said=Ready(rank=3))] * 100)
    with pytest.raises(WorkerFailedError, match=r"rank 3 \(node 1, b\) says more than it was asked: Ready"):
        receive_until(core, lambda: False)


def test_failure_of_ranks_is_the_end_with_its_cause(config, core, connect):
    host = connect(hello(config))
    host.answer()
    host.say(RanksFailed(error="rank 2 (process 7) ended with signal SIGKILL", is_mistake=False, outside_signal=9))
    with pytest.raises(
        WorkerFailedError, match=r"node 1 \(b\): rank 2 \(process 7\) ended with signal SIGKILL"
    ) as raised:
        receive_until(core, lambda: False)
    assert raised.value.outside_signal == 9


def test_rank_host_that_goes_is_the_end(config, core, connect):
    host = connect(hello(config))
    host.answer()
    host.socket.close()
    with pytest.raises(WorkerFailedError, match=r"the rank host of node 1 \(b\) has gone"):
        receive_until(core, lambda: False)


def test_silent_rank_host_is_the_end(config, connect, core):
    core._silence_s = 0.2
    connect(hello(config)).answer()
    with pytest.raises(WorkerFailedError, match=r"the rank host of node 1 \(b\) has said nothing for 0.2 s"):
        receive_until(core, lambda: False)


def test_missing_machine_is_named_with_the_command_to_run_there(core):
    core._deadline = 0.0
    command = "vllm-mp engine --model .* --nnodes 2 --node-rank 1 --headless --master-addr 127.0.0.1 --master-port"
    with pytest.raises(ValueError, match=rf"node 1 has not joined, after .*: on its machine run `{command}"):
        core.receive()


def test_port_that_is_in_use_is_an_error_with_the_remedy(config, core):
    with pytest.raises(ValueError, match=r"cannot listen on tcp://127.0.0.1:.* free port as master_port"):
        NodeRanks(config, "")
