"""Configurations of a core with ranks on two machines, both of which are this one."""

import msgspec

from vllm_mp import AsyncEngineArgs
from vllm_mp.config.nodes import prepare_node_0
from vllm_mp.testing.engines import free_tcp_address
from vllm_mp.testing.random_models import CONFIGS, save_config


def free_port():
    return int(free_tcp_address().rpartition(":")[2])


def node_configs(folder, **options):
    """Return the configurations of node 0 and of node 1, with two ranks each, and make their keys in `folder`."""
    model = CONFIGS["llama"]
    model = type(model)(**{**model.to_dict(), "num_attention_heads": 4})
    arguments = AsyncEngineArgs(
        str(save_config(model, folder / "llama")),
        tensor_parallel_size=4,
        nnodes=2,
        master_port=free_port(),
        node_key_file=str(folder / "core.key"),
        skip_tokenizer_init=True,
        load_format="dummy",
        **options,
    )
    config = arguments.create_engine_config()
    prepare_node_0(config)
    changes = {"node_rank": 1, "node_key_file": str(folder / "rank-host.key")}
    other = msgspec.structs.replace(config.parallel_config, **changes)
    return config, msgspec.structs.replace(config, parallel_config=other)
