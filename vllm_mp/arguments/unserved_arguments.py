"""Drop arguments of vLLM that this engine does not have, or refuse them by name."""

import functools
import inspect
import logging
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec

from vllm_mp.arguments.suggestions import did_you_mean
from vllm_mp.arguments.unserved_table import CALL_ARGUMENTS, PARAMETER_TABLES, Unserved

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


_told: set[str] = set()
"""The harmless arguments that the log has a line about."""


def drop_unserved(
    owner: str, given: Mapping[str, Any], known: Collection[str], table: Mapping[str, Unserved]
) -> dict[str, Any]:
    """Return `given` without the arguments in `table`, after they were checked; those of `known` stay as they are.

    Raises NotImplementedError, with name, value and remedy, for a value that is not accepted, and TypeError for a name
    that neither `owner` nor vLLM has.
    """
    kept = {}
    for name, value in given.items():
        if name in known:
            kept[name] = value
        elif name not in table:
            raise TypeError(f"{owner} got an unexpected keyword argument {name!r}{did_you_mean(name, known)}")
        else:
            check_entry(name, value, table[name])
    return kept


def accepts_unserved(
    owner: str, table: Mapping[str, Unserved]
) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Let a function accept the arguments of `table` as `drop_unserved` does; its signature stays as it is."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        known = frozenset(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if kwargs.keys() <= known:
                return function(*args, **kwargs)
            return function(*args, **drop_unserved(owner, kwargs, known, table))

        return call

    return decorate


class AcceptsUnserved(msgspec.StructMeta):
    """Lets the constructor of parameters accept the fields of vLLM that they do not have."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError:
            if kwargs.keys() <= set(cls.__struct_fields__):
                raise
        table = next(PARAMETER_TABLES[base.__name__] for base in cls.__mro__ if base.__name__ in PARAMETER_TABLES)
        return super().__call__(*args, **drop_unserved(cls.__name__, kwargs, cls.__struct_fields__, table))


def check_unserved(**arguments: Any) -> None:
    """Raise NotImplementedError, with the name, the value and the reason, unless every argument asks for nothing."""
    for name, value in arguments.items():
        check_entry(name, value, CALL_ARGUMENTS[name])


def check_entry(name: str, value: Any, entry: Unserved) -> None:
    """Raise NotImplementedError, with the name, the value and the reason, for a value that `entry` does not accept."""
    if value is None or (isinstance(value, list | tuple | dict | set | str) and not value):
        return
    if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in entry.accepted):
        return
    if not entry.is_harmless:
        raise NotImplementedError(f"{name}={reprlib.repr(value)} is not served: {entry.reason}; leave it out")
    tell_without_effect(name, value, entry.reason)


def tell_without_effect(name: str, value: Any, reason: str) -> None:
    """Write a line to the log about an argument that has no effect, the first time that it is given."""
    if name not in _told:
        _told.add(name)
        logger.warning("%s=%s has no effect: %s", name, reprlib.repr(value), reason)
