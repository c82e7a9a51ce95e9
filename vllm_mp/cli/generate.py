"""Stream one answer to standard output."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_mp.cli.sampling_flags import add_sampling_flags, sampling_params
from vllm_mp.engine_args import AsyncEngineArgs
from vllm_mp.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM

HELP = "stream the answer to a prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--chat", action="store_true", help="give the prompt to the model as a user's message in its chat template"
    )
    add_sampling_flags(parser)
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    import asyncio

    import uvloop

    from vllm_mp.client.async_llm import AsyncLLM

    sampling_params(args, {})  # so that a wrong flag does not cost a start
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
        try:
            prompt = chat_prompt(llm, [{"role": "user", "content": text}]) if args.chat else text
            params = sampling_params(args, llm.model_config.default_sampling_params)
            runner.run(stream_answer(llm, prompt, params, show))
            print()
        finally:
            llm.shutdown()
    return 0


async def stream_answer(
    llm: "AsyncLLM", prompt: str | list[int], params: SamplingParams, show: Callable[[str], None]
) -> str:
    """Give each piece of the answer to `show` as it comes; returns the whole."""
    pieces = []
    async for output in llm.generate(prompt, params):
        pieces.append(output.outputs[0].text)
        show(pieces[-1])
    return "".join(pieces)


def chat_prompt(llm: "AsyncLLM", messages: list[dict[str, str]]) -> list[int]:
    """The token ids that the model's chat template makes of `messages`.

    Raises ValueError if it has none, or if a message is no text that can be encoded.
    """
    from vllm_mp.client.prompt import parse_prompt

    for message in messages:
        parse_prompt(message["content"], None)
    tokenizer = llm.get_tokenizer()
    if not tokenizer.chat_template:
        raise ValueError(
            f"{llm.model_config.model} has no chat template; give one with --chat-template, or use "
            "`vllm-mp generate` without --chat"
        )
    text: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # The template writes the special tokens itself.
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def show(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()
