"""One answer of a chat: its text as it arrives, how it ended, and how long it took."""

import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from vllm_mp.arguments.counted import counted
from vllm_mp.cli.chat_text import whole_text
from vllm_mp.cli.terminal.repetition import LoopGuard, without_repetition
from vllm_mp.cli.terminal.restart_signs import with_restarts_shown
from vllm_mp.cli.terminal.screen import Screen
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM
    from vllm_mp.client.prompts.prompt import TokensPrompt


class Answer:
    """Shows an answer while it is made. After `stream`, also an interrupted one, the fields describe the answer."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self.text = ""
        """The text for the conversation; a block that was repeated until the answer was stopped is in it once."""
        self.num_tokens = 0
        self.first_token_s: float | None = None
        """Seconds from the question to the first token; None before."""
        self.seconds = 0.0
        """Seconds from the question to the last token."""
        self.notice = ""
        """Why the answer ended, in a line for the user; "" if the model ended it."""
        self._guard = LoopGuard()

    async def stream(
        self,
        llm: "AsyncLLM",
        prompt: "list[int] | TokensPrompt",
        params: SamplingParams,
        lora: LoRARequest | None,
    ) -> None:
        """Write the answer to `prompt` as it arrives. Raises what `AsyncLLM.generate` raises.

        An answer that repeats itself is stopped, unless the user asked for more with `ignore_eos`.
        """
        started = time.monotonic()
        async with (
            aclosing(llm.generate(prompt, params, lora_request=lora)) as answer,
            aclosing(with_restarts_shown(llm, answer, self._screen)) as outputs,
        ):
            async for output in outputs:
                [completion] = output.outputs
                now = time.monotonic()
                if completion.token_ids and self.first_token_s is None:
                    self.first_token_s = now - started
                self.num_tokens += len(completion.token_ids)
                self.seconds = now - started
                self._write(whole_text(completion))
                if completion.finish_reason == "length":
                    self.notice = self._cut_notice(params.max_tokens, llm.model_config.max_model_len)
                elif not params.ignore_eos and self._guard.finds_loop(self.text):
                    self.text = without_repetition(self.text)
                    self.notice = "stopped, as the answer repeats itself; /retry, or /set frequency_penalty X"
                    break

    def _cut_notice(self, max_tokens: int | None, max_model_len: int) -> str:
        """Return what to say about an answer that a limit ended."""
        if max_tokens is not None and self.num_tokens >= max_tokens:
            return f"cut off at {counted(self.num_tokens, 'token')}; /set max_tokens N"
        return f"cut off at the end of the context of {max_model_len} tokens; /clear begins a new conversation"

    def _write(self, piece: str) -> None:
        self.text += piece
        self._screen.write(piece)

    def summary(self) -> str:
        """Return the figures of the answer in a line."""
        tokens = counted(self.num_tokens, "token")
        if self.first_token_s is None:
            return f"{tokens}, {self.seconds:.2f} s"
        decode_s = self.seconds - self.first_token_s
        speed = f", {(self.num_tokens - 1) / decode_s:.1f} tokens/s" if self.num_tokens > 1 and decode_s > 0 else ""
        return f"{tokens}{speed}, first token after {self.first_token_s:.2f} s, {self.seconds:.2f} s in all"
