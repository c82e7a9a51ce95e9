"""The longest text that a token can stand for, from which follows how many tokens a text has at least."""

import itertools
from typing import Any, NamedTuple

import msgspec

_KEPT_BY_PRE_TOKENIZERS = ("Digits", "Metaspace")
"""Pre-tokenizers that keep every character."""
_PART_CHARS = 2**16
"""Number of characters of a text that are looked at together."""
_NFC_CHARS = 4
"""Number of characters of the longest canonical decomposition in Unicode. NFC makes one character of at most this many,
and at most this many of one."""


class _AddedToken(msgspec.Struct):
    content: str
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct):
    type: str = ""
    vocab: msgspec.Raw = msgspec.Raw(b"{}")
    byte_fallback: bool = False
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _TokenizerFile(msgspec.Struct):
    """The parts of a tokenizer.json that decide how much text a token stands for."""

    model: _Model
    added_tokens: list[_AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


class TokenLength(NamedTuple):
    """The most text that a token of a tokenizer can stand for."""

    max_chars: int
    lost: str
    """The characters that the tokenizer may leave out, because its vocabulary lacks them."""

    def min_tokens(self, text: str, enough: int) -> int:
        """Return a number of tokens that `text` has at least, without looking further once it is above `enough`."""
        kept = 0
        for start in range(0, len(text), _PART_CHARS):
            part = text[start : start + _PART_CHARS]
            kept += len(part)
            for character in self.lost:
                kept -= part.count(character)
            if kept > enough * self.max_chars:
                break
        return -(-kept // self.max_chars)


def token_length(tokenizer_json: str) -> TokenLength | None:
    """Return how much text a token stands for, from the content of a tokenizer.json.

    None if it may be any length, or is not known: a tokenizer that removes spaces, or that makes one unknown token of
    many characters, turns a text of any length into few tokens. It is known for byte-level BPE and for BPE with a byte
    for each unknown character, with the normalizers and pre-tokenizers that are usual for them.
    """
    file = msgspec.json.decode(tokenizer_json, type=_TokenizerFile)
    model = file.model
    if model.type != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    shrinking = _shrinking(file.normalizer)
    if shrinking is None or any(token.lstrip or token.rstrip for token in file.added_tokens):
        return None
    vocab = msgspec.json.decode(model.vocab, type=dict[str, int])
    steps = _steps(file.pre_tokenizer, "pretokenizers")
    if steps and steps[-1]["type"] == "ByteLevel":
        steps = steps[:-1]
        lacking = {byte for byte, character in _byte_characters().items() if character not in vocab}
    elif model.byte_fallback:
        lacking = {byte for byte in range(256) if f"<0x{byte:02X}>" not in vocab}
    else:
        return None
    # In UTF-8, every character that is not ASCII has a byte in this range.
    if not lacking.isdisjoint(range(0x80, 0xC0)) or not all(map(_keeps_all, steps)):
        return None
    # The library normalizes an added token too, and looks for the result, which can be longer.
    longest_added = max((len(token.content) for token in file.added_tokens), default=0)
    if file.normalizer is not None:
        longest_added = _NFC_CHARS * longest_added + len(_steps(file.normalizer, "normalizers"))
    lost = "".join(chr(byte) for byte in sorted(lacking) if byte < 0x80)
    return TokenLength(shrinking * max(longest_added, *map(len, vocab)), lost)


def _steps(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the parts of a "Sequence", whose list is under `key`, or the single part."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for child in part[key] for step in _steps(child, key)]


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """Return the maximum number of characters that the normalizer makes one of; None if it can remove characters."""
    shrinking = 1
    for step in _steps(normalizer, "normalizers"):
        match step:
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                if len(content) != len(pattern):
                    return None
            case {"type": "NFC"}:
                shrinking *= _NFC_CHARS
            case _:
                return None
    return shrinking


def _keeps_all(pre_tokenizer: dict[str, Any]) -> bool:
    """Return whether the pre-tokenizer keeps every character."""
    if pre_tokenizer["type"] == "Split":
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _KEPT_BY_PRE_TOKENIZERS


def _byte_characters() -> dict[int, str]:
    """Return the character by which byte-level tokenizers write each byte.

    Bytes that are printable in Latin-1 stand for themselves, the others for the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}
