"""The command `engine`: a core on its own, to which clients connect."""

import argparse
import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mp.cli.flags.config_file import add_config_flag
from vllm_mp.cli.flags.log_format import add_log_format_flag
from vllm_mp.cli.headless import add_headless, run_headless
from vllm_mp.config import ModelConfig
from vllm_mp.config.engine_args import AsyncEngineArgs
from vllm_mp.core_link.early_template import begin_core
from vllm_mp.errors import EngineDeadError, EngineStartError
from vllm_mp.model_store import cache_root
from vllm_mp.server.http.console import finishing

if TYPE_CHECKING:
    from vllm_mp.client.cores.shared_core import SharedCore

USAGE = "--listen ADDRESS [OPTIONS]"

_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    address_flags = parser.add_mutually_exclusive_group(required=True)
    address_flags.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="Let clients connect at ADDRESS, ipc:///PATH/TO/SOCKET or tcp://HOST:PORT, unless the command has "
        "--headless. Required.",
    )
    add_headless(address_flags)
    add_config_flag(parser)
    add_log_format_flag(parser)
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="Read the server's key from FILE, as `vllm-mp keys server` makes it; required for a tcp:// address. "
        "Default: none.",
    )
    parser.add_argument(
        "--operator-key-file",
        metavar="FILE",
        help="Let clients that have the key in FILE pause the core and make other calls that affect all clients; FILE "
        "is made if it does not exist. Default: no client may.",
    )
    parser.add_argument(
        "--takeover",
        action="store_true",
        help="Take over from the engine that serves ADDRESS, with all streams, once the model is loaded; that engine "
        "ends then, or goes on if this one does not start. Without such an engine start as usual. Default: off.",
    )
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Keep the core alive until a signal, and return the exit code.

    0 after a signal, 130 after a second signal. Raises EngineStartError or EngineDeadError if there is no core.
    """
    engine_args = AsyncEngineArgs.from_cli_args(args)
    if args.takeover and engine_args.nnodes > 1:
        raise ValueError(
            f"--takeover with --nnodes {engine_args.nnodes}: the other machines serve one core at a time, and no other "
            "can load beside it; stop the running engine, and start this one without --takeover"
        )
    if not args.headless:
        begin_core(engine_args)
    import asyncio

    from vllm_mp.client.cores.shared_core import SharedCore
    from vllm_mp.client.cores.sources.handover import ask_to_take_over
    from vllm_mp.client.cores.sources.held_address import check_address

    if args.headless:
        for flag, value in (("--key-file", args.key_file), ("--operator-key-file", args.operator_key_file)):
            if value:
                raise ValueError(
                    f"{flag} {value} has no effect with --headless, because clients connect to node 0; leave it out, "
                    "or name the key of this machine with --node-key-file"
                )
        run_headless(engine_args)
    check_address(args.listen, args.key_file)
    if args.key_file:
        from vllm_mp.keys.curve_keys import read_server_key

        read_server_key(args.key_file)  # refuses a bad file before anything is loaded
    config = engine_args.create_engine_config()
    if engine_args.data_parallel_size > 1:
        raise ValueError(
            f"--data-parallel-size {engine_args.data_parallel_size}: `vllm-mp engine` runs one core; run it once for "
            "each core, and give clients all addresses, separated by commas"
        )
    if config.parallel_config.data_parallel_backend == "ray":
        raise ValueError(
            "`vllm-mp engine` runs its core on this machine, without Ray; give --data-parallel-backend and the other "
            "options for Ray to `vllm-mp serve`"
        )
    _prepare_tokenizer(config.model_config)
    operator_key = b""
    if args.operator_key_file:
        from vllm_mp.keys.operator_key import ensure_operator_key

        operator_key = ensure_operator_key(args.operator_key_file)
    try:
        core = SharedCore(
            config,
            args.listen,
            args.key_file,
            operator_key,
            has_log_files=False,
            inheritance=ask_to_take_over(args.listen) if args.takeover else None,
            can_be_taken_over=engine_args.nnodes == 1,
        )
    except ValueError as error:
        raise EngineStartError(str(error)) from error
    return asyncio.run(_keep(core))


async def _keep(core: "SharedCore") -> int:
    """Keep `core` alive until a signal; SIGINT lets it finish its requests, a second signal ends it at once."""
    import asyncio

    keeping = asyncio.ensure_future(core.keep())
    num_signals = 0

    def on_signal(number: int) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            core.kill()
        elif number == signal.SIGINT:
            if core.num_requests:
                line_end = "\n" if sys.stderr.isatty() else ""  # after the terminal's "^C"
                print(f"{line_end}{finishing(core.num_requests)}; Ctrl-C again stops now", file=sys.stderr, flush=True)
            core.drain()
        else:
            keeping.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        await keeping
        if core.taken_by is not None:
            print(f"process {core.taken_by} has taken over", file=sys.stderr, flush=True)
    except asyncio.CancelledError:
        pass
    except EngineDeadError:
        if num_signals < 2:
            raise
    finally:
        await core.close()
    return _INTERRUPTED if num_signals > 1 else 0


def _prepare_tokenizer(model: ModelConfig) -> None:
    """Convert the tokenizer if it has no tokenizer.json, because clients that have none get the core's as that file."""
    if not model.skip_tokenizer_init:
        from vllm_mp.model_store.fast_tokenizer import fast_tokenizer_folder

        with contextlib.suppress(ValueError):  # a client needs a tokenizer of its own then
            model.tokenizer = str(fast_tokenizer_folder(Path(model.tokenizer), cache_root()) or model.tokenizer)
