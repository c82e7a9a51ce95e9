"""Measure how the throughput of `vllm-mp serve --api-server-count N` grows with N, over a core that computes nothing.

Short completions are requested over new connections, which the system spreads over the front processes. With fewer
processor cores than processes, `--share` lets each front process run only for that share of the time, so that the front
processes and not the processor cores are what limits the requests per second.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import psutil

from vllm_mp.testing.measuring.http_front import over_replay_core

_PERIOD_S = 0.05
"""Time in which a front process runs once and is stopped once."""
_WARM_UP_S = 1.0


@contextlib.contextmanager
def front_processes(count: int) -> Iterator[tuple[str, list[int]]]:
    """Serve a replay core with `count` front processes; yield the server's URL and their process ids."""
    with over_replay_core("--api-server-count", str(count)) as listening:
        children = psutil.Process(listening.pid).children(recursive=True)
        fronts = [child.pid for child in children if "vllm_mp.server.front.process" in child.cmdline()]
        yield listening.url, fronts or [listening.pid]


@contextlib.contextmanager
def running_for(share: float, pids: list[int]) -> Iterator[None]:
    """Let the processes run only for a share of the time, all at once."""
    if share == 1:
        yield
        return
    ends = threading.Event()

    def throttle() -> None:
        while not ends.is_set():
            for number, seconds in ((signal.SIGSTOP, 1 - share), (signal.SIGCONT, share)):
                for pid in pids:
                    os.kill(pid, number)
                time.sleep(seconds * _PERIOD_S)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


async def requests_per_second(url: str, concurrency: int, seconds: float) -> float:
    """Return the completions per second with `concurrency` requests at a time. Raises RuntimeError for an error."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    count = 0

    async def repeat(end: float) -> None:
        nonlocal count
        while time.monotonic() < end:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request)
            response = await reader.read()
            writer.close()
            if not response.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the server answered {response[:500]!r}")
            count += 1

    async def load(seconds: float) -> None:
        await asyncio.gather(*(repeat(time.monotonic() + seconds) for _ in range(concurrency)))

    await load(_WARM_UP_S)
    count, start = 0, time.monotonic()
    await load(seconds)
    return count / (time.monotonic() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4], help="numbers of front processes (1 2 4)")
    parser.add_argument("--share", type=float, default=1.0, help="share of the time for which each runs (1)")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at a time (64)")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each measurement (5)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in turns (3)")
    args = parser.parse_args()
    figures: dict[int, list[float]] = {count: [] for count in args.counts}
    for _ in range(args.rounds):
        for count, values in figures.items():
            with front_processes(count) as (url, pids), running_for(args.share, pids):
                values.append(asyncio.run(requests_per_second(url, args.concurrency, args.seconds)))
    first = statistics.median(figures[args.counts[0]])
    print("front processes   requests/s: median (lowest-highest)   ratio")
    for count, values in figures.items():
        median = statistics.median(values)
        print(f"{count:15}   {median:18,.0f} ({min(values):,.0f}-{max(values):,.0f})   {median / first:5.2f}")


if __name__ == "__main__":
    main()
