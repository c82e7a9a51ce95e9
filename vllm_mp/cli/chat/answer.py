"""One answer of a chat: its text as it arrives, how it ended, and how long it took."""

import time
from typing import TYPE_CHECKING

from vllm_mp.cli.chat.screen import Screen
from vllm_mp.cli.generate import whole_text
from vllm_mp.counted import counted
from vllm_mp.lora_request import LoRARequest
from vllm_mp.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM


class Answer:
    """Shows an answer while it is made. After `stream`, also an interrupted one, the fields describe the answer."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._mark: str | None = None
        """What is to be shown at the end of the word that is being written."""
        self.text = ""
        self.num_tokens = 0
        self.first_token_s: float | None = None
        """Seconds from the question to the first token; None before."""
        self.seconds = 0.0
        """Seconds from the question to the last token."""
        self.finish_reason: str | None = None

    async def stream(
        self, llm: "AsyncLLM", prompt: list[int], params: SamplingParams, lora: LoRARequest | None
    ) -> None:
        """Write the answer to `prompt` as it arrives. Raises what `AsyncLLM.generate` raises."""
        incarnation = llm.last_core_status()["incarnation"]
        started = last = time.monotonic()
        async for output in llm.generate(prompt, params, lora_request=lora):
            [completion] = output.outputs
            now = time.monotonic()
            current = llm.last_core_status()["incarnation"]
            if current != incarnation:
                self._mark = f"· engine restarted, {now - last:.1f} s ·"
                incarnation = current
            last = now
            if completion.token_ids and self.first_token_s is None:
                self.first_token_s = now - started
            self.num_tokens += len(completion.token_ids)
            self.seconds = now - started
            self.finish_reason = completion.finish_reason
            self._write(whole_text(completion))
        self._end()

    def _write(self, piece: str) -> None:
        """Write a piece; a mark that waits is written where a word begins."""
        self.text += piece
        if self._mark is not None and (piece[:1].isspace() or not self.text.strip()):
            self._screen.mark(self._mark)
            self._mark = None
        self._screen.write(piece)

    def _end(self) -> None:
        if self._mark is not None:
            self._screen.mark(self._mark)

    def summary(self) -> str:
        """Return the figures of the answer in a line."""
        tokens = counted(self.num_tokens, "token")
        if self.first_token_s is None:
            return f"{tokens}, {self.seconds:.2f} s"
        decode_s = self.seconds - self.first_token_s
        speed = f", {(self.num_tokens - 1) / decode_s:.1f} tokens/s" if self.num_tokens > 1 and decode_s > 0 else ""
        return f"{tokens}{speed}, first token after {self.first_token_s:.2f} s, {self.seconds:.2f} s in all"
