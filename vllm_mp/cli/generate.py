"""The command `generate`: a completion streamed to standard output."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_mp.cli.sampling_flags import add_sampling_flags, sampling_params
from vllm_mp.engine_args import AsyncEngineArgs
from vllm_mp.lora_request import LoRARequest, parse_adapter
from vllm_mp.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM

USAGE = "PROMPT [OPTIONS]"
HELP = "Stream the answer to a prompt."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="Prompt; - reads it from standard input (required)")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="Put the prompt into the model's chat template (default: off)",
    )
    add_lora_flag(parser)
    add_sampling_flags(parser)
    AsyncEngineArgs.add_cli_args(parser)


def add_lora_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lora",
        metavar="NAME=FOLDER",
        help="LoRA adapter that answers, in a folder that PEFT has saved (default: none)",
    )


def chosen_adapter(args: argparse.Namespace) -> LoRARequest | None:
    """Return the adapter of --lora, for which LoRA is enabled in `args`. Raises ValueError if it is not NAME=FOLDER."""
    if args.lora is None:
        return None
    args.enable_lora = True
    return parse_adapter(args.lora, 1 + len(args.lora_modules or ()), "--lora")


def run(args: argparse.Namespace) -> int:
    import asyncio

    import uvloop

    from vllm_mp.client.async_llm import AsyncLLM

    sampling_params(args, {})  # refuses a wrong flag before the engine starts
    lora = chosen_adapter(args)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
        try:
            prompt = chat_prompt(llm, [{"role": "user", "content": text}]) if args.chat else text
            params = sampling_params(args, llm.model_config.default_sampling_params)
            runner.run(stream_completion(llm, prompt, params, show, lora))
            print()
        finally:
            llm.shutdown()
    return 0


async def stream_completion(
    llm: "AsyncLLM",
    prompt: str | list[int],
    params: SamplingParams,
    show: Callable[[str], None],
    lora: LoRARequest | None = None,
) -> str:
    """Give each piece of the completion to `show` when it arrives, and return the whole text."""
    pieces = []
    async for output in llm.generate(prompt, params, lora_request=lora):
        pieces.append(output.outputs[0].text)
        show(pieces[-1])
    return "".join(pieces)


def chat_prompt(llm: "AsyncLLM", messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of `messages` in the model's chat template.

    Raises ValueError if the model has no chat template, or if a message is not valid Unicode.
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
    # The template contains the special tokens already.
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def show(piece: str) -> None:
    """Write a piece of a completion to standard output at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()
