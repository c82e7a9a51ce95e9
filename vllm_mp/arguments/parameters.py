"""The kinds of parameters that a request has: what values each accepts, and what is derived from its declaration."""

import math
import numbers
import operator
import reprlib
from dataclasses import dataclass
from typing import Any

import msgspec

_MAX_CHARACTERS = 256
"""Bound on the length of a string."""
_BIAS_LIMIT = 1e6


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """The declaration of a field of `SamplingParams`. A subclass says which values the field may have."""

    help: str | None = None
    """The help text of its flag; None for a field without a flag."""
    flag: str | None = None
    """The name of its flag without "--", if it differs from the field's name."""
    generation_config: str | None = None
    """Its name in generation_config.json, if that file may set it."""
    column: str | None = None
    """The NumPy dtype of its column in the core's batch; None unless the sampler reads it for each row."""

    def checked(self, name: str, value: Any) -> Any:
        """Return `value` of the field `name` as the plain type that the wire carries.

        Raises ValueError, naming the field, its value and its range, if it is out of range, and TypeError if it is of
        the wrong type.
        """
        return value


@dataclass(frozen=True)
class Integer(Parameter):
    """An integer in [low, high]."""

    low: int
    high: int
    optional: bool = False
    """None is allowed too."""

    def checked(self, name: str, value: Any) -> int | None:
        if value is None and self.optional:
            return None
        # The abstract type costs much, and every request checks all its parameters.
        if type(value) is not int and (isinstance(value, bool) or not isinstance(value, numbers.Integral)):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        number = int(value)  # the wire does not carry NumPy's scalars
        if not self.low <= number <= self.high:
            raise ValueError(f"{name} must be in [{self.low}, {self.high}], got {value}")
        return number


@dataclass(frozen=True)
class LogprobCount(Integer):
    """A number of log-probabilities; True stands for 1."""

    def checked(self, name: str, value: Any) -> int | None:
        return super().checked(name, 1 if value is True else value)


@dataclass(frozen=True)
class Number(Parameter):
    """A real number in [low, high], or in (low, high] if `open_low`."""

    low: float
    high: float
    open_low: bool = False

    def checked(self, name: str, value: Any) -> float:
        if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise TypeError(f"{name} must be a number, got {value!r}")
        number = _as_float(value)
        # Written so that NaN, which compares false with everything, is refused too.
        if not self.low <= number <= self.high or (self.open_low and number == self.low):
            raise ValueError(
                f"{name} must be in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}], got {value}"
            )
        return number


@dataclass(frozen=True)
class Switch(Parameter):
    """True or False."""

    def checked(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
        return value


@dataclass(frozen=True)
class Strings(Parameter):
    """A list of at most `max_count` strings; None is the empty list."""

    max_count: int
    allow_single: bool = False
    """A string is allowed too, and stands for the list of this string."""

    def checked(self, name: str, value: Any) -> list[str]:
        texts = [value] if self.allow_single and isinstance(value, str) else _as_list(name, value) or []
        if len(texts) > self.max_count:
            raise ValueError(f"{name} must hold at most {self.max_count} strings, got {len(texts)}")
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"{name} must hold strings, got {reprlib.repr(text)}")
            if not text or len(text) > _MAX_CHARACTERS:
                raise ValueError(
                    f"{name} must hold strings of 1 to {_MAX_CHARACTERS} characters, got {len(text)}: "
                    f"{reprlib.repr(text)}; {'give a part of the string' if text else 'leave it out'}"
                )
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{name} must hold valid Unicode, got {reprlib.repr(text)}") from error
        return texts


@dataclass(frozen=True)
class TokenIds(Parameter):
    """A list of at most `max_count` token ids, each kept once; None is the empty list unless `optional`."""

    max_count: int
    optional: bool = False
    """None stays None, and the empty list is refused."""

    def checked(self, name: str, value: Any) -> list[int] | None:
        given = _as_list(name, value)
        if given is None:
            return None if self.optional else []
        _check_count(name, given, self.max_count)
        ids = []
        for token_id in given:
            if isinstance(token_id, bool) or not isinstance(token_id, numbers.Integral):
                raise TypeError(f"{name} must hold token ids, got {token_id!r}")
            ids.append(int(token_id))
            if not 0 <= ids[-1] < 2**31:
                raise ValueError(f"{name} must hold token ids, integers in [0, 2**31), got {token_id}")
        if self.optional and not ids:
            raise ValueError(f"{name} must not be empty; leave it None to allow every token")
        return list(dict.fromkeys(ids))


