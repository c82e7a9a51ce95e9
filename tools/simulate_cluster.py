"""Simulate requests over 1 to 1,000 cores: the client's router beside round-robin, least-requests and an oracle.

A step takes the time of a model that is fitted to recorded steps of a real core (`--record` records them: the default
model, one thread of this machine's processor). Requests are drawn, or read from a trace: Azure's (CSV with TIMESTAMP,
ContextTokens, GeneratedTokens) or Mooncake's (.jsonl with timestamp, input_length, output_length, hash_ids). The same
options and seed give the same figures. A prefix is cached in chunks of 64 tokens. Prompts and answers that do not fit a
core's cache are left out, and counted.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from shared.test_run import commit_of_tree

from vllm_mp import AsyncEngineArgs
from vllm_mp.testing.cluster import (
    POLICIES,
    RECORDED,
    Cluster,
    ClusterOptions,
    CoreLimits,
    Drawing,
    Lengths,
    StepModel,
    TraceRequest,
    at_rate,
    draw,
    errors,
    figures,
    fit,
    load_recorded,
    read,
    table,
)

_MIN_REQUESTS = 2000
_RATE = 0.2


def _positive(text: str) -> float:
    """Return a number from the command line; raises ValueError unless it is above 0."""
    if not (number := float(text)) > 0:
        raise ValueError(text)
    return number


def _count(text: str) -> int:
    """Return a whole number from the command line; raises ValueError unless it is at least 1."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--cores", type=_count, nargs="+", default=[1, 8, 64], help="numbers of cores (1 8 64)")
    made.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES, help="policies (all)")
    made.add_argument(
        "--fronts", type=_count, nargs="+", default=[1], help="numbers of clients that route on their own (1)"
    )
    made.add_argument("--chats-stay", action="store_true", help="let each chat stay with one front")
    made.add_argument("--rate", type=_positive, help="requests per second and core (0.2; with a trace, its own)")
    made.add_argument("--seed", type=int, default=0, help="seed of all that is drawn (%(default)s)")
    made.add_argument("--json", action="store_true", help="print the figures as JSON")
    drawn = made.add_argument_group("drawn requests")
    drawn.add_argument(
        "--requests", type=_count, help=f"number of requests (100 for each core, at least {_MIN_REQUESTS})"
    )
    drawn.add_argument("--prompt", type=_count, default=200, help="median tokens that a user writes (%(default)s)")
    drawn.add_argument("--output", type=_count, default=100, help="median tokens of an answer (%(default)s)")
    drawn.add_argument(
        "--sigma", type=float, default=0.8, help="spread of lengths (log-normal); 0: uniform (%(default)s)"
    )
    drawn.add_argument("--turns", type=_positive, default=3.0, help="mean turns of a chat (%(default)s)")
    drawn.add_argument("--think", type=float, default=20.0, help="mean seconds between turns (%(default)s)")
    drawn.add_argument("--systems", type=int, default=8, help="number of system prompts (%(default)s)")
    drawn.add_argument("--system-tokens", type=int, default=512, help="tokens of a system prompt (%(default)s)")
    drawn.add_argument(
        "--max-tokens", type=_count, default=4096, help="tokens of a request, with its answer (%(default)s)"
    )
    given = made.add_argument_group("requests of a trace")
    given.add_argument("--trace", type=Path, help="file to read requests from")
    cores = made.add_argument_group("cores")
    cores.add_argument("--cache-tokens", type=_count, default=32_768, help="room of a core's KV cache (%(default)s)")
    cores.add_argument(
        "--life", type=float, default=0.0, help="mean seconds until a core dies; 0: none dies (%(default)s)"
    )
    cores.add_argument("--restart", type=float, default=5.0, help="seconds until a dead core is back (%(default)s)")
    cores.add_argument("--spread", action="store_true", help="spread requests that were in the step of a death")
    cores.add_argument("--running-cost", type=float, help="the router's cost of a running completion, in tokens")
    cores.add_argument("--full-cost", type=float, help="the router's cost of a token without room, in tokens")
    cores.add_argument("--steps", type=Path, default=RECORDED, help="recorded steps (those in the repository)")
    cores.add_argument("--record", type=Path, help="record steps of a core into this file, and end")
    cores.add_argument("--model", help="model of which steps are recorded (the default model)")
    cores.add_argument("--quick", action="store_true", help="record few and small cases, to try the tool itself")
    return made


