"""Numbers of things in messages."""


def counted(number: int, noun: str) -> str:
    """Return `number` with `noun`, in the plural unless it is 1: "1 request", "3 requests"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
