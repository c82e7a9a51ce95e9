"""The language of the option `fault_injection`: which faults a core injects into itself, and when.

    faults = fault { ";" fault }
    fault  = action "@" item { "," item }
    item   = point | "once" | condition "=" value

A fault strikes whenever the core passes its point and all its conditions hold; docs/operating/faults.md has all words.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

LOAD, STEP, SEAL, PUBLISH = "load", "step", "seal", "publish"
IMAGE = "image"
"""Between the chunks of an encoding of an image."""
COMPILE, ADAPTER, CALL, MESSAGE = "compile", "adapter", "call", "message"
_OUTSIDE = (COMPILE, ADAPTER, CALL, MESSAGE)
"""Outside of steps: a constraint is compiled, an adapter is read, a call is carried out, a request is admitted."""
_ALL_POINTS = (LOAD, STEP, SEAL, PUBLISH, IMAGE, *_OUTSIDE)

ACTIONS: dict[str, tuple[str, ...]] = {
    "exit": _ALL_POINTS,
    "kill": _ALL_POINTS,
    "abort": _ALL_POINTS,
    "segv": _ALL_POINTS,
    "raise": _ALL_POINTS,
    "hang": _ALL_POINTS,
    "spin": _ALL_POINTS,
    "slow": _ALL_POINTS,
    "busy": _ALL_POINTS,
    "oom": _ALL_POINTS,
    "fulldisk": _ALL_POINTS,
    "clock": _ALL_POINTS,
    "nan": (STEP,),
    "device_oom": _ALL_POINTS,
    "illegal_access": _ALL_POINTS,
    "device_assert": _ALL_POINTS,
}
"""The actions, and the points at which each may strike."""
_CUDA_ACTIONS = ("device_oom", "illegal_access", "device_assert")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault. A condition that is None always holds."""

    text: str
    action: str
    point: str = STEP
    once: bool = False
    """Strike a single time over all incarnations."""
    incarnation: int | None = None
    step: int | None = None
    request: str | None = None
    """The step has a request whose id contains this text. The next three conditions apply to the same request."""
    token: int | None = None
    """The step computes this token id of the request."""
    position: int | None = None
    """The step samples the request's output token at this position, counted from 0."""
    computed: int | None = None
    """At least this many of the request's tokens were computed in earlier steps."""
    probability: float = 1.0
    """Probability with which the fault strikes when all other conditions hold."""
    seed: int = 0
    """Seed of the draws for `probability`."""
    about: str | None = None
    """Part of the constraint in its library's form, of the adapter's name, of the call's name or of the request's id,
    at the points outside of steps."""
    share: float = 0.0
    """Share of the weights that must be loaded, from 0 to 1."""
    messages: int = 1
    """Messages of the step that are sent before the fault strikes; all of them if the step has fewer."""
    seconds: float = 1.0
    """How long `slow` and `busy` take, or how far `clock` moves the time of day."""

    @property
    def is_about_a_request(self) -> bool:
        """Whether any condition is about a request of the step."""
        return any(value is not None for value in (self.request, self.token, self.position, self.computed))


class _Condition(NamedTuple):
    """A condition of the language."""

    parse: Callable[[str], Any]
    """Takes the value as text; raises ValueError for a value that is not allowed."""
    allowed: str
    """The allowed values in words."""
    points: tuple[str, ...] = _ALL_POINTS
    actions: tuple[str, ...] = tuple(ACTIONS)


def _number(low: int) -> Callable[[str], int]:
    """Return the parser of an integer of at least `low`."""

    def parse(text: str) -> int:
        value = int(text)
        if value < low:
            raise ValueError
        return value

    return parse


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not abs(value) < 1e9:
        raise ValueError
    return value


def _step(text: str) -> int | None:
    return None if text == "*" else _number(1)(text)


def _text(text: str) -> str:
    if not text:
        raise ValueError
    return text


