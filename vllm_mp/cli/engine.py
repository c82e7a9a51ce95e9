"""The command `engine`: a core on its own, to which clients connect."""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from vllm_mp.config import ModelConfig
from vllm_mp.engine_args import AsyncEngineArgs
from vllm_mp.model_store import cache_root

USAGE = "--listen ADDRESS [OPTIONS]"
HELP = "Run a core that clients reach at an address (AsyncLLM.connect)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        required=True,
        metavar="ADDRESS",
        help="Address at which clients connect: ipc:///PATH/TO/SOCKET or tcp://HOST:PORT (required)",
    )
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="Key file of the server for a tcp:// address, where it is required; `vllm-mp keys` makes it",
    )
    parser.add_argument(
        "--operator-key-file",
        metavar="FILE",
        help="Key file of the operators, who may pause the core and make other calls that affect all clients; made if "
        "it does not exist (default: there are no operators)",
    )
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Replace this process with the core. The pid stays the same, so that signals to it reach the core."""
    from vllm_mp.core_launch import CoreLaunch, core_environment

    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    _prepare_tokenizer(config.model_config)
    if args.key_file:
        from vllm_mp.curve_keys import read_server_key

        read_server_key(args.key_file)  # refuses a bad file before anything is loaded
    operator_key = b""
    if args.operator_key_file:
        from vllm_mp.operator_key import ensure_operator_key

        operator_key = ensure_operator_key(args.operator_key_file)
    launch = CoreLaunch(
        config=config,
        address=args.listen,
        incarnation=time.time_ns(),
        status_path=f"{args.listen.removeprefix('ipc://')}.status" if args.listen.startswith("ipc://") else None,
        supervised=False,
        is_shared=True,
        key_file=args.key_file,
        operator_key=operator_key,
    )
    # The core reads the configuration from a file without a name: a pipe may be too small for it.
    with tempfile.TemporaryFile() as file:
        file.write(msgspec.json.encode(launch) + b"\n")
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.execve(sys.executable, [sys.executable, "-P", "-m", "vllm_mp.core"], core_environment())


def _prepare_tokenizer(model: ModelConfig) -> None:
    """Convert the tokenizer if it has no tokenizer.json, because clients that have none get the core's as that file."""
    if not model.skip_tokenizer_init:
        from vllm_mp.client.tokenizer import fast_tokenizer_folder

        with contextlib.suppress(ValueError):  # a client needs a tokenizer of its own then
            model.tokenizer = str(fast_tokenizer_folder(Path(model.tokenizer), cache_root()) or model.tokenizer)
