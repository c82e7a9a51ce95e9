"""Measure what the client's statistics cost: processor time per message, per token and per request, without a core.

Each case is a number of running requests. "same": each message has a token for the same requests. "changing": each
message leaves out another request than the message before. "recorded": the same, while a stat logger wants records, of
which each has 100 messages. The figures are the lowest of several rounds, because other
work on the machine only adds to them.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

from vllm_mp import wire
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.stream import GenerationStream
from vllm_mp.client.prompts.request import GenerationRequest
from vllm_mp.client.stats import EngineStats
from vllm_mp.requests.sampling_params import SamplingParams

_ROUNDS = 7
_MESSAGES = 300
"""Messages of a round."""
_MESSAGES_OF_A_RECORD = 100


def message(slots: Sequence[int], queued: Sequence[tuple[int, float]] = ()) -> wire.StepOutput:
    """Return a message with a token for each of `slots`."""
    zeros = np.zeros(len(slots), np.int64)
    return wire.StepOutput(1, 1, *wire.pack_tokens(np.array(slots), zeros, zeros), queued=list(queued))


def ended_stream(slot: int) -> GenerationStream:
    """Return the stream of a request with 5 tokens that has ended in `slot`."""
    params = SamplingParams(max_tokens=5)
    completion = Completion(0, params)
    completion.slot, completion.token_ids = slot, [0] * 5
    completion.finish = wire.Finished(slot, 5, "length")
    return GenerationStream(GenerationRequest(str(slot), None, [1, 2, 3], b"", params, time.time()), [completion])


def lowest(work: Callable[[], None]) -> float:
    """Return the lowest processor time of a round of `work`, in microseconds."""
    times = []
    for _ in range(_ROUNDS):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return 1e6 * min(times)


def per_message(num_requests: int, changing: bool, recorded: bool) -> float:
    """Return the microseconds that a message costs."""
    stats = EngineStats(max_model_len=8192)
    if recorded:
        stats.begin_records(lambda: None)
    slots = range(num_requests)
    messages = [
        message([slot for slot in slots if slot != number % num_requests or not changing])
        for number in range(_MESSAGES)
    ]

    def receive() -> None:
        for number, each in enumerate(messages):
            stats.note_step(each)
            if recorded and number % _MESSAGES_OF_A_RECORD == 0:
                stats.take_record()

    return lowest(receive) / _MESSAGES


def per_request(num_requests: int) -> float:
    """Return the microseconds that a request costs: sent, first token, end."""
    stats = EngineStats(max_model_len=8192)
    streams = [ended_stream(slot) for slot in range(num_requests)]
    first = message(range(num_requests), [(slot, 0.1) for slot in range(num_requests)])
    now = time.time()

    def run() -> None:
        for stream in streams:
            stats.note_sent(stream, now, {})
        stats.note_step(first)
        for stream in streams:
            stats.note_end(stream)

    return lowest(run) / num_requests


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{'requests':>8}  {'kind':<18}{'us a message':>14}{'ns a token':>12}")
    for num_requests, changing, recorded in itertools.product((256, 1024), (False, True), (False, True)):
        cost = per_message(num_requests, changing, recorded)
        kind = ("changing" if changing else "same") + (" recorded" if recorded else "")
        print(f"{num_requests:>8,}  {kind:<18}{cost:>14.2f}{1e3 * cost / num_requests:>12.2f}")
    print(f"a request: {per_request(256):.1f} us")


if __name__ == "__main__":
    main()
