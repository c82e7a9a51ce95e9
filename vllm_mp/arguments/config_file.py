"""Flags in a YAML file: the option `--config` of commands, in the form that vLLM has."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any


def flags_in(path: str, known: Mapping[str, bool], given: Collection[str]) -> list[str]:
    """Return the arguments that a file of options stands for; flags of the command line, `given`, replace its own.

    `known` has the flags of the command, each with whether it is a switch. The file maps names of options to values:
    true and false for switches, lists for options that may be repeated, mappings for options in JSON. A value is part
    of the argument of its flag, so that no flag takes the arguments after it for further values. Raises ValueError,
    naming the file and the option.
    """
    arguments: list[str] = []
    for name, value in read_options(path).items():
        flag = f"--{str(name).replace('_', '-')}"
        opposite = flag.replace("--no-", "--", 1) if flag.startswith("--no-") else flag.replace("--", "--no-", 1)
        if flag not in known:
            raise ValueError(f"--config {path}: there is no option {str(name)!r:.100}; see --help-all")
        if value is None or flag in given or opposite in given:
            continue
        is_switch = known[flag]
        if is_switch != isinstance(value, bool):
            needed = "true or false" if is_switch else "a value; put a word such as yes or off in quotes"
            raise ValueError(f"--config {path}: {str(name)!r:.100} takes {needed}, got {_text(value):.100}")
        if not is_switch:
            values = value if isinstance(value, list) else [value]
            arguments += [f"{flag}={_text(each)}" for each in values]
        elif value or opposite in known:  # else it is off by itself
            arguments.append(flag if value else opposite)
    return arguments


def read_options(path: str) -> dict[Any, Any]:
    """Return what a file of options has. Raises ValueError naming the file if it is none."""
    import yaml  # imported here, because few commands read a file

    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}; name a file that can be read") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: it is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: it must map names of options to values, got {type(content).__name__}")
    return content


def _text(value: Any) -> str:
    """Return a value as it stands on the command line."""
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)
