"""The flags that say how a completion is sampled: one for each field of `SamplingParams` that declares a help text."""

import argparse
from collections.abc import Mapping
from typing import Any, Final

from vllm_mp.arguments.options import FURTHER
from vllm_mp.arguments.parameters import Integer, Number, Parameter, Strings
from vllm_mp.arguments.suggestions import did_you_mean
from vllm_mp.requests.sampling_params import PARAMETERS, RequestOutputKind, SamplingParams

_BY_FLAG = {
    parameter.flag or name.replace("_", "-"): (name, parameter)
    for name, parameter in PARAMETERS.items()
    if parameter.help is not None
}

SWITCH = {"on": True, "true": True, "off": False, "false": False}
"""What each word for a parameter that is on or off means."""
_COMMON = ("temperature", "top-p", "top-k", "repetition-penalty", "max-tokens", "stop")
"""The flags that the help of a command shows; `--help-all` shows the others too."""
_OWN: Final[dict[str, Any]] = {"temperature": 0.0, "max_tokens": None}
"""Parameters of commands that neither a flag nor the model sets, where they differ from `SamplingParams`."""
_NO_VALUE = {
    "max_tokens": "as many as fit into the context",
    "seed": "each prompt has a seed of its own, drawn from --seed",
    "stop": "none",
}
"""What a default that is not a number means, by parameter; "off" for others."""


def add_sampling_flags(parser: argparse.ArgumentParser, defaults: dict[str, Any]) -> None:
    """Add the flags to `parser`; their help names `defaults`, which the command applies if the model has none."""
    common = parser.add_argument_group("sampling")
    further = parser.add_argument_group(FURTHER + "sampling options")
    for flag, (name, parameter) in _BY_FLAG.items():
        group = common if flag in _COMMON else further
        default = _default_text(name, parameter, _OWN | defaults)
        group.add_argument(f"--{flag}", help=f"{parameter.help} Default: {default}.", **_form_of(parameter))


def chosen_parameters(args: argparse.Namespace, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that the flags ask for, over the model's `defaults`."""
    flags = {name: getattr(args, flag.replace("-", "_")) for flag, (name, _) in _BY_FLAG.items()}
    given = {name: value for name, value in flags.items() if value is not None}
    return _OWN | defaults | given


def sampling_params(args: argparse.Namespace, defaults: dict[str, Any]) -> SamplingParams:
    """Return `chosen_parameters`, streamed as deltas. Raises ValueError or TypeError as `SamplingParams` does."""
    return SamplingParams(**{"output_kind": RequestOutputKind.DELTA} | chosen_parameters(args, defaults))


def parameter_names() -> list[str]:
    """Return the names of the parameters that have a flag."""
    return [name for name, _ in _BY_FLAG.values()]


def parse_parameter(name: str, text: str) -> tuple[str, Any]:
    """Return the name of the parameter and the value that `text` stands for; `name` may be that of its flag.

    Raises ValueError for an unknown name, and for a text that is not a value of the parameter's type.
    """
    names = {flag: field for flag, (field, _) in _BY_FLAG.items()} | {field: field for field in parameter_names()}
    if name not in names:
        hint = did_you_mean(name, names) or f"; there are {', '.join(parameter_names())}"
        raise ValueError(f"there is no parameter {name!r}{hint}")
    field = names[name]
    match PARAMETERS[field]:
        case Integer():
            convert: Any = int
        case Number():
            convert = float
        case Strings():
            return field, [text]
        case _:
            convert = SWITCH.__getitem__
    try:
        return field, convert(text)
    except (ValueError, KeyError):
        kind = {int: "an integer", float: "a number"}.get(convert, "on or off")
        raise ValueError(f"{field} must be {kind}, got {text!r}") from None


def _default_text(name: str, parameter: Parameter, defaults: Mapping[str, Any]) -> str:
    """Return the default of a parameter in words; `defaults` are the defaults of the command."""
    value = defaults.get(name, getattr(SamplingParams(), name))
    text = f"{value:g}" if type(value) in (int, float) else _NO_VALUE.get(name, "off")
    return f"the model's own, or {text}" if parameter.generation_config else text


def _form_of(parameter: Parameter) -> dict[str, Any]:
    """Return the arguments of `add_argument` that say how the flag is written."""
    match parameter:
        case Integer():
            return {"type": int, "metavar": "N"}
        case Number():
            return {"type": float, "metavar": "X"}
        case Strings():
            return {"action": "append", "metavar": "TEXT"}
        case _:
            return {"action": "store_true", "default": None}
