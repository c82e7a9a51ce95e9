#!/usr/bin/env python3
"""Compare the native module of a model with transformers' module over the same paged cache, in turns.

Both engines have random weights in the shape of Gemma 3 270M, or of the config.json in --folder. Prints one JSON
object: the tokens per second of each number of streams that decode together, by backend, with an entry for each round.
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any, Final

from vllm_mp import AsyncEngineArgs, AsyncLLM
from vllm_mp.testing.measuring.engine_speed import steady_tokens_per_s, stream_batch

GEMMA_3_270M: Final = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "query_pre_attn_scalar": 256,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
}


def save_configs(config: dict[str, Any], folder: Path) -> dict[str, Path]:
    """Save `config` for each backend; an architecture that has no native module is left to transformers."""
    name = config["architectures"][0]
    folders = {}
    for backend, architecture in (("native", name), ("transformers", f"Transformers{name}")):
        folders[backend] = folder / backend
        folders[backend].mkdir()
        (folders[backend] / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return folders


async def measure(folders: dict[str, Path], args: argparse.Namespace) -> dict[int, dict[str, list[float]]]:
    """Return the tokens per second by number of streams and backend; the first round, to warm up, is left out."""
    length = args.prompt_len + args.output_len
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": length,
        "num_threads": args.num_threads,
        "kv_cache_memory_bytes": args.cache_bytes,
        "max_prefill_slowdown": 0,  # all streams must decode at once
    }
    rates: dict[int, dict[str, list[float]]] = {batch: {name: [] for name in folders} for batch in args.batches}
    async with contextlib.AsyncExitStack() as stack:
        engines = {}
        for name, folder in folders.items():
            engines[name] = AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), **options))
            stack.callback(engines[name].shutdown)
        for number in range(1 + args.rounds):
            for batch, by_name in rates.items():
                for name, engine in engines.items():
                    streams = await stream_batch(engine, batch, args.prompt_len, args.output_len)
                    if number:
                        by_name[name].append(steady_tokens_per_s(streams))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="folder with the config.json of a model that has a native module")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16], help="numbers of streams (1 16)")
    parser.add_argument("--prompt-len", type=int, default=32, help="prompt tokens of each stream (%(default)s)")
    parser.add_argument("--output-len", type=int, default=48, help="output tokens of each stream (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after one to warm up (%(default)s)")
    parser.add_argument("--num-threads", type=int, default=0, help="threads of each core; 0: all (%(default)s)")
    parser.add_argument("--cache-bytes", type=int, default=2**28, help="memory of each KV cache (%(default)s)")
    args = parser.parse_args()
    config = json.loads((args.folder / "config.json").read_text()) if args.folder else GEMMA_3_270M
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(save_configs(config, Path(folder)), args))))


if __name__ == "__main__":
    main()