_SERVING = (STEP, PUBLISH)
_CONDITIONS: dict[str, _Condition] = {
    "incarnation": _Condition(_number(1), "a number from 1"),
    "step": _Condition(_step, "a number from 1, or *", _SERVING),
    "request": _Condition(_text, "a part of a request's id", _SERVING),
    "token": _Condition(_number(0), "a token id", _SERVING),
    "position": _Condition(_number(0), "a number from 0", _SERVING),
    "computed": _Condition(_number(0), "a number from 0", _SERVING),
    "probability": _Condition(_fraction, "a number from 0 to 1"),
    "seed": _Condition(int, "a number"),
    "about": _Condition(_text, "a part of a constraint, of a name or of a request's id", _OUTSIDE),
    "share": _Condition(_fraction, "a number from 0 to 1", (LOAD,)),
    "messages": _Condition(_number(0), "a number from 0", (PUBLISH,)),
    "seconds": _Condition(_seconds, "a number", actions=("slow", "busy", "clock")),
}


def mark_of_strike(folder: Path, index: int) -> Path:
    """Return the file in a runtime folder that says that the fault at `index`, which strikes once, has struck."""
    return folder / f"fault-{index}"


def parse_faults(text: str, device: str) -> list[Fault]:
    """Return the faults that `text` describes for `device` ("auto", "cpu" or "cuda"); none if `text` is empty.

    Raises ValueError that names the option, the invalid part and what is allowed there.
    """
    faults = [_parse_fault(part.strip()) for part in text.split(";") if part.strip()]
    for fault in faults:
        if fault.action in _CUDA_ACTIONS and device == "cpu":
            raise ValueError(
                f"fault_injection: {fault.action} in {fault.text!r} needs a CUDA device, but the device is 'cpu'; "
                "set device='cuda', or remove the fault; see docs/operating/faults.md"
            )
    return faults


def _parse_fault(text: str) -> Fault:
    """Return the fault that `text` describes. Raises ValueError, naming the invalid part and what is allowed."""

    def refusal(what: str) -> ValueError:
        return ValueError(f"fault_injection: {what} in {text!r}; see docs/operating/faults.md")

    action, at, rest = text.partition("@")
    if action not in ACTIONS:
        raise refusal(f"the action must be one of {', '.join(ACTIONS)}, got {action!r}")
    items = [item.strip() for item in rest.split(",")]
    if not at or not all(items):
        raise refusal("ACTION@ must be followed by points and conditions, separated by commas,")
    values: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        key = name if equals or name == "once" else "point"
        if key in values:
            raise refusal(f"{key!r} is given twice")
        if not equals:
            if item not in (*_ALL_POINTS, "once"):
                raise refusal(f"a word must be one of {', '.join(_ALL_POINTS)}, once, got {item!r}")
            values[key] = True if key == "once" else item
        elif name not in _CONDITIONS:
            raise refusal(f"a condition must be one of {', '.join(_CONDITIONS)}, got {name!r}")
        else:
            try:
                values[name] = _CONDITIONS[name].parse(value)
            except ValueError as error:
                raise refusal(f"{name} must be {_CONDITIONS[name].allowed}, got {value!r}") from error
    point = values.get("point", STEP)
    if point not in ACTIONS[action]:
        raise refusal(f"{action} is possible at {', '.join(ACTIONS[action])}, not at {point!r},")
    for name in values.keys() & _CONDITIONS.keys():
        condition = _CONDITIONS[name]
        if point not in condition.points:
            raise refusal(f"{name} is a condition at {', '.join(condition.points)}, not at {point!r},")
        if action not in condition.actions:
            raise refusal(f"{name} is a condition of {', '.join(condition.actions)}, not of {action!r},")
    if action in ("slow", "busy") and values.get("seconds", 1.0) < 0:
        raise refusal(f"seconds must not be negative for {action}, got {values['seconds']:g}")
    return Fault(text, action, **values)
