"""Signs of life while an answer is awaited: a restart of the engine is shown at once, not with the next token."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from vllm_mp.cli.terminal.screen import Screen

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM
    from vllm_mp.outputs import RequestOutput

_LOOK_S = 0.1
"""Time between two looks at the engine while no output arrives."""


async def with_restarts_shown(
    llm: "AsyncLLM", outputs: "AsyncIterator[RequestOutput]", screen: Screen
) -> "AsyncGenerator[RequestOutput, None]":
    """Yield `outputs`; write a mark to `screen` when the engine restarts, and the seconds it took when it goes on."""
    restarts = llm.last_core_status().get("restarts")
    while True:
        began, is_shown = time.monotonic(), False
        awaited = asyncio.ensure_future(anext(outputs, None))
        try:
            while not (await asyncio.wait({awaited}, timeout=_LOOK_S))[0]:
                if not is_shown and llm.last_core_status().get("state") == "RECOVERING":
                    is_shown = True
                    screen.mark("· the engine restarts …")
        finally:
            if not awaited.done():
                awaited.cancel()
                await asyncio.wait({awaited})
        output = awaited.result()
        if output is None:
            return
        former, restarts = restarts, llm.last_core_status().get("restarts")
        if restarts != former and not is_shown:  # between two looks
            is_shown = True
            screen.mark("· the engine restarts …")
        if is_shown:
            screen.mark(f"{time.monotonic() - began:.1f} s ·")
        yield output
