"""The `vllm-mp` command.

Each subcommand is a module of this package with `HELP`, `add_arguments(parser)` and `run(args) -> int`. Only `run`
imports what is slow to import, so that help comes at once.
"""

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence

from vllm_mp import __version__
from vllm_mp.cli import (
    bench_latency,
    bench_recovery,
    bench_startup,
    bench_throughput,
    chat,
    engine,
    env,
    generate,
    pull,
)
from vllm_mp.errors import EngineError

_FAILED, _BAD_ARGUMENTS, _INTERRUPTED = 1, 2, 130

_COMMANDS = {"pull": pull, "generate": generate, "chat": chat, "engine": engine, "env": env}
_BENCHMARKS = {
    "latency": bench_latency,
    "throughput": bench_throughput,
    "startup": bench_startup,
    "recovery": bench_recovery,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 fine, 1 the work failed, 2 bad arguments."""
    args = _parser().parse_args(argv)
    try:
        _prepare_streams()
        logging.basicConfig(
            level=os.environ.get("VLLM_MP_LOG_LEVEL", "WARNING").upper(), format="%(levelname)s %(name)s: %(message)s"
        )
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left; what is still buffered must not fail once more at exit.
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
    """See to it that no byte of the input and no character of the answer ends the program."""
    if sys.stdin is None:  # closed by whoever started us
        sys.stdin = open(os.devnull)  # noqa: SIM115
    # Whoever takes the text refuses what is not valid in it, and can say where.
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-mp", description="An LLM inference engine whose client and core live and die apart."
    )
    parser.add_argument("--version", action="version", version=f"vllm-mp {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    bench = commands.add_parser("bench", help="measure the engine")
    benchmarks = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    for name, module in _BENCHMARKS.items():
        benchmark = benchmarks.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(benchmark)
        benchmark.set_defaults(run=module.run)
    return parser
