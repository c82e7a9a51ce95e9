"""The command `completion`: the script with which a shell completes the commands, options and values of `vllm-mp`."""

import argparse
import re
from typing import Any

from vllm_mp.arguments.options import WITHOUT_EFFECT
from vllm_mp.cli.flags.command_parser import CommandParser

USAGE = "SHELL"

SHELLS = ("bash", "zsh", "fish")

_PATHS = re.compile("FILE|FOLDER|PATH|MODEL|DIR")
"""Words in the names of values that are paths, or may be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="Print the one for bash, zsh or fish. Required.")


def run(args: argparse.Namespace) -> int:
    """Print the script and return 0."""
    import shtab

    from vllm_mp.cli import parser

    root = parser()
    _prepare(root, shtab.FILE)
    print(shtab.complete(root, args.shell))
    return 0


def _prepare(command: CommandParser, files: Any) -> None:
    """Load a command and those below it, hide what has no effect, and let values that are paths complete as `files`."""
    command.load()
    hidden = {
        id(action)
        for group in command._action_groups
        if group.title == WITHOUT_EFFECT
        for action in group._group_actions
    }
    for action in command._actions:
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                _prepare(below, files)
        elif id(action) in hidden:
            action.help = argparse.SUPPRESS
        elif action.choices is None and action.nargs != 0 and _PATHS.search(str(action.metavar or action.dest).upper()):
            action.complete = files  # type: ignore[attr-defined]  # where shtab looks
