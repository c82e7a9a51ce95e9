"""Measure the choice of a core for a request: processor time per request, without a core.

Each case is a number of cores, a length of the prompts, and how much of each prompt the caches hold. A request costs
the hashes of its prompt, the choice, and the notes that it was sent, was read and has ended. The figures are the lowest
of several rounds, because other work on the machine only adds to them.
"""

import argparse
import time

import numpy as np

from vllm_mp import wire
from vllm_mp.client.cores.router import RoutedRequest, Router, prefix_hashes

_ROUNDS = 7
_REQUESTS = 400
"""Requests of a round."""
_CACHE_TOKENS = 200_000


def per_request(num_cores: int, num_tokens: int, shared: float) -> float:
    """Return the microseconds that a request of `num_tokens` costs, of which `shared`, 0 to 1, is a common prefix."""
    chance = np.random.default_rng(0)
    prompts = chance.integers(0, 50_000, (_REQUESTS, num_tokens))
    prompts[:, : int(shared * num_tokens)] = prompts[0, : int(shared * num_tokens)]
    packed = [wire.pack_ids(prompt.tolist()) for prompt in prompts]
    cores, times = range(num_cores), []
    for _ in range(_ROUNDS):
        router = Router()
        for core in cores:
            router.add_core(core, _CACHE_TOKENS)
        began = time.thread_time()
        placements = []
        for prompt in packed:
            request = RoutedRequest(num_tokens, 1, prefix_hashes(prompt, ("", None)))
            placements.append(router.place(request, router.choose(request, cores)))
        for placement in placements:
            router.note_read(placement)
            router.note_end(placement, was_read=True)
        times.append(time.thread_time() - began)
    return 1e6 * min(times) / _REQUESTS


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{'cores':>6}{'tokens':>8}{'shared':>8}{'us a request':>14}")
    for num_cores, num_tokens in ((2, 1000), (8, 100), (8, 1000), (8, 8000), (100, 1000), (1000, 1000)):
        for shared in (0.0, 0.9):
            print(f"{num_cores:>6,}{num_tokens:>8,}{shared:>8.0%}{per_request(num_cores, num_tokens, shared):>14.1f}")


if __name__ == "__main__":
    main()
