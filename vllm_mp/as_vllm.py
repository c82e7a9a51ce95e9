"""Run a program that imports `vllm` with this package in its place.

    python -m vllm_mp.as_vllm program.py ARGUMENTS
    python -m vllm_mp.as_vllm -m lm_eval --model vllm ARGUMENTS

The module `vllm` has the names of `vllm_mp`, and `vllm.x.y` is the module `vllm_mp.x.y`: classes are the same under
both names. `vllm.__version__`, and the version that importlib.metadata reports for the package vllm, are those of the
vLLM whose interface is followed. Processes that the program starts are not affected; start them in the same way. A
program may also call `install()` before it imports `vllm`.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

_NAME: Final = "vllm"
_OWN: Final = "vllm_mp"
VLLM_VERSION: Final = "0.33.0"
"""The version of vLLM whose interface is followed."""
_USAGE: Final = "usage: python -m vllm_mp.as_vllm (PROGRAM.py | -m MODULE) [ARGUMENTS]"


class _Package(types.ModuleType):
    """The module `vllm`: the names of this package, with the version of vLLM."""

    __version__ = VLLM_VERSION
    __version_tuple__ = tuple(map(int, VLLM_VERSION.split(".")))

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_OWN), name)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(_OWN))


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata says of the package vllm."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {VLLM_VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(str(importlib.import_module(_OWN).__file__)).parent / path


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `vllm` and the modules below it, and the distribution of that name."""

    def __init__(self) -> None:
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}
        """The specs of modules that are being imported under their other name, by that name."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname == _NAME:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if not fullname.startswith(f"{_NAME}."):
            return None
        own = _own_name(fullname)
        try:
            found = importlib.util.find_spec(own)
        except ModuleNotFoundError:
            return None
        return found and importlib.machinery.ModuleSpec(
            fullname, self, is_package=found.submodule_search_locations is not None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        if spec.name == _NAME:
            return _Package(_NAME, importlib.import_module(_OWN).__doc__)
        module = importlib.import_module(_own_name(spec.name))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        # The machinery of imports has given the module the spec of its other name.
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name, module.__spec__)

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        """Yield the distribution vllm, if it is asked for."""
        if context is None or context.name in (None, _NAME):
            yield _Distribution()


def install() -> None:
    """Let `import vllm` find this package in this process. Raises RuntimeError if another `vllm` is imported."""
    module = sys.modules.get(_NAME)
    if module is not None and not isinstance(module, _Package):
        raise RuntimeError(f"{_NAME} is imported already, from {module.__file__}: call install() before")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _own_name(fullname: str) -> str:
    return _OWN + fullname.removeprefix(_NAME)


def main(arguments: Sequence[str]) -> None:
    """Run the program that `arguments` name."""
    kind, *rest = arguments or ["-h"]
    if kind in ("-h", "--help") or (kind == "-m" and not rest):
        raise SystemExit(_USAGE)
    install()
    if kind == "-m":
        sys.argv = rest
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *rest]
        sys.path[0] = str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    # The program may import this module too, and must find the same classes.
    importlib.import_module(f"{_OWN}.as_vllm").main(sys.argv[1:])
