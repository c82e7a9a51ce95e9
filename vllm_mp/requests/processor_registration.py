"""How an operator names the logits processors that an engine loads (`logits_processors`)."""

import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

ENTRY_POINTS: Final = "vllm.logits_processors"
"""The group of entry points that packages of logits processors declare."""
_MAX_REGISTERED = 64
_SPEC = re.compile(r"(?:(?P<name>[\w.-]{1,256})=)?(?P<target>[\w.]+:[\w.]+|[\w.-]+)", re.ASCII)


class Registration(NamedTuple):
    """A logits processor that is registered with an engine."""

    name: str
    """By which requests and errors name it."""
    target: str
    """"module:Class", or the name of an entry point."""
    is_opt_in: bool
    """It applies to the requests that name it; False: to every request."""


def registered(specs: Sequence[str]) -> list[Registration]:
    """Return the processors that `specs` register. Each spec is "[name=]module:Class" or "[name=]entry_point".

    A processor with a name applies to the requests that name it, one without to every request. Raises ValueError for
    other text, and for two processors of the same name.
    """
    if len(specs) > _MAX_REGISTERED:
        raise ValueError(f"logits_processors must hold at most {_MAX_REGISTERED}, got {len(specs)}")
    found: dict[str, Registration] = {}
    for spec in specs:
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise ValueError(
                f"logits_processors must hold 'module:Class' or names of entry points, or 'name=' before one of these, "
                f"got {spec!r:.200}"
            )
        name, target = match["name"], match["target"]
        own_name = target.rpartition(":")[2].rpartition(".")[2] if ":" in target else target
        registration = Registration(name or own_name, target, name is not None)
        if registration.name in found:
            raise ValueError(
                f"logits_processors registers {registration.name!r} twice; give one of them another name: "
                f"'other_name={target}'"
            )
        found[registration.name] = registration
    return list(found.values())


def as_specs(given: Any) -> tuple[str, ...]:
    """Return the value of the option `logits_processors` as text, classes by their module and name.

    Raises TypeError for other values, and ValueError for classes that no other process can import.
    """
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or not all(isinstance(value, str | type) for value in given):
        raise TypeError(f"logits_processors must be a list or tuple of strings and classes, got {given!r:.200}")
    specs = []
    for value in given:
        if isinstance(value, type):
            if value.__module__ == "__main__" or "<locals>" in value.__qualname__:
                raise ValueError(
                    f"logits_processors: the core cannot import {value.__qualname__} from the running program, because "
                    "no code travels to it; move the class to the top of a module, and import it from there"
                )
            value = f"{value.__module__}:{value.__qualname__}"
        specs.append(value)
    return tuple(specs)


def import_folders(specs: Sequence[str]) -> list[str]:
    """Return the folders in which this process finds the modules of `specs`, without importing them.

    A core searches them last, so that it finds modules that lie beside the program that starts it.
    """
    folders: dict[str, None] = {}
    for registration in registered(specs):
        module = registration.target.partition(":")[0] if ":" in registration.target else ""
        top = module.partition(".")[0]
        try:
            spec = importlib.util.find_spec(top) if top else None
        except (ImportError, ValueError):  # the core says why it cannot be imported
            continue
        if spec is not None and spec.origin not in (None, "built-in", "frozen"):
            path = Path(str(spec.origin)).absolute().parent
            folders[str(path.parent if spec.submodule_search_locations else path)] = None
    return list(folders)
