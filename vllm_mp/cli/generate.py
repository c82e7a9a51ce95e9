"""The command `generate`: a completion streamed to standard output."""

import argparse
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, BinaryIO

from vllm_mp.cli.chat_text import chat_prompt, whole_text
from vllm_mp.cli.flags.adapter import add_lora_flag, chosen_adapter
from vllm_mp.cli.flags.connect import add_connect_flags, check_connect, open_engine
from vllm_mp.cli.flags.model import names_model, set_model
from vllm_mp.cli.flags.sampling import add_sampling_flags, sampling_params
from vllm_mp.cli.terminal.repetition import LoopGuard, penalty_against_loops
from vllm_mp.cli.terminal.restart_signs import with_restarts_shown
from vllm_mp.cli.terminal.screen import Screen, print_error
from vllm_mp.config.engine_args import AsyncEngineArgs
from vllm_mp.errors import EngineError
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM
    from vllm_mp.client.prompts.prompt import TokensPrompt

USAGE = "[MODEL] [PROMPT] [OPTIONS]"

_LOOP = "stopped, as the answer repeats itself; give a larger --frequency-penalty, or --ignore-eos to go on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] [PROMPT]",
        help="Answer PROMPT with MODEL; a single argument is the model if it names a model, else the prompt. Text that "
        f"is piped in is the prompt, or comes before it. Default: {AsyncEngineArgs.model}, and what is piped in.",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="Answer the prompts of FILE, one in each line: texts, or JSON objects with prompt or messages, sampling "
        "parameters and id; -: standard input. Results are JSON lines in the same order. Default: a single prompt.",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="Put the prompt into the model's chat template. Default: off.",
    )
    add_connect_flags(parser)
    add_lora_flag(parser)
    add_sampling_flags(parser, {})
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    import asyncio

    import uvloop

    sampling_params(args, {})  # refuses a wrong flag before the engine starts
    model, given = split_words(args.words, takes_prompt=args.prompts is None)
    set_model(args, model)
    check_connect(args)
    lora = chosen_adapter(args)
    if args.prompts is not None:
        return _answer_file(args, lora)
    text = whole_prompt(given)
    screen = Screen()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        llm = open_engine(args, for_chat=args.chat)
        try:
            prompt = chat_prompt(llm, [{"role": "user", "content": text}]) if args.chat else text
            model_defaults = llm.model_config.default_sampling_params
            penalty = penalty_against_loops(model_defaults) if args.chat else {}
            params = sampling_params(args, penalty | model_defaults)
            stops_loops = args.chat and not params.ignore_eos
            completion = stream_completion(llm, prompt, params, lora, screen, stops_loops=stops_loops)
            try:
                is_loop = runner.run(completion)
            except EngineError:
                if screen.is_terminal:
                    screen.write("\n")  # shows the last word, too; the error begins a line
                raise
            screen.write("\n")
        finally:
            llm.shutdown()
    if is_loop:
        screen.complain(_LOOP)
    return 0


def _answer_file(args: argparse.Namespace, lora: LoRARequest | None) -> int:
    """Answer the prompts of the file that --prompts names. Return 1 if one of them failed, else 0."""
    import asyncio

    import uvloop

    from vllm_mp.cli.generate_lines import LineGenerator
    from vllm_mp.client.blocking.progress_bar import ProgressBar

    try:
        file: BinaryIO = open(0, "rb", closefd=False) if args.prompts == "-" else open(args.prompts, "rb")  # noqa: SIM115
    except OSError as error:
        raise ValueError(f"--prompts {args.prompts}: {error.strerror}; name a file that can be read") from error
    shows_progress = sys.stderr.isatty() and not sys.stdout.isatty()
    num_prompts = None
    if shows_progress and file.seekable():
        num_prompts = sum(not line.isspace() for line in file)
        file.seek(0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        llm = open_engine(args, for_chat=args.chat)
        try:
            params = sampling_params(args, llm.model_config.default_sampling_params)
            bar = ProgressBar(shows_progress, num_prompts)
            lines = LineGenerator(llm, params, bar, chat=args.chat, lora=lora)
            runner.run(lines.run(file))
        finally:
            llm.shutdown()
    if not lines.num_failed:
        return 0
    failed = f"{lines.num_failed} of {lines.num_written} prompts failed"
    print_error(f"{failed}; the results of these lines have an error")
    return 1


def split_words(words: list[str], *, takes_prompt: bool = True) -> tuple[str | None, str | None]:
    """Return the model and the prompt among the arguments, None for each that is not there.

    Raises ValueError for more than two arguments, or without `takes_prompt` for more than a model.
    """
    if not takes_prompt:
        if len(words) > 1:
            raise ValueError(f"--prompts FILE replaces the prompt; leave out {words[1]!r:.100}")
        return (words[0] if words else None), None
    match words:
        case []:
            return None, None
        case [word]:
            return (word, None) if names_model(word) else (None, word)
        case [model, prompt]:
            return model, prompt
    raise ValueError(
        f"there must be at most a model and a prompt, got {len(words)} arguments; put quotes around a text"
    )


def whole_prompt(given: str | None) -> str:
    """Return the prompt: the text that is piped in, then the `given` text, with a space between them.

    Raises ValueError without any text, and for piped bytes that are not UTF-8.
    """
    piped = "" if sys.stdin.isatty() and given != "-" else _piped_text()
    text = " ".join(part for part in (piped, "" if given == "-" else given) if part)
    if not text:
        raise ValueError("no prompt is given; write generate [MODEL] PROMPT, or pipe a text in")
    return text


def _piped_text() -> str:
    """Return what standard input holds. Raises ValueError, with the offset, if it is not UTF-8."""
    text = sys.stdin.read()
    try:
        text.encode()
    except UnicodeEncodeError as error:
        offset = len(text[: error.start].encode())
        raise ValueError(
            f"standard input is not UTF-8 (byte {ord(text[error.start]) - 0xDC00:#x} at {offset})"
        ) from None
    return text


async def stream_completion(
    llm: "AsyncLLM",
    prompt: "str | list[int] | TokensPrompt",
    params: SamplingParams,
    lora: LoRARequest | None,
    screen: Screen,
    *,
    stops_loops: bool,
) -> bool:
    """Write the completion to `screen` as it arrives. Return whether it was stopped because it repeats itself.

    It is stopped for that reason only with `stops_loops`.
    """
    text, guard = "", LoopGuard()
    async with (
        aclosing(llm.generate(prompt, params, lora_request=lora)) as answer,
        aclosing(with_restarts_shown(llm, answer, screen)) as outputs,
    ):
        async for output in outputs:
            piece = whole_text(output.outputs[0])
            screen.write(piece)
            text += piece
            if stops_loops and guard.finds_loop(text):
                return True
    return False