@dataclass(frozen=True)
class TokenBiases(Parameter):
    """A dict from token ids, or their strings as in JSON, to numbers in [-1e6, 1e6]; or None."""

    max_count: int

    def checked(self, name: str, value: Any) -> dict[int, float] | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise TypeError(f"{name} must be a dict of token ids and numbers, got {reprlib.repr(value)}")
        _check_count(name, value, self.max_count)
        checked = {}
        for token_id, bias in value.items():
            try:
                if isinstance(token_id, bool):
                    raise TypeError("a bool is not a token id")
                key = operator.index(int(token_id) if isinstance(token_id, str) else token_id)
            except (TypeError, ValueError) as error:
                raise TypeError(f"{name} must have token ids as keys, got {reprlib.repr(token_id)}") from error
            if isinstance(bias, bool) or not isinstance(bias, numbers.Real):
                raise TypeError(f"{name}[{key}] must be a number, got {bias!r}")
            if not 0 <= key < 2**31:
                raise ValueError(f"{name} must have token ids as keys, integers in [0, 2**31), got {key}")
            checked[key] = _as_float(bias)
            if not -_BIAS_LIMIT <= checked[key] <= _BIAS_LIMIT:
                raise ValueError(f"{name}[{key}] must be in [-{_BIAS_LIMIT:g}, {_BIAS_LIMIT:g}], got {bias!r}")
        return checked


@dataclass(frozen=True)
class ProcessorNames(Strings):
    """A list of at most `max_count` names of registered logits processors, or None."""

    def checked(self, name: str, value: Any) -> list[str] | None:  # type: ignore[override]
        for processor in value if isinstance(value, list | tuple) else (value,):
            if callable(processor):
                raise TypeError(
                    f"{name} must hold names of logits processors, got {reprlib.repr(processor)}: no code travels to "
                    "the core; start the engine with logits_processors=['name=module:Class'], and give the name here"
                )
        return None if value is None else super().checked(name, value)


@dataclass(frozen=True)
class PlainData(Parameter):
    """A dict with strings as keys, of numbers, strings, bytes, lists and dicts, within a number of bytes; or None."""

    max_bytes: int

    def checked(self, name: str, value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            raise TypeError(f"{name} must be a dict, got {reprlib.repr(value)}")
        return self.unpacked(name, self.packed(name, value))

    def packed(self, name: str, value: dict[str, Any] | None) -> bytes:
        """Return `value` as the wire carries it. Raises TypeError or ValueError as `checked` does."""
        try:
            data = msgspec.msgpack.encode(value) if value else b""
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TypeError(f"{name} must be a dict of plain data: {error}; got {reprlib.repr(value)}") from error
        if len(data) > self.max_bytes:
            raise ValueError(f"{name} must be of at most {self.max_bytes} bytes, got {len(data)}")
        return data

    def unpacked(self, name: str, data: bytes) -> dict[str, Any]:
        """Return the dict that `packed` made into `data`. Raises ValueError for other data."""
        try:
            value: dict[str, Any] = msgspec.msgpack.decode(data, type=dict[str, Any]) if data else {}
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{name} must be a dict of plain data with strings as keys: {error}") from error
        return value


def _as_list(name: str, value: Any) -> list[Any] | None:
    """Return the members of `value` as a list; None for None. Raises TypeError for a value that is not a list."""
    if value is not None and not isinstance(value, list | tuple | set | frozenset):
        raise TypeError(f"{name} must be a list, got {reprlib.repr(value)}")
    return None if value is None else list(value)


def _check_count(name: str, ids: Any, limit: int) -> None:
    """Raise ValueError for more than `limit` ids, so that the work of checking each of them is bounded."""
    if len(ids) > limit:
        raise ValueError(f"{name} must hold at most {limit} token ids, got {len(ids)}")


def _as_float(value: Any) -> float:
    """Return the real number `value`; infinite if it is too large for a float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
