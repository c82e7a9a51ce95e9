"""A parser of flags for programs that take the engine's options from the command line."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An `ArgumentParser` that also accepts its flags with underscores: `--max_model_len` for `--max-model-len`."""

    def parse_known_args(  # type: ignore[override]  # the overloads of the base class differ in types alone
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._spelled(arg) for arg in given], namespace)

    def _spelled(self, arg: str) -> str:
        """Return a flag as the parser knows it, and any other argument as it is."""
        flag, equals, value = arg.partition("=")
        dashed = flag.replace("_", "-")
        known = flag not in self._option_string_actions and dashed in self._option_string_actions
        return f"{dashed}{equals}{value}" if known else arg
