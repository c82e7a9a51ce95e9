"""Many prompts of a file, answered at the same time, and their results as JSON lines in the order of the file."""

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from vllm_mp.cli.chat_text import whole_text
from vllm_mp.cli.prompt_file import PromptLine, prompt_lines
from vllm_mp.client.blocking.progress_bar import ProgressBar
from vllm_mp.errors import EngineDeadError
from vllm_mp.outputs import RequestFailure, RequestOutput
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM

LIVE_PER_SEQ = 2
"""Live prompts for each request of a step: while a step runs, the next requests wait in the core."""
MAX_UNWRITTEN = 4096
"""Largest number of prompts that are live, or whose results wait for that of an earlier line."""


class LineGenerator:
    """Answers the prompts of a file.

    The results of an interrupted run are complete up to a line. After it come those that were finished by then.
    """

    def __init__(
        self, llm: "AsyncLLM", params: SamplingParams, bar: ProgressBar, *, chat: bool, lora: LoRARequest | None
    ) -> None:
        """`params` are the parameters of lines that set no others; with `chat`, a prompt is a message of a user."""
        self.num_written = 0
        """Number of results that were written."""
        self.num_failed = 0
        """Number of these that are errors."""
        self._llm = llm
        self._params = msgspec.structs.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
        self._bar = bar
        self._chat = chat
        self._lora = lora
        self._live = asyncio.Semaphore(LIVE_PER_SEQ * llm.vllm_config.scheduler_config.max_num_seqs)
        self._unwritten = asyncio.Semaphore(MAX_UNWRITTEN)
        self._results: asyncio.Queue[asyncio.Task[dict[str, Any]] | None] = asyncio.Queue()
        """The results in the order of the lines; None after the last."""
        self._death: EngineDeadError | None = None

    async def run(self, file: BinaryIO) -> None:
        """Write the results.

        Raises OSError if the file cannot be read, and EngineDeadError if the core is gone for good.
        """
        feeder = asyncio.create_task(self._feed(file))
        clock = asyncio.create_task(self._refresh_bar())
        waiting: list[asyncio.Task[dict[str, Any]]] = []
        # The task whose result is awaited; after an interruption all tasks whose results are not written.
        try:
            while (task := await self._results.get()) is not None:
                waiting = [task]
                self._write(await task)
                waiting = []
                self._unwritten.release()
            await feeder
        finally:
            feeder.cancel()
            clock.cancel()
            self._bar.close()
            while not self._results.empty():
                if (task := self._results.get_nowait()) is not None:
                    waiting.append(task)
            await self._write_finished(waiting)
        if self._death is not None:
            raise self._death

    async def _refresh_bar(self) -> None:
        """Show every second that the run goes on, because the first results may take long."""
        while True:
            await asyncio.sleep(1)
            self._bar.refresh()

    async def _feed(self, file: BinaryIO) -> None:
        """Start a task for each prompt of the file."""
        try:
            async for line in prompt_lines(file):
                if self._death is not None:
                    break
                await self._unwritten.acquire()
                await self._live.acquire()
                line, prompt = await self._prompt(line)
                # Tasks begin in this order, so that seeds which are drawn from the engine's go to the same lines again.
                task = asyncio.create_task(self._answer(line, prompt))
                task.add_done_callback(lambda _: self._live.release())
                self._results.put_nowait(task)
        finally:
            self._results.put_nowait(None)

    async def _prompt(self, line: PromptLine) -> tuple[PromptLine, Any]:
        """Return the prompt of a line, with the chat template applied if need be; its error is that of the line."""
        messages = line.messages
        if line.error is not None or not (self._chat or messages is not None):
            return line, line.prompt
        if messages is None:
            messages = [{"role": "user", "content": line.prompt}]
        try:
            return line, await self._llm.chat_template.render(messages)
        except ValueError as error:
            return line._replace(error=error), None

    async def _answer(self, line: PromptLine, prompt: Any) -> dict[str, Any]:
        """Return the result of a line."""
        given = {"id": line.id} | ({"prompt": line.prompt} if line.messages is None else {"messages": line.messages})
        try:
            if line.error is not None:
                raise line.error
            output = await self._last_output(line, prompt)
        except Exception as error:
            if isinstance(error, EngineDeadError):
                self._death = error
            self._bar.add(RequestFailure("", error))
            return given | {"error": str(error)}
        self._bar.add(output)
        completion = output.outputs[0]
        num_prompt, num_completion = len(output.prompt_token_ids), len(completion.token_ids)
        return given | {
            "text": whole_text(completion),
            "finish_reason": completion.finish_reason,
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_completion,
                "total_tokens": num_prompt + num_completion,
            },
        }

    async def _last_output(self, line: PromptLine, prompt: Any) -> RequestOutput:
        params = msgspec.structs.replace(self._params, **line.sampling)
        # A chat template writes the special tokens.
        tokenization = {"add_special_tokens": False} if self._chat or line.messages is not None else None
        async for output in self._llm.generate(
            prompt, params, lora_request=self._lora, tokenization_kwargs=tokenization
        ):
            last = output
        return last

    async def _write_finished(self, tasks: list[asyncio.Task[dict[str, Any]]]) -> None:
        """Write the results of the tasks that have ended, and abort the requests of the others."""
        finished = [task for task in tasks if task.done() and not task.cancelled()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in finished:
            self._write(task.result())

    def _write(self, result: dict[str, Any]) -> None:
        """Write a result to standard output at once."""
        sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
        sys.stdout.flush()
        self.num_written += 1
        self.num_failed += "error" in result
