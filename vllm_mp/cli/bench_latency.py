"""How fast a batch of equal requests is answered."""

import argparse
import dataclasses
import json
import os
import random
from pathlib import Path

from vllm_mp.cli.load import LoadRequest, decode_rate, random_prompt, run_load, spread
from vllm_mp.engine_args import AsyncEngineArgs

HELP = "time to first token, time between tokens and tokens per second of a batch of equal requests"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=1, help="requests at once (%(default)s)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of each answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    import uvloop

    from vllm_mp.client.async_llm import AsyncLLM

    for name in ("batch_size", "input_len", "output_len", "rounds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    given = AsyncEngineArgs.from_cli_args(args)
    engine_args = dataclasses.replace(
        given,
        disable_log_requests=True,
        skip_tokenizer_init=True,
        max_num_seqs=max(given.max_num_seqs or 256, args.batch_size),
    )
    chance = random.Random(0)
    firsts, gaps, rates, seconds = [], [], [], []
    llm = AsyncLLM.from_engine_args(engine_args)
    try:
        vocab_size = llm.model_config.get_vocab_size()
        for turn in range(1 + args.rounds):
            requests = [
                LoadRequest(random_prompt(chance, vocab_size, args.input_len), args.output_len)
                for _ in range(args.batch_size)
            ]
            timelines = uvloop.run(run_load(llm, requests))
            if turn == 0:
                continue
            firsts += [one.first_token_s for one in timelines]
            gaps += [gap for one in timelines for gap in one.gaps]
            seconds.append(max(one.tokens[-1] for one in timelines))
            if args.output_len > 2:
                rates.append(decode_rate(timelines))
    finally:
        llm.shutdown()
    tokens = args.batch_size * args.output_len
    figures = {
        "time to first token, ms": spread([1000 * one for one in firsts]),
        "between tokens, ms": spread([1000 * one for one in gaps]) if gaps else None,
        "decode, tokens/s": spread(rates) if rates else None,
        "prompt to last token, s": spread(seconds),
        "output tokens/s": spread([tokens / one for one in seconds]),
    }
    print(f"{args.batch_size} x {args.input_len} tokens in, {args.output_len} out, {args.rounds} rounds")
    print(f"{'':<26}{'median':>10}{'min':>10}{'max':>10}")
    for name, row in figures.items():
        if row is not None:
            print(f"{name:<26}" + "".join(f"{value:>10.2f}" for value in row.values()))
    if args.json:
        setting = {"model": args.model, "cores": os.cpu_count(), "batch_size": args.batch_size}
        setting |= {"input_len": args.input_len, "output_len": args.output_len, "rounds": args.rounds}
        args.json.write_text(json.dumps({**setting, **figures}, indent=2) + "\n")
    return 0
