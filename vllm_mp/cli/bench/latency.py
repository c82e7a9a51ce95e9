"""The benchmark of latency: batches of equal requests, one batch after the other."""

import argparse
import dataclasses
import os
import random

from vllm_mp.cli.bench.drafts import print_drafts, read_drafts
from vllm_mp.cli.bench.flags import add_json_flag, check_lengths, positive_integer, write_json
from vllm_mp.cli.bench.load_generator import LoadRequest, decode_rate, random_prompt, run_load, spread
from vllm_mp.cli.bench.progress import progress
from vllm_mp.config.engine_args import AsyncEngineArgs

USAGE = "[OPTIONS]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = positive_integer
    parser.add_argument(
        "--batch-size", type=size, default=1, metavar="N", help="Send N requests at a time. Default: %(default)s."
    )
    parser.add_argument(
        "--input-len", type=size, default=128, metavar="N", help="Make prompts of N tokens. Default: %(default)s."
    )
    parser.add_argument(
        "--output-len", type=size, default=128, metavar="N", help="Make completions of N tokens. Default: %(default)s."
    )
    parser.add_argument(
        "--rounds",
        type=size,
        default=5,
        metavar="N",
        help="Measure N batches, after a batch of warm-up. Default: %(default)s.",
    )
    add_json_flag(parser)
    AsyncEngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    import uvloop

    from vllm_mp.client.async_llm import AsyncLLM

    given = AsyncEngineArgs.from_cli_args(args)
    engine_args = dataclasses.replace(
        given,
        disable_log_requests=True,
        skip_tokenizer_init=True,
        max_num_seqs=max(given.max_num_seqs or 256, args.batch_size),
    )
    chance = random.Random(0)
    first_tokens, gaps, rates, seconds = [], [], [], []
    config = engine_args.create_engine_config()
    check_lengths(args.input_len, args.output_len, config.model_config.max_model_len)
    llm = AsyncLLM.from_vllm_config(config)
    try:
        vocab_size = llm.model_config.get_vocab_size()
        with progress("rounds", 1 + args.rounds) as count_round:
            for turn in range(1 + args.rounds):
                requests = [
                    LoadRequest(random_prompt(chance, vocab_size, args.input_len), args.output_len)
                    for _ in range(args.batch_size)
                ]
                timelines = uvloop.run(run_load(llm, requests))
                count_round()
                if turn == 0:
                    continue
                first_tokens += [timeline.first_token_s for timeline in timelines]
                gaps += [gap for timeline in timelines for gap in timeline.gaps]
                seconds.append(max(timeline.tokens[-1] for timeline in timelines))
                if args.output_len > 2:
                    rates.append(decode_rate(timelines))
        drafts = uvloop.run(read_drafts(llm))
    finally:
        llm.shutdown()
    num_tokens = args.batch_size * args.output_len
    figures = {
        "time to first token, ms": spread([1000 * first_token for first_token in first_tokens]),
        "between tokens, ms": spread([1000 * gap for gap in gaps]) if gaps else None,
        "decode, tokens/s": spread(rates) if rates else None,
        "prompt to last token, s": spread(seconds),
        "output tokens/s": spread([num_tokens / duration for duration in seconds]),
    }
    print(f"{args.batch_size} x {args.input_len} tokens in, {args.output_len} out, {args.rounds} rounds")
    print(f"{'':<26}{'median':>10}{'min':>10}{'max':>10}")
    for name, row in figures.items():
        if row is not None:
            print(f"{name:<26}" + "".join(f"{value:>10.2f}" for value in row.values()))
    print_drafts(drafts)
    setting = {"model": args.model, "cores": os.cpu_count(), "batch_size": args.batch_size}
    setting |= {"input_len": args.input_len, "output_len": args.output_len, "rounds": args.rounds}
    write_json(args.json, {**setting, **figures, **drafts})
    return 0
