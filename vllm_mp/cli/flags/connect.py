"""The flags that name a running core for a command to use, and the engine that they ask for."""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mp.arguments.options import FURTHER
from vllm_mp.cli.terminal.waiting_line import WaitingLine
from vllm_mp.config.engine_args import AsyncEngineArgs
from vllm_mp.core_link.early_template import begin_core
from vllm_mp.model_store.folder import has_chat_template

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM
    from vllm_mp.config import ModelConfig


_CONNECT_TIMEOUT_S = 30.0
_ABSENT_TIMEOUT_S = 2.0
"""Time to wait for a core where no process listens."""


def flag_of(option: str) -> str:
    """Return the flag of an option."""
    return f"--{option.replace('_', '-')}"


def add_connect_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--connect",
        metavar="ADDRESS",
        help="Use the running core at ADDRESS, or several cores of one model at ADDRESS,ADDRESS,...; of the engine "
        "options, only the client options are allowed then ("
        + ", ".join(map(flag_of, AsyncEngineArgs.CLIENT_OPTIONS))
        + "). Default: a core is started.",
    )
    further = parser.add_argument_group(FURTHER + "options")
    further.add_argument(
        "--key-file",
        metavar="FILE",
        help="Read the client's key from FILE, as `vllm-mp keys client` makes it; required for a tcp:// address. "
        "Default: none.",
    )
    further.add_argument(
        "--core-owner",
        metavar="USER",
        help="Let USER, beside the current user and root, own the core's Unix socket. Default: no other user.",
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


def open_engine(args: argparse.Namespace, *, for_chat: bool = False) -> "AsyncLLM":
    """Attach to the core that --connect names, or start a core.

    Raises what these calls of `AsyncLLM` raise. Before a core is started, raises ValueError for a model that generates
    no text, and with `for_chat` for a model without a chat template.
    """
    engine_args = AsyncEngineArgs.from_cli_args(args)
    if args.connect is None:
        begin_core(engine_args)
    from vllm_mp.client.async_llm import AsyncLLM

    if args.connect is None:
        config = engine_args.create_engine_config()  # says itself what it fetches or converts
        _check_model(config.model_config, for_chat)
        with WaitingLine(f"loading {engine_args.model}"):
            return AsyncLLM.from_vllm_config(config)
    # The same command gives the same answers, also if others use the core.
    options = engine_args.client_options() | {"seed": engine_args.seed}
    timeout = _CONNECT_TIMEOUT_S if all(map(_listens, args.connect.split(","))) else _ABSENT_TIMEOUT_S
    with WaitingLine(f"connecting to {args.connect}"):
        return AsyncLLM.connect(
            args.connect, key_file=args.key_file, core_owner=args.core_owner, timeout=timeout, **options
        )


def _listens(address: str) -> bool:
    """Return whether a process listens at the address of a core; a core that loads does."""
    import socket

    kind, _, endpoint = address.partition("://")
    host, _, port = endpoint.rpartition(":")
    try:
        if kind == "tcp":
            socket.create_connection((host, int(port)), _ABSENT_TIMEOUT_S).close()
        else:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(endpoint)
    except (OSError, ValueError):
        return False
    return True


def no_chat_template(model: str) -> str:
    """Return the error for a model without a chat template, with the remedy."""
    return f"{model} has no chat template; give one with --chat-template, or use `vllm-mp generate` without --chat"


def _check_model(model: "ModelConfig", for_chat: bool) -> None:
    """Raise ValueError for a model that generates no text, and with `for_chat` for a model without a chat template.

    Code that comes with a tokenizer may define a template.
    """
    if model.architecture.is_encoder:
        raise ValueError(
            f"{model.model} is an encoder, which generates no text; name another model, or use `vllm-mp serve` for "
            "vectors"
        )
    if not model.architecture.has_head:
        raise ValueError(
            f"{model.model} has no head for tokens and generates no text; name another model, or use `vllm-mp serve` "
            "for vectors"
        )
    if not for_chat:
        return
    if model.skip_tokenizer_init:
        raise ValueError("a chat needs the tokenizer; leave out --skip-tokenizer-init")
    if model.chat_template is None and not model.trust_remote_code and not has_chat_template(Path(model.tokenizer)):
        raise ValueError(no_chat_template(model.model))
