"""The command `serve`: the HTTP server."""

import argparse
import dataclasses
import json
import os
import shlex
import sys
from typing import TYPE_CHECKING

from vllm_mp.engine_args import AsyncEngineArgs
from vllm_mp.server.options import ServerOptions

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM

USAGE = "[MODEL] [OPTIONS]"
HELP = "Serve a model over HTTP with OpenAI's API."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "served_model",
        metavar="MODEL",
        nargs="?",
        help="Model to serve, as with --model",
    )
    ServerOptions.add_cli_args(parser)
    AsyncEngineArgs.add_cli_args(parser)
    # The log of a server may be read by others than the authors of prompts.
    parser.set_defaults(disable_log_requests=True)


def run(args: argparse.Namespace) -> int:
    options = ServerOptions.from_cli_args(args)
    if args.served_model is not None:
        args.model = args.served_model
    engine_args = AsyncEngineArgs.from_cli_args(args)

    from vllm_mp.server.listening import is_loopback, listen, url_of
    from vllm_mp.server.security import read_api_keys, tls_context

    options = dataclasses.replace(options, api_key=read_api_keys(options, os.environ))
    tls = tls_context(options)
    # Before the engine: a port in use must cost no loading of a model.
    listener = listen(options.host, options.port)
    url = url_of(listener, tls is not None)
    if not options.api_key and options.ssl_ca_certs is None and not is_loopback(listener):
        print(
            f"warning: everyone who reaches {options.host} can use the server; give --api-key, or --host 127.0.0.1",
            file=sys.stderr,
        )

    import asyncio

    import uvloop

    from vllm_mp.client.async_llm import AsyncLLM
    from vllm_mp.client.background_call import call_in_thread
    from vllm_mp.server.run import ServerProcess, say

    async def load() -> AsyncLLM:
        if options.connect is None:
            return await AsyncLLM.start(engine_args)
        address = options.connect
        traces = engine_args.otlp_traces_endpoint
        return await call_in_thread(
            lambda: AsyncLLM.connect(address, key_file=options.key_file, otlp_traces_endpoint=traces)
        )

    def on_ready(engine: AsyncLLM) -> None:
        say(ready_line(engine, options, url))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        process = ServerProcess(options, tls, listener, load)
        return runner.run(process.run(lambda: say(f"listening on {url}"), on_ready))


def ready_line(engine: "AsyncLLM", options: ServerOptions, url: str) -> str:
    """Return what the operator is told when the server is ready: the URL and a request to try."""
    name = engine.model_config.served_model_name
    body = shlex.quote(json.dumps({"model": name, "prompt": "The capital of France is", "max_tokens": 16}))
    key = ' -H "Authorization: Bearer $VLLM_API_KEY"' if options.api_key else ""
    return (
        f"ready: {url} serves {name}; try: curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d {body}"
    )
