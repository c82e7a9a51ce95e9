"""The `vllm-mp` command.

Each command is a module of this package with `USAGE` (its main arguments), `add_arguments(parser)` and `run(args)`,
which does the work and returns the exit code. A new command is a new module and a line in `COMMANDS` or `BENCHMARKS`.
Only the module of the command that is called is imported, and it imports slow packages inside `run` only, so that help
is printed at once.
"""

import functools
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm_mp.cli.flags.command_parser import CommandParser
from vllm_mp.cli.terminal.screen import print_error
from vllm_mp.errors import EngineError
from vllm_mp.machine.log_setup import set_up_log
from vllm_mp.version import __version__

COMMANDS: Final = {
    "pull": "Fetch a model, convert it if need be, and print its folder.",
    "list": "List the models in the cache, and those that could be pulled, with their sizes.",
    "alias": "Give a model folder or a .gguf file a name of its own.",
    "rm": "Remove models from the cache.",
    "prune": "Remove from the cache what no engine can use any more.",
    "generate": "Stream the answer to a prompt, or answer the prompts of a file.",
    "chat": "Chat with a model in the terminal.",
    "engine": "Run a core that clients reach at an address (AsyncLLM.connect), and keep it alive.",
    "serve": "Serve a model over HTTP with OpenAI's API.",
    "health": "Ask whether the HTTP servers of this user on this machine are healthy.",
    "ps": "List the engines of this user that run on this machine.",
    "keys": "Make and list the keys of a core and of its clients, for tcp:// addresses.",
    "completion": "Print a script with which a shell completes commands and options.",
    "env": "Print versions, machine, paths and settings for a problem report.",
}
"""What each command does, by its name, which is the name of its module."""
MODEL_COMMANDS: Final = ("pull", "list", "alias", "rm", "prune")
"""The commands whose modules are in the package `models`."""
SERVICES: Final = ("engine", "serve")
"""The commands that run until they are stopped; their log says what they do."""
BENCHMARKS: Final = {
    "latency": "Measure time to first token, time between tokens and tokens per second of a batch of equal requests.",
    "throughput": "Measure tokens per second under requests of mixed lengths that arrive at random or at once.",
    "startup": "Measure the times of import and start, the client's memory, and the CPU time of an idle engine.",
    "recovery": "Kill the core repeatedly, and measure the time from each kill to the next token.",
    "frontend": "Measure the client alone: tokens per second from a stand-in for a core to the consumers.",
    "tokenizer": "Measure batched tokenizing, and the lag of the event loop under long texts or streams.",
}
"""What each command below `bench` does, by its name; its module is `bench/NAME.py`."""

_FAILED, _BAD_ARGUMENTS, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0: success; 1: the work failed; 2: bad arguments; 130: Ctrl-C.
    """
    try:
        _open_closed_streams()
        args = parser().parse_args(argv)
        _prepare_streams()
        set_up_log(args.is_service, getattr(args, "log_format", None))
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout has closed it. Buffered output must not fail a second time at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except OSError as error:
        print_error(_description(error))
        return _FAILED
    except EngineError as error:
        print_error(str(error))
        return _FAILED
    except (ValueError, TypeError, NotImplementedError) as error:
        print_error(str(error))
        return _BAD_ARGUMENTS
    except RuntimeError as error:
        print_error(str(error))
        return _FAILED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    return code


def _open_closed_streams() -> None:
    """Give each standard stream that is closed /dev/null, so that no other file gets its descriptor."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _description(error: OSError) -> str:
    """Return the message of an error of the system, with the file and without the error's number."""
    if error.filename is not None:
        return f"cannot use {error.filename!r}: {error.strerror}; check the path and its permissions"
    return error.strerror or str(error)


def _prepare_streams() -> None:
    """Set up stdin and stdout so that no byte of the input and no character of a completion raises an error."""
    # Invalid bytes of the input pass here; the check of the prompt refuses them and says where they are.
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def parser() -> CommandParser:
    """Return the parser of all commands."""
    parser = CommandParser(
        prog="vllm-mp",
        description="An LLM inference engine in two processes: if the process that computes dies, streams continue.",
    )
    parser.add_argument(
        "--version", action="version", version=f"vllm-mp {__version__}", help="Show the version and exit."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_commands(commands, COMMANDS, "")
    bench = commands.add_parser("bench", help="Measure the engine.", description="Measure the engine.")
    _add_commands(bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK"), BENCHMARKS, "bench.")
    return parser


def module_of(command: str) -> str:
    """Return the name of the module of a command; one below `bench` is `bench.NAME`."""
    return f"{__name__}.models.{command}" if command in MODEL_COMMANDS else f"{__name__}.{command}"


def _add_commands(commands: Any, helps: Mapping[str, str], prefix: str) -> None:
    """Add a parser for each command in `helps` to `commands`, the result of `add_subparsers`.

    The name of its module is `prefix` and the name of the command.
    """
    for name, text in helps.items():
        load = functools.partial(_load, module_name=module_of(f"{prefix}{name}"), is_service=name in SERVICES)
        commands.add_parser(name, help=text, description=text, load=load)


def _load(command: CommandParser, module_name: str, is_service: bool) -> None:
    """Add the arguments of a command to its parser."""
    module = importlib.import_module(module_name)
    # The generated usage would list all flags.
    command.usage = f"%(prog)s {module.USAGE}".rstrip()
    module.add_arguments(command)
    command.add_help_all()
    command.set_defaults(run=module.run, is_service=is_service)
