"""The machines that the ranks of one core are shared out to, called nodes: their options, addresses and keys."""

import errno
import os
import socket
import time
from pathlib import Path
from typing import Final

from vllm_mp.config import ParallelConfig, VllmConfig
from vllm_mp.config.engine_options import EngineOptions
from vllm_mp.model_store import cache_root

SERVER_KEY, HOST_KEY = "core.key", "rank-host.key"
"""The names of the key files of node 0 and of the other machines."""
_ORPHAN_TIMEOUT_S: Final = 6.0
"""Time that the core of an engine that was killed has to end."""
_ORPHAN_POLL_S: Final = 0.1
_ALL_ADDRESSES: Final = "0.0.0.0"
_IS_MISSING: Final = "has not joined, after"


def check_nodes(args: EngineOptions, uses_ray: bool) -> None:
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


def node_key_file(args: EngineOptions) -> str:
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

    Raises ValueError, naming the option and the remedy, if this is not node 0, if its core could not listen at
    `master_addr` and `master_port`, or if keys cannot be made or read.
    """
    parallel = config.parallel_config
    if parallel.node_rank:
        raise ValueError(
            f"node_rank={parallel.node_rank}: the engine is on node 0; run `vllm-mp engine --headless` or `vllm-mp "
            "serve --headless` on this machine"
        )
    _check_listening(parallel.master_addr, parallel.master_port)
    try:
        _make_keys(Path(parallel.node_key_file), rank_host_key(parallel))
    except ValueError as error:
        raise ValueError(f"node_key_file={parallel.node_key_file!r}: {error}") from error
    numbers = "1" if parallel.nnodes == 2 else f"K from 1 to {parallel.nnodes - 1}"
    where = f"on the machine of node {numbers}"
    if ip_address(parallel.master_addr).startswith("127."):
        where += f" (this one, because no other reaches master_addr={parallel.master_addr!r})"
    return f"{where}, {what_to_run(config, numbers.partition(' ')[0])}"


def _check_listening(host: str, port: int) -> None:
    """Raise ValueError, naming the option, if no process of this machine can listen at `host` and `port`.

    The core of an engine that was killed may hold the port until it has ended.
    """
    address = ip_address(host)
    deadline = time.monotonic() + _ORPHAN_TIMEOUT_S
    while (error := _bind_error(address, port)) is not None:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"master_addr={host!r} is not an address of this machine; give the one at which other machines reach "
                "node 0"
            ) from error
        if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
            raise ValueError(
                f"master_port={port}: cannot listen on {address}:{port}: {error.strerror}; give a free port"
            ) from error
        time.sleep(_ORPHAN_POLL_S)


def _bind_error(address: str, port: int) -> OSError | None:
    """Return why no process can listen at an address now; None if one can."""
    if address == _ALL_ADDRESSES:  # which a process can listen at, but no other machine can reach
        return OSError(errno.EADDRNOTAVAIL, "it stands for all addresses")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            return error
    return None


def _make_keys(file: Path, host_file: Path) -> None:
    """Make the key files of node 0 and of the other machines unless there are some. Raises ValueError for bad files."""
    # Imported here, because this module is imported for the help of commands too.
    from vllm_mp.keys.authorized_clients import AuthorizedClients
    from vllm_mp.keys.curve_keys import make_client_key, make_server_key, read_server_key

    if file == host_file:
        raise ValueError("node 0 gives this name to the key of the other machines; choose another name")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        server = read_server_key(file) if file.exists() else make_server_key(file)
        clients = AuthorizedClients(file)
        if not clients.read() and not host_file.exists():
            clients.allow("rank-host", make_client_key(host_file, server.public).public)
    except OSError as error:
        raise ValueError(f"{error.strerror} ({error.filename}); choose a folder that you may write to") from error


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
