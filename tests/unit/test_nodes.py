"""The options of an engine on several machines, and its keys."""

import stat

import pytest

from vllm_mp import AsyncEngineArgs, AsyncLLM, cli
from vllm_mp.authorized_clients import AuthorizedClients
from vllm_mp.curve_keys import read_client_key, read_server_key
from vllm_mp.nodes import is_missing_node, missing_node, prepare_node_0
from vllm_mp.testing.random_models import CONFIGS, save_config

OPTIONS = {"skip_tokenizer_init": True, "load_format": "dummy"}


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
    options = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1", "node_key_file": str(file)}
    config = AsyncEngineArgs(model, **OPTIONS, **options).create_engine_config()
    text = prepare_node_0(config)
    assert f"vllm-mp engine --model {model} --nnodes 2 --node-rank 1 --headless --master-addr 127.0.0.1" in text
    key = read_client_key(file.with_name("rank-host.key"))
    assert str(file.with_name("rank-host.key")) in text
    assert key.server == read_server_key(file).public
    assert AuthorizedClients(file).read() == {"rank-host": key.public}
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    prepare_node_0(config)
    assert read_client_key(file.with_name("rank-host.key")) == key
