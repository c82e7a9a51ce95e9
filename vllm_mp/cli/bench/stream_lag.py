"""The lag of the event loop while streams of a replay core run, each of them read by a task of its own."""

import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mp.cli.bench.heartbeat import Heartbeat, heartbeat
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams

_MEMORY_INTERVAL_S = 0.05


class StreamLoad(NamedTuple):
    """Streams that a replay core sends at a rate."""

    streams: int
    rate: int
    """Tokens per second of all streams."""
    seconds: int
    logprobs: int | None = None
    """Number of tokens with log-probabilities beside each token; None: no log-probabilities."""


def measure_stream_lag(model: str, load: StreamLoad) -> dict[str, float]:
    """Run the streams, print the lag and the memory of this process, and return them."""
    import uvloop

    from vllm_mp.client.async_llm import AsyncLLM

    with tempfile.TemporaryDirectory(prefix="vllm_mp-") as folder:
        address = f"ipc://{folder}/core.sock"
        command = [sys.executable, "-m", "vllm_mp.replay_core", "--listen", address]
        process = subprocess.Popen([*command, "--model", model, "--rate", f"{load.rate / load.streams}"])
        try:
            llm = AsyncLLM.connect(address)
            try:
                lag: dict[str, float] = uvloop.run(_read_streams(llm, load))
                return lag
            finally:
                llm.shutdown()
        finally:
            process.terminate()
            process.wait()


async def _read_streams(llm: Any, load: StreamLoad) -> dict[str, float]:
    params = SamplingParams(
        temperature=0,
        max_tokens=load.seconds * load.rate // load.streams,
        ignore_eos=True,
        logprobs=load.logprobs,
        output_kind=RequestOutputKind.DELTA,
    )
    prompts = [{"prompt_token_ids": [number % 1000 + 3, number // 1000 + 3]} for number in range(load.streams)]
    num_outputs = 0
    memory = peak = _resident_mb()

    async def watch_memory() -> None:
        nonlocal peak
        while True:
            peak = max(peak, _resident_mb())
            await asyncio.sleep(_MEMORY_INTERVAL_S)

    async def read(stream: AsyncGenerator[Any, None]) -> int:
        nonlocal num_outputs
        num_tokens = 0
        async for output in stream:
            num_outputs += 1
            num_tokens += len(output.outputs[0].token_ids)
        return num_tokens

    start, cpu = time.perf_counter(), time.process_time()
    streams = [await llm.add_request(None, prompt, params) for prompt in prompts]
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(f"{load.streams} requests sent in {seconds:.2f} s, with {1e6 * cpu / load.streams:.0f} µs of processor time")
    start, cpu = time.perf_counter(), time.process_time()
    watching = asyncio.create_task(watch_memory())
    async with heartbeat() as beat:
        totals = await asyncio.gather(*[read(stream) for stream in streams])
    watching.cancel()
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(
        f"their streams: {sum(totals) / wall:,.0f} tokens/s in all, {sum(totals) / num_outputs:.1f} tokens per output, "
        f"{100 * cpu / wall:.0f} % of a processor core"
    )
    print(f"resident memory: {memory:.0f} MB before, {peak:.0f} MB at most")
    lag = report_lag("the streams", beat, f"{wall:>10.1f}")
    return {**lag, "tokens_per_output": sum(totals) / num_outputs, "before_mb": memory, "peak_mb": peak}


def report_lag(name: str, beat: Heartbeat, more: str) -> dict[str, float]:
    """Print a row with the lag, and return the lag."""
    lag = beat.lag
    print(f"{name:<44}{lag.p50:>8.2f}{lag.p99:>8.2f}{lag.max:>8.2f}{lag.p99_busy:>10.2f}{more}")
    return lag._asdict()


def print_lag_header(more: str = "") -> None:
    """Print the names of the columns of `report_lag`."""
    print(f"{'lag of the event loop, ms':<44}{'p50':>8}{'p99':>8}{'max':>8}{'p99 busy':>10}{'seconds':>10}{more}")


def _resident_mb() -> float:
    """Return the resident memory of this process."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * resource.getpagesize() / 2**20
