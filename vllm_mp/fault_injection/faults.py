"""The text of the option `fault_injection`: which faults a core brings about itself, and when.

    faults = fault { ";" fault }
    fault  = action "@" item { "," item }
    item   = place | "once" | condition "=" value

A fault strikes at each visit to its place at which all its conditions hold. docs/faults.md explains every word.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

LOAD, STEP, PUBLISH = "load", "step", "publish"
_EVERYWHERE = (LOAD, STEP, PUBLISH)

ACTIONS: dict[str, tuple[str, ...]] = {
    "exit": _EVERYWHERE,
    "kill": _EVERYWHERE,
    "abort": _EVERYWHERE,
    "segv": _EVERYWHERE,
    "raise": _EVERYWHERE,
    "hang": _EVERYWHERE,
    "spin": _EVERYWHERE,
    "slow": _EVERYWHERE,
    "oom": _EVERYWHERE,
    "fulldisk": _EVERYWHERE,
    "clock": _EVERYWHERE,
    "nan": (STEP,),
    "device_oom": _EVERYWHERE,
    "illegal_access": _EVERYWHERE,
    "device_assert": _EVERYWHERE,
}
"""Where each action may strike."""
_NEED_CUDA = ("device_oom", "illegal_access", "device_assert")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault; a condition that is None always holds."""

    text: str
    action: str
    place: str = STEP
    once: bool = False
    """Strike in one incarnation only, and there at one visit."""
    incarnation: int | None = None
    step: int | None = None
    request: str | None = None
    """In the step is a request whose id contains this; the three below are about that same request."""
    token: int | None = None
    """The step computes this token of it."""
    position: int | None = None
    """The step gives it the token at this position of its answer."""
    computed: int | None = None
    """This many of its tokens, or more, were computed before."""
    probability: float = 1.0
    seed: int = 0
    share: float = 0.0
    """Of the loading that is done."""
    messages: int = 1
    """Messages of the step that are sent before the fault strikes; where there are fewer, all of them."""
    seconds: float = 1.0

    @property
    def is_about_a_request(self) -> bool:
        return any(value is not None for value in (self.request, self.token, self.position, self.computed))


class _Condition(NamedTuple):
    parse: Callable[[str], Any]
    allowed: str
    places: tuple[str, ...] = _EVERYWHERE
    actions: tuple[str, ...] = tuple(ACTIONS)


def _number(low: int) -> Callable[[str], int]:
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
    "share": _Condition(_fraction, "a number from 0 to 1", (LOAD,)),
    "messages": _Condition(_number(0), "a number from 0", (PUBLISH,)),
    "seconds": _Condition(_seconds, "a number", actions=("slow", "clock")),
}


def parse_faults(text: str, device: str) -> list[Fault]:
    """The faults that `text` names, to strike on `device` ("auto", "cpu" or "cuda"); none for the empty text.

    Raises ValueError, naming the option, the part that is wrong and what is allowed there.
    """
    faults = [_parse_fault(part.strip()) for part in text.split(";") if part.strip()]
    for fault in faults:
        if fault.action in _NEED_CUDA and device == "cpu":
            raise ValueError(
                f"fault_injection: {fault.action} in {fault.text!r} strikes a CUDA device, and the device is 'cpu'; "
                "set device='cuda', or leave it out; see docs/faults.md"
            )
    return faults


def _parse_fault(text: str) -> Fault:
    def refuse(what: str) -> ValueError:
        return ValueError(f"fault_injection: {what} in {text!r}; see docs/faults.md")

    action, at, rest = text.partition("@")
    if action not in ACTIONS:
        raise refuse(f"the action must be one of {', '.join(ACTIONS)}, got {action!r}")
    items = [item.strip() for item in rest.split(",")]
    if not at or not all(items):
        raise refuse("ACTION@ must be followed by places and conditions, parted by commas,")
    values: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        key = name if equals or name == "once" else "place"
        if key in values:
            raise refuse(f"{key!r} is given twice")
        if not equals:
            if item not in (*_EVERYWHERE, "once"):
                raise refuse(f"a word must be one of {', '.join(_EVERYWHERE)}, once, got {item!r}")
            values[key] = True if key == "once" else item
        elif name not in _CONDITIONS:
            raise refuse(f"a condition must be one of {', '.join(_CONDITIONS)}, got {name!r}")
        else:
            try:
                values[name] = _CONDITIONS[name].parse(value)
            except ValueError as error:
                raise refuse(f"{name} must be {_CONDITIONS[name].allowed}, got {value!r}") from error
    place = values.get("place", STEP)
    if place not in ACTIONS[action]:
        raise refuse(f"{action} is possible at {', '.join(ACTIONS[action])}, not at {place!r},")
    for name in values.keys() & _CONDITIONS.keys():
        condition = _CONDITIONS[name]
        if place not in condition.places:
            raise refuse(f"{name} is a condition at {', '.join(condition.places)}, not at {place!r},")
        if action not in condition.actions:
            raise refuse(f"{name} is for {', '.join(condition.actions)}, not for {action!r},")
    if action == "slow" and values.get("seconds", 1.0) < 0:
        raise refuse(f"seconds must not be negative for slow, got {values['seconds']:g}")
    return Fault(text, action, **values)
