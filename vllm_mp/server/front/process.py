"""`python -m vllm_mp.server.front.process`: a front process, one of several that share a core and a port."""

import asyncio
import functools
import os
import socket
import sys

import msgspec
import uvloop

from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.client.threads.background_call import call_in_thread
from vllm_mp.errors import EngineError
from vllm_mp.machine.log_setup import set_up_log
from vllm_mp.server.front.launch import READY_LINE, AllGone, CoreGone, FrontLaunch
from vllm_mp.server.http.security import tls_context
from vllm_mp.server.http.shared_state import SharedState
from vllm_mp.server.http.tenants import num_tenants
from vllm_mp.server.run import ServerProcess

_ORPHANED = 1


async def serve(launch: FrontLaunch, parent: asyncio.StreamReader) -> int:
    """Serve until a signal, the end of the core or the end of the parent; return the exit code."""
    shared = SharedState(launch.memory, launch.count, launch.index, launch.metrics_folder, num_tenants(launch.options))
    options = launch.options

    async def load() -> AsyncLLM:
        engine = await call_in_thread(
            lambda: AsyncLLM.connect(
                launch.address,
                key_file=options.key_file,
                core_owner=options.core_owner,
                timeout=launch.connect_timeout,
                reconnect_timeout=launch.reconnect_timeout,
                **launch.client_options,
            )
        )
        loaded.set_result(engine)
        return engine

    loaded: asyncio.Future[AsyncLLM] = asyncio.get_running_loop().create_future()
    listener = socket.socket(fileno=launch.listener)
    process = ServerProcess(
        options,
        tls_context(options),
        listener,
        load,
        shared,
        listens_early=not launch.is_restart,
        metrics_listener=None if launch.metrics_listener is None else socket.socket(fileno=launch.metrics_listener),
    )
    following = asyncio.create_task(_follow(parent, process, loaded))
    try:
        return await process.run(lambda: None, lambda _: _tell_ready())
    finally:
        following.cancel()


async def _follow(parent: asyncio.StreamReader, process: ServerProcess, loaded: asyncio.Future[AsyncLLM]) -> None:
    """Pass on what the parent says, and end this process at once with the parent."""
    while line := await parent.readline():
        message = msgspec.json.decode(line, type=CoreGone | AllGone)
        if isinstance(message, AllGone):
            process.end(message.cause)
        else:
            loaded.add_done_callback(functools.partial(_give_up, message))
    os._exit(_ORPHANED)


def _give_up(message: CoreGone, loaded: asyncio.Future[AsyncLLM]) -> None:
    """Let the engine, once it has loaded, do without a core."""
    loaded.result().give_up_core(message.address, message.cause, message.is_from_outside)


def _tell_ready() -> None:
    os.write(1, READY_LINE)


async def _read_launch() -> tuple[FrontLaunch, asyncio.StreamReader]:
    """Return the launch line of standard input, and standard input itself."""
    reader = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return msgspec.json.decode(await reader.readline(), type=FrontLaunch), reader


async def _main() -> int:
    launch, parent = await _read_launch()
    return await serve(launch, parent)


def main() -> int:
    """Run the front process that the launch line describes; return the exit code."""
    set_up_log(is_service=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(_main())
        except (EngineError, OSError, ValueError) as error:
            print(f"vllm-mp: a front process failed: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
