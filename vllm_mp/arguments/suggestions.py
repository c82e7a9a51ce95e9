"""Suggestions for misspelt words in the messages of errors."""

from collections.abc import Iterable, Mapping


def did_you_mean(word: str, known: Iterable[str] | Mapping[str, str], *, likeness: float = 0.6) -> str:
    """Return the end of a message that suggests the word of `known` most like `word`; empty if none is like it.

    A mapping has what is suggested by the word that is compared. Case is ignored. `likeness`, from 0 to 1, is how alike
    the words must be.
    """
    import difflib

    suggested = known if isinstance(known, Mapping) else {name: name for name in known}
    by_lower = {name.lower(): suggestion for name, suggestion in suggested.items()}
    close = difflib.get_close_matches(word.lower(), by_lower, 1, likeness)
    return f"; did you mean `{by_lower[close[0]]}`?" if close else ""
