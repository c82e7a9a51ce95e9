"""Parsers by name and by the chat templates whose models they fit, with those that the operator adds."""

import importlib.util
import sys
from pathlib import Path
from typing import Generic, TypeVar

from vllm_mp.client.answers.incremental_parser import IncrementalParser

_Parser = TypeVar("_Parser", bound=IncrementalParser)


class ParserRegistry(Generic[_Parser]):
    """The classes of one kind of parser, in the order in which they are tried for a chat template.

    Classes that are added later are tried first, so that an operator's class comes before the engine's own.
    """

    def __init__(self, kind: str) -> None:
        """`kind` names the parsers in errors."""
        self._kind = kind
        self._classes: dict[str, type[_Parser]] = {}

    def add(self, parser: type[_Parser]) -> type[_Parser]:
        """Add a class, which replaces one of the same name. Return it, so that this method is a decorator."""
        self._classes.pop(parser.name, None)
        self._classes = {parser.name: parser, **self._classes}
        return parser

    def names(self) -> list[str]:
        """Return the names of the classes, sorted."""
        return sorted(self._classes)

    def get(self, name: str) -> type[_Parser]:
        """Return the class called `name`. Raises ValueError if there is none."""
        if name not in self._classes:
            raise ValueError(f"there is no {self._kind} {name!r}; use one of {', '.join(self.names())}")
        return self._classes[name]

    def for_template(self, chat_template: str) -> type[_Parser] | None:
        """Return the first class that fits `chat_template`; None if there is none."""
        return next((parser for parser in self._classes.values() if parser.detect(chat_template)), None)


def load_parser_plugin(path: str) -> None:
    """Run the Python file at `path`, which registers parsers. Raises ValueError if it cannot be run."""
    file = Path(path)
    module_name = f"vllm_mp_parser_plugin_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise ValueError(f"the parser plugin must be a Python file, got {path!r}")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up the module of their class.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(f"the parser plugin {path!r} failed: {type(error).__name__}: {error}; correct it") from error
