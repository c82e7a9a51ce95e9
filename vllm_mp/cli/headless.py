"""`--headless` of `serve` and `engine`: this machine runs ranks for the core of another machine."""

import argparse
import os
import sys
from typing import NoReturn

from vllm_mp.config.engine_args import AsyncEngineArgs


def add_headless(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--headless",
        action="store_true",
        help="Run the ranks of the machine --node-rank, for the core of the machine with --node-rank 0. Default: run "
        "a core.",
    )


def run_headless(engine_args: AsyncEngineArgs) -> NoReturn:
    """Become the rank host of this machine.

    Raises ValueError, with the remedy, for options that make no rank host, or if its key file cannot be read.
    """
    import msgspec

    from vllm_mp.core_link.core_environment import core_environment, package_path
    from vllm_mp.keys.curve_keys import read_client_key

    if engine_args.node_rank == 0:
        raise ValueError(
            "--headless needs --nnodes, and --node-rank from 1 on: the machine with --node-rank 0 has the core; give "
            "both, or leave out --headless"
        )
    config = engine_args.create_engine_config()
    parallel = config.parallel_config
    try:
        read_client_key(parallel.node_key_file)
    except ValueError as error:
        raise ValueError(
            f"this machine has no key: copy the file that the log of the engine on node 0 names to "
            f"{parallel.node_key_file} ({error})"
        ) from error
    line = os.memfd_create("launch")
    os.write(line, msgspec.json.encode(config) + b"\n")
    os.lseek(line, 0, os.SEEK_SET)
    os.dup2(line, 0)
    command = [sys.executable, "-P", "-m", "vllm_mp.core", "--rank-host"]
    os.execve(sys.executable, command, core_environment() | package_path())
