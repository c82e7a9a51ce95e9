"""The command `engine`: a core on its own, to which clients connect."""

import argparse
import asyncio
import signal
from typing import TYPE_CHECKING

from vllm_mp.engine_args import AsyncEngineArgs
from vllm_mp.errors import EngineDeadError, EngineStartError

if TYPE_CHECKING:
    from vllm_mp.client.engine.shared_core import SharedCore

USAGE = "--listen ADDRESS [OPTIONS]"
HELP = "Run a core that clients reach at an address (AsyncLLM.connect), and keep it alive."

_INTERRUPTED = 130


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
        help="Key file for a tcp:// address, where it is required; made if it does not exist; clients need a copy",
    )
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Keep the core alive until a signal, and return the exit code.

    0 after a signal, 130 after a second signal. Raises EngineStartError or EngineDeadError if there is no core.
    """
    from vllm_mp.client.engine.shared_core import SharedCore
    from vllm_mp.curve_key import ensure_key_file

    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    if args.key_file:
        ensure_key_file(args.key_file)
    try:
        core = SharedCore(config, args.listen, args.key_file, has_log_files=False)
    except ValueError as error:
        raise EngineStartError(str(error)) from error
    return asyncio.run(_keep(core))


async def _keep(core: "SharedCore") -> int:
    """Keep `core` alive until a signal; SIGINT lets it finish its requests, a second signal ends it at once."""
    keeping = asyncio.ensure_future(core.keep())
    num_signals = 0

    def on_signal(number: int) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            core.kill()
        elif number == signal.SIGINT:
            core.drain()
        else:
            keeping.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        await keeping
    except asyncio.CancelledError:
        pass
    except EngineDeadError:
        if num_signals < 2:
            raise
    finally:
        await core.close()
    return _INTERRUPTED if num_signals > 1 else 0
