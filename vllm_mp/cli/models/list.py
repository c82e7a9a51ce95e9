"""The command `list`: the models in the cache, those that have a name of their own, and those that could be pulled."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mp.cli.terminal.table import duration_text, print_table, size_text

if TYPE_CHECKING:
    from vllm_mp.model_store.entries import CacheEntry
    from vllm_mp.model_store.package import PackagedModel

USAGE = "[--json]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print a JSON list, with sizes in bytes and times in seconds since 1970; a model that could be pulled has "
        "the folder null. Default: tables.",
    )


def run(args: argparse.Namespace) -> int:
    """Print the models and return 0, also if there are none."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from vllm_mp.model_store import PACKAGED_MODELS, cache_root
    from vllm_mp.model_store.entries import cache_entries

    entries = cache_entries(cache_root(), Path(HF_HUB_CACHE))
    fetched = {entry.name for entry in entries}
    pullable = [(alias, model) for alias, model in PACKAGED_MODELS.items() if alias not in fetched]
    if args.json:
        print(json.dumps([*map(_as_json, entries), *(_pullable_as_json(*each) for each in pullable)], indent=2))
        return 0
    if entries:
        print_table(("NAME", "SIZE", "PACKED", "FORMAT", "LAST USE"), [*map(_row, entries)])
    else:
        print(f"no models in {cache_root()}; `vllm-mp pull MODEL` fetches one", file=sys.stderr)
    if pullable:
        print("\n`vllm-mp pull NAME` would fetch:")
        print_table(("NAME", "SIZE", "LICENCE", "WHAT IT DOES"), [_pullable_row(*each) for each in pullable])
    return 0


def _row(entry: "CacheEntry") -> Sequence[str]:
    where = "" if entry.target is None else f", at {entry.target}"
    last_use = f"{duration_text(max(0.0, time.time() - entry.last_use))} ago"
    packed = size_text(entry.packed_size) if entry.packed else "-"
    return entry.name, size_text(entry.size), packed, f"{entry.format}{where}", last_use


def _as_json(entry: "CacheEntry") -> dict[str, Any]:
    return {
        **entry._asdict(),
        "folder": str(entry.folder),
        "packed": [*map(str, entry.packed)],
        "packed_size": entry.packed_size,
        "target": entry.target and str(entry.target),
    }


def _pullable_row(alias: str, model: "PackagedModel") -> Sequence[str]:
    return alias, size_text(model.wheel_bytes), model.licence, model.description


def _pullable_as_json(alias: str, model: "PackagedModel") -> dict[str, Any]:
    return {
        "name": alias,
        "folder": None,
        "download_size": model.wheel_bytes,
        "licence": model.licence,
        "description": model.description,
    }
