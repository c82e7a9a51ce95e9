"""Modules that are imported but not executed before they are used, or before `load_deferred_modules`."""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


class _DeferringFinder:
    """Finds the modules of `names` as the usual finder does, but lets their first attribute execute them.

    It has the method of `importlib.abc.MetaPathFinder`, whose import would take longer than what it is for saves.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def defer_modules(names: Sequence[str]) -> None:
    """Let later imports of the modules `names` not execute them; those that are imported already stay as they are.

    A deferred module is executed when an attribute of it is first read, and by `load_deferred_modules`. Only one thread
    may import until then.
    """
    if not any(isinstance(finder, _DeferringFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _DeferringFinder(names))


def load_deferred_modules() -> None:
    """Execute the deferred modules that were imported, and defer none from now on; idempotent.

    Raises what the modules raise.
    """
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _DeferringFinder)]:
        sys.meta_path.remove(finder)
        for name in sorted(finder.names & sys.modules.keys()):
            dir(sys.modules[name])  # reads an attribute
