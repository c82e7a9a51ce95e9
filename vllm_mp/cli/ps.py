"""The command `ps`: the engines that run."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from vllm_mp.cli.terminal.screen import print_error
from vllm_mp.cli.terminal.table import duration_text, print_table, size_text

if TYPE_CHECKING:
    from vllm_mp.cli.running_engines import RunningEngine

USAGE = "[--json]"

_HEAD = ("PID", "ENGINE", "MODEL", "STATE", "CLIENTS", "RUNNING", "WAITING", "MEMORY", "UPTIME", "RESTARTS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print a JSON list, with sizes in bytes and times in seconds. Default: a table.",
    )


def run(args: argparse.Namespace) -> int:
    """Print the engines and return 0, also if there are none."""
    from vllm_mp.cli.running_engines import running_engines

    engines = running_engines()
    if args.json:
        print(json.dumps([engine.report() for engine in engines], indent=2))
        return 0
    if engines:
        print_table(_HEAD, [_row(engine) for engine in engines])
    else:
        print("no engines run", file=sys.stderr)
    for engine in engines:
        if engine.problem:
            print_error(f"{engine.name}: {engine.problem}")
    return 0


def _row(engine: "RunningEngine") -> tuple[str, ...]:
    about, status = engine.description, engine.status
    address = "" if about is None else about.address
    return (
        "-" if engine.pid is None else str(engine.pid),
        " ".join(engine.urls) or address or f"private, of process {engine.parent_pid}",
        "-" if about is None else about.model,
        engine.state,
        *(("-",) * 3 if status is None else map(str, (engine.num_clients, status.num_running, status.num_waiting))),
        "-" if engine.pid is None else size_text(engine.memory),
        *(("-",) * 2 if about is None else (duration_text(engine.report()["uptime_s"]), str(about.num_restarts))),
    )
