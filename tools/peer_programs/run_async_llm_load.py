"""Send loads through the `AsyncLLMEngine` of a package, vllm or vllm_mp, and record when every token arrived.

`tools/bench` runs this program in the environment of the package, with this repository on its path. Standard input
holds JSON with the package's name, the arguments of its engine and the loads. Each load begins when the one before it
has ended. The timelines of all requests are written as JSON to the file named on the command line.
"""

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from vllm_mp.cli.bench.load_generator import LoadRequest, Timeline, run_load

Load = tuple[list[LoadRequest], dict[str, float]]
"""Requests, and the temperature and top_p with which their tokens are drawn; empty for the most likely tokens."""


async def run_loads(package: str, engine_args: dict[str, Any], loads: list[Load]) -> list[list[Timeline]]:
    """Return the timelines of the requests of each load."""
    engines, api = importlib.import_module(package), importlib.import_module(f"{package}.sampling_params")
    llm = engines.AsyncLLMEngine.from_engine_args(engines.AsyncEngineArgs(**engine_args))
    try:
        return [await run_load(llm, requests, api=api, **draw) for requests, draw in loads]
    finally:
        llm.shutdown()


def main() -> None:
    import uvloop

    task = json.load(sys.stdin)
    task["loads"] = [([LoadRequest(*request) for request in requests], draw) for requests, draw in task["loads"]]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        timelines = runner.run(run_loads(**task))
    Path(sys.argv[1]).write_text(json.dumps(timelines))


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
