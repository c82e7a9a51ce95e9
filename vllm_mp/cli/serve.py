"""The command `serve`: the HTTP server."""

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_mp.cli.flags.config_file import add_config_flag
from vllm_mp.cli.flags.connect import check_connect
from vllm_mp.cli.flags.log_format import add_log_format_flag
from vllm_mp.cli.headless import add_headless, run_headless
from vllm_mp.config.engine_args import AsyncEngineArgs
from vllm_mp.core_link.early_template import begin_core
from vllm_mp.machine.descriptor_limit import raise_descriptor_limit
from vllm_mp.server.http.options import ServerOptions

if TYPE_CHECKING:
    import socket
    import ssl

    from vllm_mp.config import VllmConfig

logger = logging.getLogger(__name__)

USAGE = "[MODEL] [OPTIONS]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "served_model",
        metavar="MODEL",
        nargs="?",
        help=f"Serve this model, as --model names it. Default: {AsyncEngineArgs.model}.",
    )
    add_config_flag(parser)
    add_log_format_flag(parser)
    add_headless(parser)
    ServerOptions.add_cli_args(parser)
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    options = ServerOptions.from_cli_args(args)
    if args.served_model is not None:
        args.model = args.served_model
    check_connect(args)
    engine_args = AsyncEngineArgs.from_cli_args(args)
    if args.headless:
        run_headless(engine_args)
    raise_descriptor_limit()
    if options.connect is None:
        begin_core(engine_args)

    from vllm_mp.server.front.listening import listen_at_path, listen_together, removing_file_of
    from vllm_mp.server.http.parsers import load_parsers
    from vllm_mp.server.http.security import read_api_keys, read_operator_keys, tls_context

    load_parsers(options)
    options = dataclasses.replace(
        options,
        api_key=read_api_keys(options, os.environ),
        operator_key=read_operator_keys(options, os.environ),
        allow_runtime_lora_updating=options.allow_runtime_lora_updating
        or os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").strip().lower() in ("1", "true"),
    )
    tls = tls_context(options)
    # Before the engine: a port in use must cost no loading of a model.
    if not options.uds:
        listeners = listen_together(options.host, options.port, options.api_server_count)
    else:
        listeners = listen_at_path(options.uds, options.api_server_count)
    with removing_file_of(listeners[0]):
        return _serve(options, engine_args, tls, listeners)


def _serve(
    options: ServerOptions,
    engine_args: AsyncEngineArgs,
    tls: "ssl.SSLContext | None",
    listeners: "list[socket.socket]",
) -> int:
    """Serve with an engine of its own or that of `options.connect`, and return the exit code."""
    from vllm_mp.server.front.listening import is_loopback, listen_together, url_of
    from vllm_mp.server.http.console import say

    metrics_listeners = []
    if options.metrics_port is not None:
        metrics_listeners = listen_together(options.host, options.metrics_port, options.api_server_count)
    if not options.api_key and options.ssl_ca_certs is None and not is_loopback(listeners[0]):
        print(
            f"warning: everyone who reaches {options.host} can use the server; give --api-key, or --host 127.0.0.1",
            file=sys.stderr,
        )
    url = url_of(listeners[0], tls is not None)

    def on_listening() -> None:
        say(f"listening on {url}")
        if metrics_listeners:
            say(f"metrics at {url_of(metrics_listeners[0], is_tls=False)}/metrics")

    serve = _serve_with_fronts if options.api_server_count > 1 else _serve_alone
    return serve(options, engine_args, tls, listeners, metrics_listeners, url, on_listening)


def _serve_alone(
    options: ServerOptions,
    engine_args: AsyncEngineArgs,
    tls: "ssl.SSLContext | None",
    listeners: "list[socket.socket]",
    metrics_listeners: "list[socket.socket]",
    url: str,
    on_listening: Callable[[], None],
) -> int:
    """Serve in this process, and return the exit code."""
    import asyncio

    import uvloop

    from vllm_mp.client.async_llm import AsyncLLM
    from vllm_mp.client.threads.background_call import call_in_thread
    from vllm_mp.server.http.console import ready_line, say
    from vllm_mp.server.run import ServerProcess

    async def load() -> AsyncLLM:
        if options.connect is None:
            return await AsyncLLM.start(engine_args)
        address = options.connect
        return await call_in_thread(
            lambda: AsyncLLM.connect(
                address,
                key_file=options.key_file,
                core_owner=options.core_owner,
                **engine_args.client_options(),
            )
        )

    def on_ready(engine: AsyncLLM) -> None:
        if options.connect is None:
            _log_int8_hint(engine.vllm_config)
        say(ready_line(engine.model_config.served_model_name, options, url))

    async def run() -> int:
        metrics_listener = metrics_listeners[0] if metrics_listeners else None
        process = ServerProcess(options, tls, listeners[0], load, metrics_listener=metrics_listener)
        return await process.run(on_listening, on_ready)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def _serve_with_fronts(
    options: ServerOptions,
    engine_args: AsyncEngineArgs,
    tls: "ssl.SSLContext | None",
    listeners: "list[socket.socket]",
    metrics_listeners: "list[socket.socket]",
    url: str,
    on_listening: Callable[[], None],
) -> int:
    """Serve in several processes, and return the exit code."""
    import asyncio

    from vllm_mp.server.front.processes import FrontProcesses
    from vllm_mp.server.http.console import ready_line, say

    config = engine_args.create_engine_config() if options.connect is None else None
    if config is not None and config.parallel_config.data_parallel_backend == "ray":
        raise ValueError(
            f"--api-server-count {options.api_server_count} is not served with cores on Ray, which serve one process; "
            "leave it at 1"
        )
    name = str(options.connect) if config is None else config.model_config.served_model_name

    def on_ready(config: "VllmConfig | None") -> None:
        if config is not None:
            _log_int8_hint(config)
        say(ready_line(name, options, url))

    async def run() -> int:
        on_listening()
        return await FrontProcesses(options, engine_args, listeners, metrics_listeners, config).run(on_ready)

    return asyncio.run(run())


def _log_int8_hint(config: "VllmConfig") -> None:
    from vllm_mp.cli.smaller_weights import int8_hint

    if hint := int8_hint(config):
        logger.info("%s", hint)
