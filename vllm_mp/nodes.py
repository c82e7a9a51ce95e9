"""The machines that the ranks of one core are shared out to, called nodes: their options, addresses and keys."""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm_mp.config import ParallelConfig, VllmConfig
from vllm_mp.model_store import cache_root

if TYPE_CHECKING:
    from vllm_mp.engine_args import EngineArgs

SERVER_KEY, HOST_KEY = "core.key", "rank-host.key"
"""The names of the key files of node 0 and of the other machines."""
_IS_MISSING: Final = "has not joined, after"


def check_nodes(args: "EngineArgs", uses_ray: bool) -> None:
    """Raise ValueError, naming the option, if the ranks cannot be shared out to the machines as `args` say.

    `uses_ray`: Ray chooses the machines.
    """
    num_ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    if num_ranks % args.nnodes:
        sizes = f"tensor_parallel_size={args.tensor_parallel_size}"
        if args.pipeline_parallel_size > 1:
            sizes += f" and pipeline_parallel_size={args.pipeline_parallel_size}"
        raise ValueError(
            f"nnodes={args.nnodes}: {sizes} make {num_ranks} ranks, which {args.nnodes} machines cannot share equally; "
            "choose a divisor"
        )
    if args.node_rank >= args.nnodes:
        raise ValueError(
            f"node_rank={args.node_rank}: nnodes={args.nnodes} machines have the numbers 0 to {args.nnodes - 1}; give "
            "one of them"
        )
    if args.nnodes > 1 and args.data_parallel_size > 1 and not uses_ray:
        raise ValueError(
            f"data_parallel_size={args.data_parallel_size} with nnodes={args.nnodes}: an engine on several machines "
            "has one core; run `vllm-mp engine` once for each core, and give clients all addresses, or give "
            "data_parallel_backend='ray'"
        )


def node_key_file(args: "EngineArgs") -> str:
    """Return the path of the key file of this machine; empty if the ranks are on one machine."""
    if args.nnodes == 1:
        return ""
    return args.node_key_file or str(node_folder() / (HOST_KEY if args.node_rank else SERVER_KEY))


def node_folder() -> Path:
    """Return the folder of the key files that no option names."""
    return cache_root() / "nodes"


def ip_address(host: str) -> str:
    """Return the IPv4 address of `host`. Raises ValueError if it has none."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(
            f"master_addr={host!r} has no IPv4 address: {error}; give the address of the machine of node 0"
        ) from error


def rank_host_key(parallel: ParallelConfig) -> Path:
    """Return the path, beside the key of node 0, of the key that the other machines need."""
    return Path(parallel.node_key_file).with_name(HOST_KEY)


def prepare_node_0(config: VllmConfig) -> str:
    """Make the keys of the machines unless there are some, and return what to do on the other machines.

    Raises ValueError, with the remedy, if this is not node 0, or if the keys cannot be made.
    """
    parallel = config.parallel_config
    if parallel.node_rank:
        raise ValueError(
            f"node_rank={parallel.node_rank}: the engine is on node 0; run `vllm-mp engine --headless` or `vllm-mp "
            "serve --headless` on this machine"
        )
    file = Path(parallel.node_key_file)
    if not file.exists():
        # Imported here, because this module is imported for the help of commands too.
        from vllm_mp.authorized_clients import AuthorizedClients
        from vllm_mp.curve_keys import make_client_key, make_server_key

        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        server = make_server_key(file)
        AuthorizedClients(file).allow("rank-host", make_client_key(rank_host_key(parallel), server.public).public)
    numbers = "1" if parallel.nnodes == 2 else f"K from 1 to {parallel.nnodes - 1}"
    return f"on the machine of node {numbers}, {what_to_run(config, numbers.partition(' ')[0])}"


def missing_node(config: VllmConfig, number: int, seconds: float) -> str:
    """Say that no rank host of a node has come for some seconds, and what to do."""
    remedy = (
        "its log is in Ray's log folder on its machine, which must reach "
        f"{config.parallel_config.master_addr}:{config.parallel_config.master_port}"
        if config.parallel_config.data_parallel_backend == "ray"
        else f"on its machine {what_to_run(config, str(number))}"
    )
    return f"node {number} {_IS_MISSING} {seconds:g} s: {remedy}"


def is_missing_node(error: str) -> bool:
    """Return whether `error` is, or quotes, what `missing_node` says."""
    return _IS_MISSING in error


def what_to_run(config: VllmConfig, number: str) -> str:
    """Return how to run the rank host of the machine with this number."""
    parallel = config.parallel_config
    return (
        f"run `vllm-mp engine --model {config.model_config.model} --nnodes {parallel.nnodes} --node-rank {number} "
        f"--headless --master-addr {parallel.master_addr} --master-port {parallel.master_port}` with all other options "
        f"of this engine, and with a copy of the key file {rank_host_key(parallel)} at {_shown_default()} there, or "
        "wherever --node-key-file names it"
    )


def _shown_default() -> str:
    """Return the default path of the key of a rank host, with ~ for the home of the user."""
    path, home = str(node_folder() / HOST_KEY), os.path.expanduser("~")
    return path.replace(home, "~", 1) if path.startswith(f"{home}/") else path
