"""An answer as it arrives: its text, and what the user must know about its end."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_mp.cli.chat.repetition import repeated_block, without_repetition
from vllm_mp.cli.generate import whole_text
from vllm_mp.lora_request import LoRARequest
from vllm_mp.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM

_CHECK_INTERVAL = 32
"""Number of new characters after which an answer is searched for repetition."""


@dataclass
class Answer:
    """An answer, complete or as far as it has arrived."""

    text: str = ""
    """The text for the conversation; a block that was repeated until the answer was stopped is in it once."""
    num_tokens: int = 0
    notice: str = ""
    """Why the answer ended, in a line for the user; "" if the model ended it."""


async def stream_answer(
    llm: "AsyncLLM",
    prompt: list[int],
    params: SamplingParams,
    answer: Answer,
    show: Callable[[str], None],
    lora: LoRARequest | None = None,
) -> None:
    """Give each piece of the answer to `show` and add it to `answer`, which keeps what arrived before a cancellation.

    An answer that repeats itself is stopped, unless the user asked for more with `ignore_eos`.
    """
    num_checked = 0
    async with aclosing(llm.generate(prompt, params, lora_request=lora)) as outputs:
        async for output in outputs:
            completion = output.outputs[0]
            piece = whole_text(completion)
            show(piece)
            answer.text += piece
            answer.num_tokens += len(completion.token_ids)
            if completion.finish_reason == "length":
                answer.notice = _cut_notice(answer.num_tokens, params.max_tokens, llm.model_config.max_model_len)
            elif not params.ignore_eos and len(answer.text) - num_checked >= _CHECK_INTERVAL:
                num_checked = len(answer.text)
                if repeated_block(answer.text):
                    answer.text = without_repetition(answer.text)
                    answer.notice = "stopped, as the answer repeats itself; try a higher --repetition-penalty"
                    return


def _cut_notice(num_tokens: int, max_tokens: int | None, max_model_len: int) -> str:
    """Return what to say about an answer that a limit ended."""
    if max_tokens is not None and num_tokens >= max_tokens:
        return f"cut off at {num_tokens} tokens; raise --max-tokens"
    return f"cut off at the end of the context of {max_model_len} tokens; /clear begins a new conversation"
