"""The flags of vLLM's engine that no option declares: short names, names with dots, and options that are not served."""

import argparse
import json
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from vllm_mp.arguments.unserved_arguments import check_entry
from vllm_mp.arguments.unserved_table import ENGINE_ARGUMENTS

_SHORT: Final = {
    "-cc": "--compilation-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpb": "--data-parallel-backend",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-O": "--optimization-level",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
_LEVEL: Final = re.compile(r"-O(\w+)")
_DOTTED: Final = re.compile(r"(--[a-zA-Z][\w-]*)\.([\w.-]+)")
_LISTS: Final = ("cudagraph_capture_sizes", "cuda_graph_sizes", "ignore_patterns", "device_ids")
"""Options that take several values at once."""
_SWITCH: Final = re.compile("(enable|disable|use)_.*")


def is_unserved_switch(flag: str) -> bool:
    """Return whether an option of vLLM that is not served takes no value."""
    name = _name_of(flag)
    default = (*ENGINE_ARGUMENTS[name].accepted, None)[0]
    return isinstance(default, bool) or (default is None and _SWITCH.fullmatch(name) is not None)


def _name_of(flag: str) -> str:
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")


UNSERVED_FLAGS: Final = frozenset(
    f"{prefix}{dashed}"
    for dashed in (name.replace("_", "-") for name in ENGINE_ARGUMENTS)
    for prefix in ("--", "--no-")
    if prefix == "--" or is_unserved_switch(f"--{dashed}")
)


def long_flags(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """Return `arguments` with flags of the parser, `known`, or of vLLM in place of short names and names with dots.

    `--speculative-config.method ngram` becomes a `--speculative-config` in JSON, at the end. It holds what a
    `--speculative-config` among `arguments` holds, too; of a field that both give, the name with dots gives the value.
    Raises ValueError for names with dots that contradict each other or the option.
    """
    result: list[str] = []
    dotted_flags: list[tuple[str, str, Any]] = []
    """(option, path of the field, value) of each name with dots."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            result += [argument, *rest]
            break
        if argument.startswith("-O."):
            argument = "--compilation-config" + argument.removeprefix("-O")
        flag, equals, value = argument.partition("=")
        if flag not in known and (long := _SHORT.get(flag)) is not None:
            result.append(long + equals + value)
        elif (level := _LEVEL.fullmatch(argument)) is not None:
            result.append(f"--optimization-level={level[1]}")
        elif (dotted := _DOTTED.fullmatch(flag)) is not None and _is_flag(dotted[1], known):
            field = _plain(value if equals else next(rest, "true"))
            dotted_flags.append((dotted[1].replace("_", "-"), dotted[2].replace("-", "_"), field))
        else:
            result.append(argument)
    sections: dict[str, dict[str, Any]] = {}
    for option, path, field in dotted_flags:
        if option not in sections:
            sections[option] = _take_section(result, option)
        for name in reversed(path.split(".")):
            field = {name: field}
        _merge(sections[option], field, f"{option}.{path}")
    made = [f"{option}={json.dumps(section)}" for option, section in sections.items()]
    at = result.index("--") if "--" in result else len(result)
    return [*result[:at], *made, *result[at:]]


def _merge(section: dict[str, Any], fields: dict[str, Any], flag: str) -> None:
    """Set `fields` of `section`, and the fields of objects in objects. `flag` gives them, for an error."""
    for name, value in fields.items():
        former = section.get(name)
        if not isinstance(value, dict) or name not in section:
            section[name] = value
        elif isinstance(former, dict):
            _merge(former, value, flag)
        else:
            raise ValueError(f"{flag}: a flag before has given {name!r} a value; leave out one of the two")


def _take_section(arguments: list[str], option: str) -> dict[str, Any]:
    """Remove an option whose value is a JSON object from `arguments`, and return the object; empty without the option.

    Raises ValueError for another value in JSON.
    """
    sections: list[dict[str, Any]] = [{}]
    index = 0
    while index < len(arguments) and arguments[index] != "--":
        flag, equals, value = arguments[index].partition("=")
        size = 1 if equals else 2
        if not equals:
            value = "".join(arguments[index + 1 : index + 2])
        found = _plain(value) if flag.replace("_", "-") == option else None
        if isinstance(found, dict):
            sections.append(found)
            del arguments[index : index + size]
            continue
        if found not in (None, value):
            raise ValueError(f"{option} {value}: a value without fields, to which {option}.… adds some; leave out one")
        index += 1
    return sections[-1]


def add_unserved(parser: argparse.ArgumentParser, arguments: Sequence[str], known: Collection[str]) -> None:
    """Add to `parser` the options of vLLM, not served and not `known`, that `arguments` name.

    They leave nothing in the namespace. A value is accepted or refused as `EngineArgs` does.
    """
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag not in UNSERVED_FLAGS or flag in known:  # `known` also has what was added for an argument before
            continue
        name, is_switch = _name_of(flag), is_unserved_switch(flag)
        dashed = name.replace("_", "-")
        parser.add_argument(
            *((f"--{dashed}", f"--no-{dashed}") if is_switch else (f"--{dashed}",)),
            action=_Unserved,
            dest=name,
            nargs=0 if is_switch else "+" if name in _LISTS else None,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


class _Unserved(argparse.Action):
    """Checks the value of an option that is not served."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, flag: str | None = None) -> None:
        entry, flag = ENGINE_ARGUMENTS[self.dest], flag or self.option_strings[0]
        if self.nargs == 0:
            value: Any = not flag.startswith("--no-")
        else:
            value = [_plain(each) for each in values] if isinstance(values, list) else _plain(values)
        try:
            check_entry(self.dest, value, entry)
        except NotImplementedError:
            raise argparse.ArgumentError(None, f"{flag} is not served: {entry.reason}; leave it out") from None


def _is_flag(flag: str, known: Collection[str]) -> bool:
    flag = flag.replace("_", "-")
    return flag in known or flag in UNSERVED_FLAGS


def _plain(text: str) -> Any:
    """Return the value that `text` is in JSON, else `text`."""
    try:
        return json.loads(text)
    except ValueError:
        return text
