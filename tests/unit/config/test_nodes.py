"""The options of an engine on several machines, and its keys."""

import socket
import stat
import threading

import pytest
from support.nodes import free_port

from vllm_mp import AsyncEngineArgs, AsyncLLM, cli
from vllm_mp.client.cores.sources.process import CoreProcess
from vllm_mp.config import nodes
from vllm_mp.config.nodes import is_missing_node, missing_node, prepare_node_0
from vllm_mp.keys.authorized_clients import AuthorizedClients
from vllm_mp.keys.curve_keys import make_server_key, read_client_key, read_server_key
from vllm_mp.testing.random_models import CONFIGS, save_config

OPTIONS = {"skip_tokenizer_init": True, "load_format": "dummy"}
NODE_0 = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": free_port()}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_config(CONFIGS["llama"], tmp_path_factory.mktemp("model") / "llama"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"nnodes": 4, "tensor_parallel_size": 6},
            "nnodes=4: .*=6 make 6 ranks, .* choose a divisor",
        ),
        ({"nnodes": 2, "node_rank": 2, "tensor_parallel_size": 2}, "node_rank=2: .* have the numbers 0 to 1"),
        ({"node_rank": 1}, "node_rank=1: nnodes=1"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "data_parallel_size=2 with nnodes=2"),
        (
            {"nnodes": 2, "tensor_parallel_size": 2, "engine_iteration_timeout_s": 1.0},
            "engine_iteration_timeout_s=1 is too short for nnodes=2, .* set it to at least 2",
        ),
        ({"engine_use_ray": True, "node_rank": 1}, "node_rank=1 is not served on Ray"),
        ({"engine_use_ray": True, "master_addr": "10.0.0.1"}, r"master_addr='10\.0\.0\.1' is not served on Ray"),
    ],
)
def test_options_that_contradict_each_other_are_refused_by_name(options, message, model):
    with pytest.raises(ValueError, match=message):
        AsyncEngineArgs(model, **OPTIONS, **options).create_engine_config()


def test_engine_on_another_node_than_0_is_refused_with_the_remedy(model):
    args = AsyncEngineArgs(model, **OPTIONS, tensor_parallel_size=2, nnodes=2, node_rank=1)
    with pytest.raises(ValueError, match="node_rank=1: the engine is on node 0; run `vllm-mp engine --headless`"):
        AsyncLLM.from_engine_args(args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--headless"], "--headless needs --nnodes, and --node-rank from 1 on"),
        (["--headless", "--key-file", "/x"], "--key-file /x has no effect with --headless, .* with --node-key-file"),
        (["--headless", "--operator-key-file", "/x"], "--operator-key-file /x has no effect with --headless"),
        (
            ["--headless", "--nnodes", "2", "--node-rank", "1", "--node-key-file", "/x"],
            "this machine has no key: ",
        ),
    ],
)
def test_command_that_makes_no_rank_host_is_refused(flags, message, model):
    command = [
        "engine",
        "--model",
        model,
        "--skip-tokenizer-init",
        "--load-format",
        "dummy",
        "--tensor-parallel-size",
        "2",
        *flags,
    ]
    args = cli.parser().parse_args(command)
    with pytest.raises(ValueError, match=message):
        args.run(args)


def test_missing_node_of_a_ray_cluster_is_not_for_a_person_to_start(model):
    args = AsyncEngineArgs(model, **OPTIONS, tensor_parallel_size=2, nnodes=2, engine_use_ray=True)
    text = missing_node(args.create_engine_config(), 1, 5.0)
    assert text.startswith("node 1 has not joined, after 5 s: its log is in Ray's log folder on its machine")
    assert is_missing_node(text)


