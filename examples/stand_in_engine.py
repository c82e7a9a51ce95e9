"""Test an app without an engine: a stand-in has the methods of `EngineClient` and gives the answer that a test chooses.

pytest examples/stand_in_engine.py
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from unittest.mock import create_autospec

from vllm_mp import CompletionOutput, EngineClient, RequestOutput, SamplingParams


async def headline(engine: EngineClient, topic: str) -> str:
    """Return the first line that the model writes about `topic`. This is the app."""
    async for output in engine.generate(f"A headline about {topic}:", SamplingParams(max_tokens=32), topic):
        text = output.outputs[0].text
        if "\n" in text:
            break
    return text.partition("\n")[0]


def engine_that_answers(text: str) -> Any:
    """Return a stand-in that streams `text` word by word. Its other methods do nothing, and record their calls."""

    async def generate(
        prompt: str, sampling_params: SamplingParams, request_id: str, **_: object
    ) -> AsyncGenerator[RequestOutput, None]:
        words = text.split(" ")
        for count in range(1, len(words) + 1):
            is_last = count == len(words)
            completion = CompletionOutput(
                0, " ".join(words[:count]), list(range(count)), finish_reason="stop" if is_last else None
            )
            yield RequestOutput(request_id, prompt, [], None, [completion], is_last)

    engine = create_autospec(EngineClient, instance=True)
    engine.generate.side_effect = generate
    return engine


def test_headline_is_the_first_line() -> None:
    engine = engine_that_answers("Bern is\nthe capital")
    assert asyncio.run(headline(engine, "Bern")) == "Bern is"
    assert engine.generate.call_args.args[0] == "A headline about Bern:"