def record(args: argparse.Namespace) -> None:
    """Record steps into a file, and print how well the model fits them."""
    from vllm_mp.testing.cluster.step_recorder import FULL, QUICK, record

    engine_args = AsyncEngineArgs(**{"model": args.model} if args.model else {}, skip_tokenizer_init=True)
    engine_args.max_model_len = 64 if args.quick else 2048
    record(engine_args, args.record, QUICK if args.quick else FULL, commit_of_tree())
    print(described(load_recorded(args.record)))


def described(recording: dict[str, Any]) -> str:
    """Return what a recording is of, and the model that is fitted to it."""
    model = fit(recording["steps"])
    wrong = sorted(errors(model, recording["steps"]).tolist())
    facts = ("model", "dtype", "processor", "threads", "commit", "date")
    return (
        f"steps of {', '.join(f'{name} {recording[name]}' for name in facts)}\n"
        f"a step: {1e3 * model.base:.2f} ms, and {1e3 * model.row:.3f} ms for a decode, "
        f"{1e6 * model.context:.2f} us for a token in its cache, {1e3 * model.read:.3f} ms for a prompt token, "
        f"{1e6 * model.pair:.3f} us for a pair; "
        f"errors: median {wrong[len(wrong) // 2]:.1%}, 90th percentile {wrong[len(wrong) * 9 // 10]:.1%}"
    )


def requests(args: argparse.Namespace, num_cores: int) -> list[TraceRequest]:
    """Return the requests for a number of cores, in the order of their arrivals."""
    if args.trace is not None:
        found = read(args.trace)
        return found if args.rate is None else at_rate(found, args.rate * num_cores)
    drawing = Drawing(
        num_requests=args.requests or max(_MIN_REQUESTS, 100 * num_cores),
        rate=(args.rate or _RATE) * num_cores,
        prompt=Lengths(args.prompt, args.sigma),
        output=Lengths(args.output, args.sigma),
        turns=args.turns,
        think_s=args.think,
        num_systems=args.systems,
        system_tokens=args.system_tokens,
        max_tokens=min(args.max_tokens, args.cache_tokens),
    )
    return draw(drawing, args.seed)


def simulate(args: argparse.Namespace, model: StepModel, budget: int) -> list[dict[str, Any]]:
    """Return the figures of each number of cores and fronts and each policy."""
    limits = CoreLimits(args.cache_tokens, budget, restart_s=args.restart)
    costs = {"running_cost": args.running_cost, "full_cost": args.full_cost}
    given = {name: cost for name, cost in costs.items() if cost is not None}
    records = []
    for num_cores in args.cores:
        found = requests(args, num_cores)
        fitting = [request for request in found if request.num_prompt + request.num_output <= args.cache_tokens]
        if not fitting:
            raise ValueError(f"no request of {args.trace} fits --cache-tokens={args.cache_tokens}; raise it")
        for num_fronts in args.fronts:
            for policy in args.policies:
                options = ClusterOptions(
                    num_cores=num_cores,
                    model=model,
                    policy=policy,
                    limits=limits,
                    num_fronts=num_fronts,
                    chats_stay=args.chats_stay,
                    mean_life_s=args.life,
                    spreads_exposed=args.spread,
                    seed=args.seed,
                    **given,
                )
                began = time.perf_counter()
                record = figures(options, Cluster(options).run(fitting))
                records.append({**record, "left_out": len(found) - len(fitting)})
                spent = time.perf_counter() - began
                print(f"{num_cores} cores, {num_fronts} fronts, {policy}: {spent:.1f} s", file=sys.stderr)
    return records


def main() -> int:
    args = parser().parse_args()
    if args.record is not None:
        record(args)
        return 0
    recording = load_recorded(args.steps)
    try:
        records = simulate(args, fit(recording["steps"]), recording["max_num_batched_tokens"])
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(records, indent=1))
    else:
        print(f"{described(recording)}\n\n{table(records)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
