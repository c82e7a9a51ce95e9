"""Prompts of a file for `vllm-mp generate --prompts`: what lines say, and when results are written."""

import asyncio
import io
import json
import os
from types import SimpleNamespace

import pytest

from vllm_mp import EngineDeadError, SamplingParams
from vllm_mp.cli.generate_lines import LIVE_PER_SEQ, LineGenerator
from vllm_mp.cli.prompt_file import prompt_lines
from vllm_mp.client.blocking.progress_bar import ProgressBar
from vllm_mp.outputs import CompletionOutput, RequestOutput
from vllm_mp.testing.engines import eventually

MAX_SEQS = 2


class Engine:
    """A stand-in for an engine: a prompt is answered with itself when the test lets it end."""

    def __init__(self):
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=MAX_SEQS))
        self.chat_template = self
        self.live = {}
        """An event for each live prompt."""
        self.params = []
        self.ends_at_once = False
        self.changed = asyncio.Event()
        """Set at each start and end of a prompt."""

    async def render(self, messages):
        return f"<{messages[-1]['content']}>"

    async def generate(self, prompt, params, **_):
        if prompt == "fails":
            raise ValueError("it fails")
        if prompt == "dies":
            raise EngineDeadError("the core is dead")
        self.params.append(params)
        assert len(self.live) < LIVE_PER_SEQ * MAX_SEQS
        end = self.live[prompt] = asyncio.Event()
        self.changed.set()
        try:
            if not self.ends_at_once:
                await end.wait()
        finally:
            del self.live[prompt]
            self.changed.set()
        completion = CompletionOutput(0, f"{prompt}!\ufffd", [4, 5], finish_reason="length")
        yield RequestOutput("id", prompt, [1, 2, 3], None, [completion], True)

    async def has_started(self, *prompts):
        while not self.live.keys() >= set(prompts):
            self.changed.clear()
            await self.changed.wait()

    async def has_ended(self, *prompts):
        while self.live.keys() & set(prompts):
            self.changed.clear()
            await self.changed.wait()


def lines_of(engine, chat=False):
    return LineGenerator(engine, SamplingParams(max_tokens=7), ProgressBar(False, None), chat=chat, lora=None)


def read(*lines):
    """Return what the lines of a file are read as."""

    async def read():
        return [line async for line in prompt_lines(io.BytesIO(b"\n".join(lines)))]

    return asyncio.run(read())


