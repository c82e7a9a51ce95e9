"""The flags that name a running core for a command to use, and the engine that they ask for."""

import argparse
import dataclasses
from typing import TYPE_CHECKING

from vllm_mp.engine_args import AsyncEngineArgs

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM


def flag_of(option: str) -> str:
    """Return the flag of an option."""
    return f"--{option.replace('_', '-')}"


def add_connect_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connect",
        metavar="ADDRESS",
        help="Address of a running core to use; by default a core is started. With this flag, only the client's "
        "engine options are allowed: " + ", ".join(map(flag_of, AsyncEngineArgs.CLIENT_OPTIONS)),
    )
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="Key file of this client, as `vllm-mp keys client` makes it; required for a tcp:// address",
    )
    parser.add_argument(
        "--core-owner",
        metavar="USER",
        help="User beside this one and root who may own the core's Unix socket (default: no other user)",
    )


def check_connect(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that would be ignored: a core that --connect names already has its options."""
    if args.connect is None:
        for option in ("key_file", "core_owner"):
            if getattr(args, option) is not None:
                raise ValueError(f"{flag_of(option)} needs --connect ADDRESS; add it, or leave out {flag_of(option)}")
        return
    for field in dataclasses.fields(AsyncEngineArgs):
        # A flag that may be repeated is None if it is not given.
        if field.name not in AsyncEngineArgs.CLIENT_OPTIONS and getattr(args, field.name) not in (None, field.default):
            raise ValueError(
                f"{flag_of(field.name)} has no effect on a running core; give it to "
                "`vllm-mp engine`, or leave out --connect"
            )


def open_engine(args: argparse.Namespace) -> "AsyncLLM":
    """Attach to the core that --connect names, or start a core. Raises what these calls of `AsyncLLM` raise."""
    from vllm_mp.client.async_llm import AsyncLLM

    engine_args = AsyncEngineArgs.from_cli_args(args)
    if args.connect is None:
        return AsyncLLM.from_engine_args(engine_args)
    options = engine_args.client_options()
    return AsyncLLM.connect(args.connect, key_file=args.key_file, core_owner=args.core_owner, **options)
