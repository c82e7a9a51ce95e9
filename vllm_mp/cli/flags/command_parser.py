"""The parser of the shell commands: errors of one line, and a help that shows the common options alone."""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vllm_mp.arguments.argument_parser import FlexibleArgumentParser
from vllm_mp.arguments.options import FURTHER, WITHOUT_EFFECT
from vllm_mp.arguments.sizes import byte_size, readable_int, readable_int_or_auto
from vllm_mp.arguments.suggestions import did_you_mean
from vllm_mp.arguments.unserved_table import COMMANDS, SERVER_FLAGS

_NOUNS: dict[Any, str] = {
    int: "an integer",
    readable_int: "an integer, such as 4096, 32k or 32K",
    readable_int_or_auto: "an integer, such as 4096, 32k or 32K",
    float: "a number",
    json.loads: "a JSON object",
    byte_size: "a size in bytes, such as 4GiB or 512MB",
}
"""What the value of a flag must be, by the function that converts it."""
_REQUIRED = "the following arguments are required: "
"""How the base class begins the message about missing arguments."""
_ONE_REQUIRED = re.compile("one of the arguments (.+) is required")
"""Its message about missing arguments when one of them is enough."""


class CommandParser(FlexibleArgumentParser):
    """A parser that refuses an argument with one line on stderr and exit code 2.

    Its help leaves out flags whose heading begins with `FURTHER`, which `--help-all` shows, and those under
    `WITHOUT_EFFECT`.
    """

    def __init__(self, load: "Callable[[CommandParser], None] | None" = None, **options: Any) -> None:
        """`load` adds the arguments when they are needed; the base class takes `options`."""
        super().__init__(add_help=False, **options)
        self._load = load
        self.add_argument("-h", "--help", action="help", help="Show this help and exit.")

    def load(self) -> None:
        """Add the arguments of the command; no-op if they are there."""
        load, self._load = self._load, None
        if load is not None:
            load(self)

    def parse_known_args(  # type: ignore[override]  # as in the base class
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all of `args`. An unknown argument is refused here, so that the message names the command."""
        self.load()
        parsed, unknown = super().parse_known_args(args, namespace)
        if not any(argument.startswith("-") for argument in unknown):
            # Those after an option belong to an argument that takes several, which ended at that option.
            for action in self._get_positional_actions():
                if action.nargs == argparse.ZERO_OR_MORE:
                    getattr(parsed, action.dest).extend(unknown)
                    unknown = []
        if unknown:
            self.error(self._unknown(unknown))
        return parsed, []

    def error(self, message: str) -> NoReturn:
        """Print `message` in one line on stderr and exit with code 2."""
        names = message.removeprefix(_REQUIRED)
        if one_of := _ONE_REQUIRED.fullmatch(message):
            names = " or ".join(one_of[1].split())
        if names != message:
            message = f"missing {names}; see {self.prog} --help"
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")

    def format_help(self) -> str:
        """Return the help with the common options."""
        return self._format(all_options=False)

    def full_help(self) -> str:
        """Return the help with all options that are served."""
        return self._format(all_options=True)

    def add_help_all(self) -> None:
        """Add `--help-all` if there are options that the help leaves out."""
        if any((group.title or "").startswith(FURTHER) for group in self._action_groups):
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help="Show all options and exit.")

    def _format(self, all_options: bool) -> str:
        """Return the help, with the options of every heading if `all_options`."""
        self.load()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            title = group.title or ""
            if title == WITHOUT_EFFECT or (title.startswith(FURTHER) and not all_options):
                continue
            formatter.start_section(title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        return formatter.format_help()

    def _unknown(self, arguments: list[str]) -> str:
        """Return the message about arguments that the command does not have."""
        first = arguments[0]
        if not first.startswith("-"):
            return f"unexpected argument {first!r}; quote a text of several words, or see {self.prog} --help"
        flag = first.partition("=")[0]
        help_flag = "--help-all" if "--help-all" in self._option_string_actions else "--help"
        served = [group for group in self._action_groups if group.title != WITHOUT_EFFECT]
        known = [name for group in served for action in group._group_actions for name in action.option_strings]
        if (remedy := SERVER_FLAGS.get(flag.removeprefix("--").replace("_", "-"))) is not None and "--api-key" in known:
            return f"{flag} is not served: {remedy}"
        hint = did_you_mean(flag, known)
        return f"unknown option {flag}" + (hint or f"; see {self.prog} {help_flag}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction) and (remedy := COMMANDS.get(f"{self.prog} {value}")):
            raise argparse.ArgumentError(None, f"{value} is a command of vLLM; {remedy}")
        allowed = [str(choice) for choice in action.choices]
        hint = did_you_mean(str(value), allowed)
        raise argparse.ArgumentError(None, f"{_name(action)} must be one of {', '.join(allowed)}, got {value!r}{hint}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        noun = _NOUNS.get(action.type)
        if noun is None:
            return super()._get_value(action, arg_string)
        try:
            return action.type(arg_string)  # type: ignore[operator,misc]  # a key of _NOUNS, which is a function
        except ValueError as error:
            raise argparse.ArgumentError(None, f"{_name(action)} must be {noun}, got {arg_string!r}") from error

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            if not action.option_strings:
                raise
            value = "" if action.choices else f" {action.metavar or action.dest.upper()}"
            raise argparse.ArgumentError(
                None, f"{_name(action)}{value}: {error.message}; see {self.prog} --help"
            ) from error


class _HelpAll(argparse.Action):
    """The action of `--help-all`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        if isinstance(parser, CommandParser):
            print(parser.full_help(), end="")
        parser.exit()


def _name(action: argparse.Action) -> str:
    """Return the name of an argument as a user writes it."""
    return action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)