def test_node_0_makes_keys_once_and_names_the_command_for_the_other_machine(model, tmp_path):
    file = tmp_path / "nodes" / "core.key"
    options = {**NODE_0, "node_key_file": str(file)}
    config = AsyncEngineArgs(model, **OPTIONS, **options).create_engine_config()
    text = prepare_node_0(config)
    assert f"vllm-mp engine --model {model} --nnodes 2 --node-rank 1 --headless --master-addr 127.0.0.1" in text
    assert "node 1 (this one, because no other reaches master_addr='127.0.0.1')" in text
    key = read_client_key(file.with_name("rank-host.key"))
    assert str(file.with_name("rank-host.key")) in text
    assert key.server == read_server_key(file).public
    assert AuthorizedClients(file).read() == {"rank-host": key.public}
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    prepare_node_0(config)
    assert read_client_key(file.with_name("rank-host.key")) == key


@pytest.fixture
def refusal(model, tmp_path, monkeypatch):
    """A function that returns the error of an engine with these options, which must start no process."""

    def start_process(*args, **options):
        raise AssertionError("a core was started")

    monkeypatch.setattr(CoreProcess, "__init__", start_process)

    def refusal(**options):
        options = {**NODE_0, "node_key_file": str(tmp_path / "core.key"), **options}
        with pytest.raises(ValueError) as refused:
            AsyncLLM.from_engine_args(AsyncEngineArgs(model, **OPTIONS, **options))
        return str(refused.value)

    return refusal


def test_address_or_port_that_node_0_cannot_use_is_refused_before_a_core_starts(refusal, monkeypatch):
    monkeypatch.setattr(nodes, "_ORPHAN_TIMEOUT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        in_use = f"master_port={port}: cannot listen on 127.0.0.1:{port}: Address already in use; give a free port"
        assert refusal(master_port=port) == in_use
    # An address of TEST-NET-1, which no machine has (RFC 5737).
    for address in ("192.0.2.1", "0.0.0.0", ""):
        refused = f"master_addr='{address}' is no address of this machine; give the one at which the other machines"
        assert refused in refusal(master_addr=address)
    assert "master_addr='no.such.invalid' has no IPv4 address" in refusal(master_addr="no.such.invalid")


def test_port_that_the_core_of_a_killed_engine_still_holds_is_waited_for(model, tmp_path):
    config = AsyncEngineArgs(
        model, **OPTIONS, **NODE_0, node_key_file=str(tmp_path / "core.key")
    ).create_engine_config()
    orphan = socket.create_server((NODE_0["master_addr"], NODE_0["master_port"]))
    threading.Timer(0.3, orphan.close).start()
    assert prepare_node_0(config)


def test_key_file_that_node_0_cannot_use_is_refused_before_a_core_starts(refusal, tmp_path):
    file = tmp_path / "bad.key"
    file.write_text("server-public x\nserver-secret x\n")
    file.chmod(0o600)
    assert f"node_key_file='{file}': key file {file} is damaged: 'x' is not a key" in refusal(node_key_file=str(file))
    file.chmod(0o644)
    assert f"run: chmod 600 {file}" in refusal(node_key_file=str(file))
    (tmp_path / "core.key.clients").write_text("rank-host no-key\n")
    assert "core.key.clients is not NAME PUBLIC-KEY" in refusal()
    (tmp_path / "core.key.clients").write_bytes(b"\xff")
    assert "core.key.clients is not a text file" in refusal()
    (tmp_path / "file").touch()
    assert "choose a folder that you may write to" in refusal(node_key_file=str(tmp_path / "file" / "core.key"))
    taken = str(tmp_path / "rank-host.key")
    assert f"node_key_file='{taken}': node 0 gives this name to the key of the other" in refusal(node_key_file=taken)


def test_key_of_the_other_machines_is_made_if_the_first_attempt_was_cut_short(model, tmp_path):
    file = tmp_path / "core.key"
    config = AsyncEngineArgs(model, **OPTIONS, **NODE_0, node_key_file=str(file)).create_engine_config()
    server = make_server_key(file)
    prepare_node_0(config)
    key = read_client_key(tmp_path / "rank-host.key")
    assert key.server == server.public
    assert AuthorizedClients(file).read() == {"rank-host": key.public}
