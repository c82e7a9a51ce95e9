"""A parser of flags for programs that take the engine's options from the command line."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from vllm_mp.arguments.config_file import flags_in
from vllm_mp.arguments.vllm_flags import UNSERVED_FLAGS, add_unserved, is_unserved_switch, long_flags


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An `ArgumentParser` that also accepts its flags with underscores: `--max_model_len` for `--max-model-len`.

    If it has the flag `--config`, that names a YAML file with further flags. A parser of engine options accepts vLLM's
    short names and names with dots, such as `-tp` and `--speculative-config.method`, and its options without effect.
    """

    def parse_known_args(  # type: ignore[override]  # the overloads of the base class differ in types alone
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        known = self._option_string_actions
        has_engine_options = "--max-model-len" in known
        if has_engine_options:
            try:
                given = long_flags(given, known)
            except ValueError as error:
                self.error(str(error))
        given = self._with_file([self._spelled(arg) for arg in given])
        if has_engine_options:
            add_unserved(self, given, known)
        return super().parse_known_args(given, namespace)

    def check_port(self, value: Any) -> int:
        """Return `value` as a port, for `type=parser.check_port`. Raises ArgumentTypeError of argparse for others."""
        text = str(value)
        if not (text.isdecimal() and len(text) < 6 and 1024 <= int(text) < 2**16):
            raise argparse.ArgumentTypeError(f"a port must be an integer in [1024, 65536), got {text[:100]!r}")
        return int(text)

    def _with_file(self, arguments: list[str]) -> list[str]:
        """Return `arguments` after those of the file that `--config` names, if the parser has that flag."""
        if "--config" not in self._option_string_actions:
            return arguments
        file = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        file.add_argument("--config")
        try:
            path = file.parse_known_args(arguments)[0].config
            if path is None:
                return arguments
            flags = {argument.partition("=")[0] for argument in arguments}
            known = {flag: is_unserved_switch(flag) for flag in UNSERVED_FLAGS}
            known |= {flag: action.nargs == 0 for flag, action in self._option_string_actions.items()}
            return [*flags_in(path, known, flags), *arguments]
        except (ValueError, argparse.ArgumentError) as error:
            self.error(str(error))

    def _spelled(self, arg: str) -> str:
        """Return a flag as the parser knows it, and any other argument as it is."""
        flag, equals, value = arg.partition("=")
        dashed = flag.replace("_", "-")
        known = self._option_string_actions
        is_other_spelling = flag not in known and (dashed in known or dashed in UNSERVED_FLAGS)
        return f"{dashed}{equals}{value}" if is_other_spelling else arg
