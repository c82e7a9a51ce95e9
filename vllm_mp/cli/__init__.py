"""The `vllm-mp` command.

Each command is a module of this package with `USAGE` (its main arguments), `HELP`, `add_arguments(parser)` and
`run(args)`, which does the work and returns the exit code. A new command is a new module and its name in `COMMANDS` or
`BENCHMARKS`. A module imports slow packages inside `run` only, so that help is printed at once.
"""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm_mp import __version__
from vllm_mp.cli.command_parser import CommandParser
from vllm_mp.errors import EngineError
from vllm_mp.log_setup import set_up_log

COMMANDS: Final = {
    name: name for name in ("pull", "list", "rm", "generate", "chat", "engine", "serve", "ps", "keys", "env")
}
"""The module of each command."""
SERVICES: Final = ("engine", "serve")
"""The commands that run until they are stopped; their log says what they do."""
BENCHMARKS: Final = {
    name: f"bench_{name}" for name in ("latency", "throughput", "startup", "recovery", "frontend", "tokenizer")
}
"""The module of each command below `bench`."""

_FAILED, _BAD_ARGUMENTS, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: success; 1: the work failed; 2: bad arguments; 130: Ctrl-C.
    """
    args = parser().parse_args(argv)
    try:
        _prepare_streams()
        set_up_log(is_service=args.is_service)
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout has closed it. Buffered output must not fail a second time at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except (EngineError, OSError) as error:
        print(f"vllm-mp: {error}", file=sys.stderr)
        return _FAILED
    except (ValueError, TypeError, NotImplementedError) as error:
        print(f"vllm-mp: {error}", file=sys.stderr)
        return _BAD_ARGUMENTS
    except RuntimeError as error:
        print(f"vllm-mp: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    return code


def _prepare_streams() -> None:
    """Set up stdin and stdout so that no byte of the input and no character of a completion raises an error."""
    if sys.stdin is None:  # the parent process has closed it
        sys.stdin = open(os.devnull)  # noqa: SIM115
    # Invalid bytes of the input pass here; the check of the prompt refuses them and says where they are.
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = CommandParser(
        prog="vllm-mp",
        description="An LLM inference engine in two processes: if the process that computes dies, streams continue.",
    )
    parser.add_argument("--version", action="version", version=f"vllm-mp {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_commands(commands, COMMANDS)
    bench = commands.add_parser("bench", help="Measure the engine.", description="Measure the engine.")
    _add_commands(bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK"), BENCHMARKS)
    return parser


def _add_commands(commands: Any, modules: Mapping[str, str]) -> None:
    """Add a parser for each command in `modules` to `commands`, the result of `add_subparsers`."""
    for name, module_name in modules.items():
        module = importlib.import_module(f"{__name__}.{module_name}")
        # The generated usage would list all flags.
        usage = f"%(prog)s {module.USAGE}".rstrip()
        command = commands.add_parser(name, usage=usage, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.add_help_all()
        command.set_defaults(run=module.run, is_service=name in SERVICES)
