"""Half surrogate pairs in JSON, which no text can hold."""

import re

_ESCAPES = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""A whole pair, a half, or another escape."""


def without_half_surrogates(text: str) -> str:
    r"""Return the JSON `text` with U+FFFD for each escape of half a surrogate pair, such as \ud83d without \ude00.

    Models write them, Python's and JavaScript's parsers accept them, and what they mean cannot be encoded.
    """
    return _ESCAPES.sub(lambda escape: r"\ufffd" if escape["half"] else escape[0], text)