def answered(capsys):
    """Return the results that were written since the last call."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_lines_of_a_text_are_prompts_and_empty_lines_are_none():
    lines = read("\ufeffé first\r".encode(), b"", b" ", b" {second", b"\xff")
    assert [(line.number, line.id, line.prompt) for line in lines[:2]] == [(1, 1, "é first"), (4, 4, " {second")]
    assert "not UTF-8 (byte 0xff at 0)" in str(lines[2].error)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"plain text", "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b"{}", "either prompt or messages"),
        (b'{"prompt": "x", "messages": []}', "either prompt or messages"),
        (b'{"messages": "x"}', "must be a list of messages"),
        (b'{"prompt": "x", "id": [1]}', "id must be a string or an integer"),
        (b'{"prompt": "x", "temprature": 1}', "unknown field 'temprature'"),
        (b'{"prompt": "x", "n": 2}', "unknown field 'n'"),
    ],
)
def test_json_line_that_is_no_prompt_has_an_error(line, words):
    good, bad = read(b'{"prompt": "x", "id": "a", "top_k": 3}', line)
    assert (good.id, good.prompt, good.sampling, good.error) == ("a", "x", {"top_k": 3}, None)
    assert words in str(bad.error)
    assert bad.id == 2


def test_results_are_in_the_order_of_the_lines_and_a_failure_stands_in_its_place(capsys):
    async def run():
        engine = Engine()
        lines = [
            {"prompt": "a", "id": "first"},
            {"prompt": "fails"},
            {"messages": [{"role": "user", "content": "c"}]},
            {"prompt": "d", "max_tokens": 2, "top_p": 9},
            {"prompt": "e", "max_tokens": 2},
        ]
        data = "\n".join(map(json.dumps, lines)).encode()
        task = asyncio.create_task(lines_of(engine).run(io.BytesIO(data)))
        await engine.has_started("a", "<c>", "e")
        for prompt in ("e", "<c>"):
            engine.live[prompt].set()
        await engine.has_ended("e", "<c>")
        assert answered(capsys) == []
        engine.live["a"].set()
        await task
        return [params.max_tokens for params in engine.params]

    assert asyncio.run(run()) == [7, 7, 2]
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    end = {"finish_reason": "length", "usage": usage}
    results = answered(capsys)
    assert results[0] == {"id": "first", "prompt": "a", "text": "a!", **end}
    assert results[1] == {"id": 2, "prompt": "fails", "error": "it fails"}
    assert results[2] == {"id": 3, "messages": [{"role": "user", "content": "c"}], "text": "<c>!", **end}
    assert "top_p" in results[3]["error"]
    assert results[4] == {"id": 5, "prompt": "e", "text": "e!", **end}


def test_chat_makes_a_message_of_each_prompt(capsys):
    async def run():
        engine = Engine()
        engine.ends_at_once = True
        await lines_of(engine, chat=True).run(io.BytesIO(b"a"))

    asyncio.run(run())
    (result,) = answered(capsys)
    assert (result["prompt"], result["text"]) == ("a", "<a>!")


def test_a_limited_number_of_prompts_is_live_however_many_there_are(capsys):
    async def run():
        engine = Engine()
        task = asyncio.create_task(
            lines_of(engine).run(io.BytesIO(b"".join(b"%d\n" % number for number in range(200))))
        )
        await engine.has_started(*map(str, range(LIVE_PER_SEQ * MAX_SEQS)))  # which also asserts the limit
        engine.ends_at_once = True
        for end in list(engine.live.values()):
            end.set()
        await task

    asyncio.run(run())
    assert [result["id"] for result in answered(capsys)] == list(range(1, 201))


def test_interruption_keeps_all_results_that_were_finished(capsys):
    async def run():
        engine = Engine()
        task = asyncio.create_task(lines_of(engine).run(io.BytesIO(b"a\nb\nc\nd\ne")))
        await engine.has_started("a", "b", "c", "d")
        engine.live["a"].set()
        engine.live["c"].set()
        await engine.has_started("e")
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert engine.live == {}, "all requests were aborted"

    asyncio.run(run())
    assert [result["prompt"] for result in answered(capsys)] == ["a", "c"]


def test_result_that_is_finished_at_the_moment_of_the_interruption_is_kept(capsys):
    async def run():
        engine = Engine()
        task = asyncio.create_task(lines_of(engine).run(io.BytesIO(b"a\nb")))
        await engine.has_started("a", "b")
        engine.live["a"].set()
        await engine.has_ended("a")  # the run has not been woken yet
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert [result["prompt"] for result in answered(capsys)] == ["a"]


def test_result_is_written_while_the_next_line_has_not_come_yet(capsys):
    reader, writer = os.pipe()

    async def run():
        engine = Engine()
        engine.ends_at_once = True
        task = asyncio.create_task(lines_of(engine).run(os.fdopen(reader, "rb")))
        os.write(writer, b"a\n")
        results = []

        async def has_result():
            results.extend(answered(capsys))
            return results

        await eventually(has_result)
        assert results[0]["text"] == "a!"
        os.close(writer)
        await task

    asyncio.run(run())


def test_death_of_the_engine_ends_the_reading_and_is_raised_after_the_results(capsys):
    async def run():
        engine = Engine()
        engine.ends_at_once = True
        await lines_of(engine).run(io.BytesIO(b"a\ndies\n" + b"b\n" * 1000))

    with pytest.raises(EngineDeadError, match="the core is dead"):
        asyncio.run(run())
    results = answered(capsys)
    assert [result["prompt"] for result in results[:2]] == ["a", "dies"]
    assert results[1]["error"] == "the core is dead"
    assert len(results) < 1000
