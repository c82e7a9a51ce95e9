"""Suggestions for misspelt words in the messages of errors."""

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message that suggests the word of `known` most like `word`; empty if none is like it."""
    import difflib

    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(word.lower(), by_lower, 1)
    return f"; did you mean `{by_lower[close[0]]}`?" if close else ""
