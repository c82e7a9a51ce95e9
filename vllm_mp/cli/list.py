"""The command `list`: the models in the cache."""

import argparse
import json
import sys
import time
from pathlib import Path

from vllm_mp.cli.terminal.table import duration_text, print_table, size_text

USAGE = "[--json]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print a JSON list, with sizes in bytes and times in seconds since 1970. Default: a table.",
    )


def run(args: argparse.Namespace) -> int:
    """Print the models and return 0, also if there are none."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from vllm_mp.model_store import cache_root
    from vllm_mp.model_store.entries import cache_entries

    entries = cache_entries(cache_root(), Path(HF_HUB_CACHE))
    if args.json:
        print(json.dumps([{**entry._asdict(), "folder": str(entry.folder)} for entry in entries], indent=2))
        return 0
    if not entries:
        print(f"no models in {cache_root()}; `vllm-mp pull MODEL` fetches one", file=sys.stderr)
        return 0
    now = time.time()
    rows = [
        (entry.name, size_text(entry.size), entry.format, f"{duration_text(max(0.0, now - entry.last_use))} ago")
        for entry in entries
    ]
    print_table(("NAME", "SIZE", "FORMAT", "LAST USE"), rows)
    return 0
