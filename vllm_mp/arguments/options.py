"""Options that are declared once, in a dataclass, and from which flags, help and validation follow."""

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

from vllm_mp.arguments.sizes import byte_size, readable_int, readable_int_or_auto
from vllm_mp.arguments.suggestions import did_you_mean
from vllm_mp.arguments.unserved_arguments import tell_without_effect

FURTHER: Final = "further "
"""How the heading of flags begins that the help of a command leaves out, and `--help-all` shows."""
WITHOUT_EFFECT: Final = "options without effect"
"""The heading of flags that no help of a command shows."""
_METAVARS: Final = {int: "N", float: "X", dict: "JSON"}
"""How the help of a flag shows a value of a type; other values are shown by the name of the option."""
MAX_INTEGER = 2**63 - 1
"""The largest integer that an option may have; a larger integer would not reach the core unchanged."""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    without_effect: str = "",
    takes_list: bool = False,
    subject: str = "",
    unserved: Mapping[int, str] = {},
) -> Any:
    """Declare an option, from which its flag, help and validation follow.

    `help` is a full sentence. If the default is None or empty, `help` ends with "Default: " and the default in words;
    any other default is added to the flag's help. `low` and `high` are the least and the greatest value.
    `without_effect` says why no value changes anything; empty: values do. `takes_list`: the flag of a tuple takes
    several values at once; else it is given once for each value. `subject` is the heading under which the help of a
    command shows a common option; empty: only `--help-all` shows it. `unserved` has the integers that vLLM allows and
    this engine does not, each with the meaning and the remedy that the error gives; the flag also takes "auto" for -1.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "help": help,
            "choices": choices,
            "low": low,
            "high": high,
            "without_effect": without_effect,
            "takes_list": takes_list,
            "subject": subject,
            "unserved": unserved,
        },
    )


@dataclasses.dataclass
class Options:
    """The base class of dataclasses whose fields are declared with `option`.

    A tuple may be given as a list, and None stands for the default. Construction raises TypeError for a value of the
    wrong type, and ValueError for a value out of range.
    """

    CLI_GROUP: ClassVar[str] = "options"
    """The heading, after `FURTHER`, of the flags that are not common."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and type(None) not in typing.get_args(hints[field.name]):
                value = field.default
                setattr(self, field.name, value)
            _check(field, hints[field.name], value)
            if isinstance(value, list):
                setattr(self, field.name, tuple(value))

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every option to `parser`, grouped by subject, and return it."""
        hints = typing.get_type_hints(cls)
        groups: dict[str, argparse._ArgumentGroup] = {}
        # The sort is stable: the common options come first, those without effect last.
        for field in sorted(dataclasses.fields(cls), key=_rank):
            heading = (
                WITHOUT_EFFECT
                if field.metadata["without_effect"]
                else field.metadata["subject"] or FURTHER + cls.CLI_GROUP
            )
            if heading not in groups:
                groups[heading] = parser.add_argument_group(heading)
            _add_flag(groups[heading], field, _value_type(hints[field.name]))
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> Self:
        """Return the options from parsed flags; other attributes of `namespace` are ignored."""
        hints = typing.get_type_hints(cls)
        given = {
            field.name: getattr(namespace, field.name)
            for field in dataclasses.fields(cls)
            if hasattr(namespace, field.name)
        }
        for name, value in given.items():
            if _value_type(hints[name]) is tuple:
                given[name] = tuple(value or ())
        return cls(**given)


def _rank(field: "dataclasses.Field[Any]") -> int:
    """Return the section of the help that has an option: common, further, without effect."""
    return 2 if field.metadata["without_effect"] else 0 if field.metadata["subject"] else 1


def _add_flag(group: "argparse._ArgumentGroup", field: "dataclasses.Field[Any]", value_type: type) -> None:
    """Add the flag of an option to `group`."""
    flag = "--" + field.name.replace("_", "-")
    if value_type is bool:
        action = group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
    elif value_type is tuple:
        several = field.metadata["takes_list"]
        action = group.add_argument(
            flag,
            action="extend" if several else "append",
            nargs="+" if several else None,
            metavar=field.name.upper(),
        )
    else:
        conversion = _conversion(field, value_type)
        action = group.add_argument(
            flag,
            type=conversion,
            default=field.default,
            choices=field.metadata["choices"],
            metavar="SIZE" if conversion is byte_size else _METAVARS.get(value_type),
        )
    action.help = _help(field).replace("%", "%%")


def _conversion(field: "dataclasses.Field[Any]", value_type: Any) -> Any:
    """Return the function that makes the value of an option of the text of its flag."""
    if value_type is int:
        number = readable_int_or_auto if -1 in field.metadata["unserved"] else readable_int
        return byte_size if field.name.endswith("_bytes") else number
    return json.loads if value_type is dict else value_type


def _help(field: "dataclasses.Field[Any]") -> str:
    """Return the help of the option's flag, with its default."""
    parts = [field.metadata["help"]]
    if field.metadata["without_effect"]:
        parts.append("This has no effect.")
    if isinstance(field.default, bool):
        parts.append(f"Default: {'on' if field.default else 'off'}.")
    elif field.default not in (None, "", ()):
        parts.append(f"Default: {field.default}.")
    return " ".join(parts)


def _check(field: "dataclasses.Field[Any]", hint: Any, value: Any) -> None:
    """Raise the error that `Options` promises if `value` is not allowed for the option `field` of type `hint`."""
    name, meta = field.name, field.metadata
    if value is None and type(None) in typing.get_args(hint):
        return
    if isinstance(value, int) and value in meta["unserved"]:
        raise ValueError(f"{name}={value!r} is not served: {meta['unserved'][value]}")
    expected = _value_type(hint)
    allowed = {float: (int, float), tuple: (list, tuple)}.get(expected, expected)
    if not isinstance(value, allowed) or (isinstance(value, bool) and expected is not bool):
        raise TypeError(f"{name} must be of type {expected.__name__}, got {value!r}")
    if isinstance(value, list | tuple) and not all(isinstance(element, str) for element in value):
        raise TypeError(f"{name} must be a tuple of strings, got {value!r}")
    if meta["choices"] and value not in meta["choices"]:
        hint = did_you_mean(str(value), meta["choices"])
        raise ValueError(f"{name} must be one of {', '.join(meta['choices'])}, got {value!r}{hint}")
    for text in value if isinstance(value, list | tuple) else (value,):
        _check_unicode(name, text)
    if isinstance(value, int | float) and not isinstance(value, bool):
        low = meta["low"] if meta["low"] is not None else -MAX_INTEGER
        high = meta["high"] if meta["high"] is not None else MAX_INTEGER
        # This form of the comparison refuses NaN too.
        if not low <= value <= high:
            limits = []
            if low != -MAX_INTEGER or not low <= value:
                limits.append(f"at least {low}")
            if high != MAX_INTEGER or not value <= high:
                limits.append(f"at most {high}")
            raise ValueError(f"{name} must be {' and '.join(limits)}, got {value}")
    if meta["without_effect"] and value != field.default:
        tell_without_effect(name, value, meta["without_effect"])


def _check_unicode(name: str, value: object) -> None:
    """Raise ValueError if `value` is a string with surrogates, which no message can carry."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} must be valid Unicode, got {value!r}") from error


def _value_type(hint: Any) -> type:
    """Return the type of a value that is not None: `int` for `int | None`, `dict` for `dict[str, Any]`."""
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    origin = typing.get_origin(hint)
    result: type = origin or hint
    return result
