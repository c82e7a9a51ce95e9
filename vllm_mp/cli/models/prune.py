"""The command `prune`: remove what no engine can use any more from the cache."""

import argparse
import sys
from pathlib import Path

from vllm_mp.cli.models.rm import check_unused, confirmed
from vllm_mp.cli.terminal.table import print_table, size_text

USAGE = "[--yes]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", "-y", action="store_true", help="Remove without a question. Default: off.")


def run(args: argparse.Namespace) -> int:
    """Remove the entries whose model is gone; return 0, also if there are none, or 1 if the user says no."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from vllm_mp.cli.running_engines import running_engines
    from vllm_mp.model_store import cache_root
    from vllm_mp.model_store.entries import cache_entries, dead_reason, remove_entry

    dead = [
        (entry, reason)
        for entry in cache_entries(cache_root(), Path(HF_HUB_CACHE))
        if (reason := dead_reason(entry, cache_root()))
    ]
    if not dead:
        print("nothing to remove", file=sys.stderr)
        return 0
    engines = running_engines()
    for entry, _ in dead:
        if entry.target is None:
            check_unused(entry, engines)
    print_table(
        ("NAME", "SIZE", "WHY"),
        [(entry.name, size_text(entry.size + entry.packed_size), reason) for entry, reason in dead],
    )
    total = size_text(sum(entry.size + entry.packed_size for entry, _ in dead))
    if not args.yes and not confirmed(f"these {len(dead)} ({total})"):
        return 1
    for entry, _ in dead:
        remove_entry(entry)
    print(f"removed {len(dead)} ({total})")
    return 0
