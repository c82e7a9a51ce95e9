"""The load of `vllm-mp bench frontend`: streams from a replay core, and consumers that check what they get."""

import asyncio
import contextlib
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_mp.replay_core.answers import Answers
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM

_ROUND_TIMEOUT_S = 120
_WHOLE_TOKEN = 300
"""A token of whole characters. Half a character at the end of a prompt would belong to the answer."""


class Round(NamedTuple):
    """What a round of streams cost."""

    num_tokens: int
    num_outputs: int
    wall_s: float
    cpu_s: float
    """Processor time of all threads of this process."""


class Replay(NamedTuple):
    """A replay core that waits until a step is taken before it sends the next."""

    address: str
    taken: "memoryview[int]"
    """[1]: the number of steps that the consumer has taken."""


@contextlib.contextmanager
def replay(cpu: int | None, *flags: str) -> Iterator[Replay]:
    """Run a replay core, on the processor `cpu` unless it is None."""
    with tempfile.TemporaryDirectory(prefix="vllm_mp-") as folder:
        counter = Path(folder, "taken")
        counter.write_bytes(bytes(8))
        with counter.open("r+b") as file:
            taken = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")
        address = f"ipc://{folder}/core.sock"
        command = [sys.executable, "-m", "vllm_mp.replay_core", "--listen", address, "--taken", str(counter), *flags]
        process = subprocess.Popen(command)
        try:
            if cpu is not None:
                os.sched_setaffinity(process.pid, {cpu})
            yield Replay(address, taken)
        finally:
            process.terminate()
            process.wait()


class Load:
    """Rounds of `num_streams` streams of `num_tokens` tokens; all begin with the same step."""

    def __init__(self, llm: "AsyncLLM", core: Replay, num_streams: int, num_tokens: int) -> None:
        self._llm = llm
        self._taken = core.taken
        self._num_tokens = num_tokens
        self._prompts = [[number % 40_000 + 3, number // 40_000 + 3, _WHOLE_TOKEN] for number in range(num_streams)]
        self._expected = self._expected_texts()
        self._num_outputs = 0

    async def run(self, by_group: bool, kind: RequestOutputKind) -> Round:
        """Run a round; a single consumer reads all streams as a group, or each stream has a consumer of its own.

        Raises RuntimeError if a stream has another text than the recorded one.
        """
        await self._llm.pause_generation("keep")
        self._num_outputs = 0
        params = SamplingParams(temperature=0, max_tokens=self._num_tokens, ignore_eos=True, output_kind=kind)
        consumer = asyncio.create_task(self._read_group(params) if by_group else self._read_each(params))
        while (status := await self._llm.core_status())["num_waiting"] < len(self._prompts) and not consumer.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self._taken[0] = status["step"]
        cpu, wall = time.process_time(), time.perf_counter()
        await self._llm.resume_generation()
        async with asyncio.timeout(_ROUND_TIMEOUT_S):
            pieces = await consumer
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        join: Callable[[list[str]], str] = "".join if kind == RequestOutputKind.DELTA else lambda texts: texts[-1]
        texts = [join(stream) for stream in pieces]
        wrong = sum(text != expected for text, expected in zip(texts, self._expected, strict=True))
        if wrong:
            raise RuntimeError(f"{wrong} of {len(texts)} streams have another text than was sent")
        return Round(len(texts) * self._num_tokens, self._num_outputs, wall, cpu)

    async def first_output_s(self) -> float:
        """Return the seconds from sending a request to its first output, with no other request."""
        params = SamplingParams(temperature=0, max_tokens=1, output_kind=RequestOutputKind.DELTA)
        self._taken[0] = 2**62
        start = time.perf_counter()
        async for _ in self._llm.generate({"prompt_token_ids": self._prompts[0]}, params):
            break
        return time.perf_counter() - start

    async def _read_each(self, params: SamplingParams) -> list[list[str]]:
        """Return the texts of the outputs of each stream; each stream has a task of its own."""
        llm, taken = self._llm, self._taken

        async def read(prompt: list[int]) -> list[str]:
            texts: list[str] = []
            async for output in llm.generate({"prompt_token_ids": prompt}, params):
                texts.append(output.outputs[0].text)  # noqa: PERF401, an asynchronous comprehension costs the same
            self._num_outputs += len(texts)
            return texts

        async def read_and_count(prompt: list[int]) -> list[str]:
            """Read as the others do, and let the core send the next step: this stream is woken after the others."""
            texts: list[str] = []
            before = 0
            is_delta = params.output_kind == RequestOutputKind.DELTA
            async for output in llm.generate({"prompt_token_ids": prompt}, params):
                texts.append(output.outputs[0].text)
                count = len(output.outputs[0].token_ids)
                taken[0] += count if is_delta else count - before
                before = count
            self._num_outputs += len(texts)
            return texts

        *others, last = self._prompts
        return await asyncio.gather(*map(read, others), read_and_count(last))

    async def _read_group(self, params: SamplingParams) -> list[list[str]]:
        """Return the texts of the outputs of each stream, which this task reads as a group."""
        texts: dict[str, list[str]] = {}
        is_delta = params.output_kind == RequestOutputKind.DELTA
        before = 0
        async with self._llm.stream_group() as group:
            for prompt in self._prompts:
                texts[await group.add({"prompt_token_ids": prompt}, params)] = []
            async for outputs in group:
                count = len(outputs[0].outputs[0].token_ids)
                self._taken[0] += count if is_delta else count - before
                before = count
                for output in outputs:
                    texts[output.request_id].append(output.outputs[0].text)
                self._num_outputs += len(outputs)
        return list(texts.values())

    def _expected_texts(self) -> list[str]:
        answers, decode = Answers(), self._llm.get_tokenizer().decode
        params: Any = SamplingParams(temperature=0, ignore_eos=True)
        chosen = [
            answers.choose(np.asarray(prompt, np.int32), params, self._num_tokens, []) for prompt in self._prompts
        ]
        text_of = {
            number: decode(answers.prefix(number, self._num_tokens).tolist(), skip_special_tokens=True)
            for number in {answer.number for answer in chosen}
        }
        return [text_of[answer.number] for answer in chosen]
