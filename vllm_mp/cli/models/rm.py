"""The command `rm`: remove models from the cache."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mp.cli.terminal.table import size_text

if TYPE_CHECKING:
    from vllm_mp.cli.running_engines import RunningEngine
    from vllm_mp.model_store.entries import CacheEntry

USAGE = "MODEL... [--yes]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="+",
        help="Remove this model, or only the name that you have given it, as `vllm-mp list` names it. Required.",
    )
    parser.add_argument("--yes", "-y", action="store_true", help="Remove without a question. Default: off.")


def run(args: argparse.Namespace) -> int:
    """Remove the models, all or none; return 0, or 1 if the user says no.

    Raises ValueError for a model that is not in the cache or is in use.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    from vllm_mp.cli.running_engines import running_engines
    from vllm_mp.model_store import cache_root
    from vllm_mp.model_store.entries import cache_entries, remove_entry

    entries = {entry.name.lower(): entry for entry in cache_entries(cache_root(), Path(HF_HUB_CACHE))}
    chosen, engines = [], running_engines()
    for name in dict.fromkeys(args.models):
        entry = entries.get(name.lower())
        if entry is None:
            raise ValueError(f"{name!r} is not a model in the cache; `vllm-mp list` shows those that are")
        if entry.target is None:
            check_unused(entry, engines)
        chosen.append(entry)
    if not args.yes and not confirmed(", ".join(map(_described, chosen))):
        return 1
    for entry in chosen:
        remove_entry(entry)
        print(f"removed {_described(entry)}")
    return 0


def check_unused(entry: "CacheEntry", engines: "list[RunningEngine]") -> None:
    """Raise ValueError if an engine of this user reads files of the entry, or may do so."""
    folder = entry.folder.resolve()
    for engine in engines:
        if any(used.is_relative_to(folder) for used in engine.folders):
            raise ValueError(f"{entry.name!r} is in use by {engine.name}; stop it first")
        if engine.description is None:
            raise ValueError(
                f"cannot tell whether {engine.name} uses {entry.name!r}: "
                f"{engine.problem or 'it has just started'}; try again later, or stop it"
            )


def _described(entry: "CacheEntry") -> str:
    """Return the name of an entry with its size, or with what it stands for, which stays."""
    size = size_text(entry.size + entry.packed_size)
    return f"{entry.name} ({size if entry.target is None else f'the name of {entry.target}'})"


def confirmed(what: str) -> bool:
    """Ask whether to remove `what`. Raises ValueError if there is no terminal to ask on."""
    if not sys.stdin.isatty():
        raise ValueError(f"standard input is not a terminal to ask whether to remove {what}; give --yes")
    try:
        return input(f"remove {what}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
