"""The command `chat`: a conversation with a model in the terminal."""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm_mp.cli.chat.commands import EndOfChat, completions, message_in, run_if_command
from vllm_mp.cli.chat.sampling_defaults import chat_defaults
from vllm_mp.cli.chat_text import chat_prompt
from vllm_mp.cli.flags.adapter import add_lora_flag, chosen_adapter
from vllm_mp.cli.flags.connect import add_connect_flags, check_connect, open_engine
from vllm_mp.cli.flags.model import set_model
from vllm_mp.cli.flags.sampling import add_sampling_flags, chosen_parameters, sampling_params
from vllm_mp.cli.smaller_weights import int8_hint
from vllm_mp.config.engine_args import AsyncEngineArgs

if TYPE_CHECKING:
    from vllm_mp.cli.chat.prompt_line import PromptLine
    from vllm_mp.cli.chat.session import ChatSession

USAGE = "[MODEL] [OPTIONS]"

_INSTRUCTIONS = "/help lists commands, Ctrl-C stops an answer, /bye or Ctrl-D leaves the chat."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_argument",
        nargs="?",
        metavar="MODEL",
        help=f"Chat with this model, as --model names it. Default: {AsyncEngineArgs.model}.",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="Begin with this system message. Default: the chat template's own."
    )
    add_connect_flags(parser)
    parser.add_argument(
        "--verbose", action="store_true", help="Show tokens per second and times after each answer. Default: off."
    )
    add_lora_flag(parser)
    add_sampling_flags(parser, chat_defaults({}))
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    import asyncio

    import uvloop

    from vllm_mp.cli.chat.conversation import Conversation
    from vllm_mp.cli.chat.prompt_line import prompt_line
    from vllm_mp.cli.chat.session import ChatSession
    from vllm_mp.cli.terminal.screen import Screen

    sampling_params(args, {})  # refuses a wrong flag before the engine starts
    set_model(args, args.model_argument)
    check_connect(args)
    lora = chosen_adapter(args)
    screen, is_terminal = Screen(), sys.stdin.isatty()
    with _silent_log(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if is_terminal and args.connect is None:
            screen.note(args.model)  # before the core starts, which takes a while
        lines = prompt_line(completions, _INSTRUCTIONS)
        with lines.while_busy():
            llm = open_engine(args, for_chat=True)
        try:
            chat_prompt(llm, [{"role": "user", "content": "?"}])  # refuses a running core without a template
            if is_terminal and args.connect is not None:
                screen.note(llm.model_config.served_model_name)
            if is_terminal:
                screen.note(_INSTRUCTIONS)
                if args.connect is None and (hint := int8_hint(llm.vllm_config)):
                    screen.note(hint)
            parameters = chosen_parameters(args, chat_defaults(llm.model_config.default_sampling_params))
            session = ChatSession(runner, llm, Conversation(args.system, parameters), screen, lora, args.verbose)
            _converse(session, lines)
        finally:
            llm.shutdown()
    return 0


@contextlib.contextmanager
def _silent_log() -> Iterator[None]:
    """Log nothing, unless VLLM_MP_LOG_LEVEL asks for it.

    The chat itself shows that a core was replaced, and an error that ends the engine is raised.
    """
    logger = logging.getLogger("vllm_mp")
    before = logger.level
    if not os.environ.get("VLLM_MP_LOG_LEVEL"):
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _converse(session: "ChatSession", lines: "PromptLine") -> None:
    """Answer messages and carry out commands until the user leaves."""
    while (line := lines.read()) is not None:
        try:
            if line and not run_if_command(session, line, lines):
                session.ask(message_in(line), lines)
        except EndOfChat:
            return
        except (ValueError, TypeError) as error:
            session.screen.complain(str(error))
