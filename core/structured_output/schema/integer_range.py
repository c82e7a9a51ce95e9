"""Regular expressions of the integers and numbers within bounds of any size, digit by digit."""

_FRACTION = r"(\.[0-9]+)?"
_ZERO_FRACTION = r"(\.0+)?"


def integer_regex(low: int | None, high: int | None) -> str:
    """Return the regular expression of the integers in [low, high]; None: without a bound.

    Raises ValueError if there are none.
    """
    return _signed(low, high, "")


def number_regex(low: int | None, high: int | None) -> str:
    """Return the regular expression of the numbers in [low, high] in decimal notation; None: without a bound.

    Raises ValueError if there are none.
    """
    return _signed(low, high, _FRACTION)


def _signed(low: int | None, high: int | None, fraction: str) -> str:
    if low is not None and high is not None and low > high:
        raise ValueError(f"no number is at least {low} and at most {high}")
    parts = []
    if low is None or low < 0:
        nearest = -high if high is not None and high < 0 else 0 if fraction else 1
        parts.append(f"-({_natural(nearest, None if low is None else -low, fraction)})")
    if high is None or high >= 0:
        parts.append(_natural(max(0, low or 0), high, fraction))
    return "|".join(parts)


def _natural(low: int, high: int | None, fraction: str) -> str:
    """Return the numbers in [low, high], which are not negative; with a fraction after each but the last integer."""
    if high is None:
        num_digits = len(str(low))
        longer = f"[1-9][0-9]{{{num_digits},}}"
        return f"({'|'.join([*_integers(low, 10**num_digits - 1), longer])}){fraction}"
    if not fraction:
        return "|".join(_integers(low, high))
    end = f"{high}{_ZERO_FRACTION}"
    return end if low == high else f"({'|'.join(_integers(low, high - 1))}){fraction}|{end}"


def _integers(low: int, high: int) -> list[str]:
    """Return the alternatives for the integers in [low, high], of each number of digits."""
    shortest, longest = len(str(low)), len(str(high))
    if shortest == longest:
        return _same_length(str(low), str(high))
    parts = _same_length(str(low), "9" * shortest)
    if longest - shortest > 1:
        parts.append(f"[1-9][0-9]{{{shortest},{longest - 2}}}")
    return parts + _same_length(str(10 ** (longest - 1)), str(high))


def _same_length(low: str, high: str) -> list[str]:
    """Return the alternatives for the digits from `low` to `high`, which are equally many."""
    rest = len(low) - 1
    if rest == 0:
        return [_digits(low, high)]
    if low[0] == high[0]:
        return [f"{low[0]}({'|'.join(_same_length(low[1:], high[1:]))})"]
    parts = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        parts.append(f"{first}({'|'.join(_same_length(low[1:], '9' * rest))})")
        first += 1
    ends_early = high[1:] != "9" * rest
    if first <= last - ends_early:
        parts.append(f"{_digits(str(first), str(last - ends_early))}[0-9]{{{rest}}}")
    if ends_early:
        parts.append(f"{last}({'|'.join(_same_length('0' * rest, high[1:]))})")
    return parts


def _digits(low: str, high: str) -> str:
    return low if low == high else f"[{low}-{high}]"
