"""The command `chat`: a conversation with a model in the terminal."""

import argparse
import sys
from typing import TYPE_CHECKING

from vllm_mp.cli.chat.answer import Answer, stream_answer
from vllm_mp.cli.chat.context_room import fit_conversation
from vllm_mp.cli.chat.sampling_defaults import chat_defaults
from vllm_mp.cli.connect_flags import add_connect_flags, check_connect, open_engine
from vllm_mp.cli.generate import add_lora_flag, chat_prompt, chosen_adapter, show
from vllm_mp.cli.model_argument import set_model
from vllm_mp.cli.sampling_flags import add_sampling_flags, sampling_params
from vllm_mp.engine_args import AsyncEngineArgs
from vllm_mp.lora_request import LoRARequest
from vllm_mp.sampling_params import SamplingParams

if TYPE_CHECKING:
    import asyncio

    from vllm_mp.client.async_llm import AsyncLLM

USAGE = "[MODEL] [OPTIONS]"
HELP = "Chat with a model in the terminal."

_INSTRUCTIONS = "/clear forgets the conversation, /exit or Ctrl-D ends the program, Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_argument", nargs="?", metavar="MODEL", help="Model, as --model names it (default: the default model)"
    )
    parser.add_argument("--system", help="System message; by default the chat template's own")
    add_connect_flags(parser)
    add_lora_flag(parser)
    add_sampling_flags(parser)
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    import asyncio

    import uvloop

    sampling_params(args, {})  # refuses a wrong flag before the engine starts
    set_model(args, args.model_argument)
    check_connect(args)
    lora = chosen_adapter(args)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        llm = open_engine(args)
        try:
            chat_prompt(llm, [{"role": "user", "content": "?"}])  # refuses a model without a template
            if sys.stdin.isatty():
                print(f"{llm.model_config.served_model_name}. {_INSTRUCTIONS}")
            params = sampling_params(args, chat_defaults(llm.model_config.default_sampling_params))
            _converse(runner, llm, params, args.system, lora)
        finally:
            llm.shutdown()
    return 0


def _converse(
    runner: "asyncio.Runner", llm: "AsyncLLM", params: SamplingParams, system: str | None, lora: LoRARequest | None
) -> None:
    """Answer each line until the input ends. The text of a stopped completion stays in the conversation."""
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while (line := _read_line()) is not None:
        if line in ("/exit", "/quit"):
            return
        if line == "/clear":
            messages = list(start)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        answer = Answer()
        try:
            fitted = fit_conversation(
                messages, lambda kept: chat_prompt(llm, list(kept)), llm.model_config.max_model_len, params.max_tokens
            )
            if fitted.notice:
                print(f"({fitted.notice})", file=sys.stderr)
            messages = fitted.messages
            runner.run(stream_answer(llm, fitted.token_ids, params, answer, show, lora))
        except KeyboardInterrupt:
            show(" [stopped]")
        except ValueError as error:
            messages.pop()
            print(f"vllm-mp: {error}", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": answer.text})
        print()
        if answer.notice:
            print(f"({answer.notice})", file=sys.stderr)


def _read_line() -> str | None:
    """Return the user's next line, or None at the end of the input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print("\n" + _INSTRUCTIONS)
