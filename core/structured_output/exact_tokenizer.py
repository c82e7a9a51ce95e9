"""The model's tokenizer, changed so that its tokens spell a text exactly, and its special tokens apart from it.

llguidance turns each text that a constraint forces into tokens. The text must come back from them as it is: a part that
reads like a special token must be spelled with ordinary tokens, and no character may be added, removed or replaced.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from vllm_mp.core.structured_output.grammar import GrammarError

_LARK_PART = re.compile(
    r"""
    "(?:\\.|[^"\\\n])*"        # a string
    | (?:\#|//)[^\n]*          # a comment
    | /(?:\\.|[^/\\\n])+/      # a regular expression
    | (?P<name><[^<>\s]+>)     # a special token
    """,
    re.VERBOSE,
)
_MAX_NAMED = 20
"""Maximum number of special tokens in an error."""


class SpecialTokens:
    """The special tokens of a tokenizer, which a structural tag or a Lark grammar may name."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """`ids`: the token ids by the texts of the tokens."""
        self._ids = ids
        # A text that begins with another one comes first, because the first alternative that matches is taken.
        texts = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

    def split(self, text: str) -> list[str | int]:
        """Split a text at the special tokens, which are returned by id."""
        pieces = self._pattern.split(text) if self._pattern else [text]
        return [self._ids.get(piece, piece) for piece in pieces if piece]

    def numbered(self, lark: str) -> str:
        """Return a grammar in Lark's notation with the ids of special tokens in place of their names.

        Raises GrammarError for a name that no special token has.
        """
        return _LARK_PART.sub(self._numbered_part, lark)

    def _numbered_part(self, match: re.Match[str]) -> str:
        name = match["name"]
        if name is None or name.startswith("<["):
            return match[0]
        if name not in self._ids:
            texts = [text for text in self._ids if text.startswith("<")][:_MAX_NAMED]
            known = ", ".join([*texts, "<[5]> for token 5"])
            raise GrammarError(f"the model has no special token {name!r}; use one of {known}")
        return f"<[{self._ids[name]}]>"


def exact_tokenizer(tokenizer: dict[str, Any], eos_token_ids: Collection[int]) -> tuple[str, SpecialTokens]:
    """Return a tokenizer.json whose tokens spell a text exactly, and the special tokens of `tokenizer`.

    `tokenizer` is the content of a tokenizer.json; it is changed. The end-of-sequence tokens count as special, and so
    do added tokens such as <tool_call>: models are trained to mark parts of an answer with these, whole.
    """
    ids = {}
    mark = _space_mark(tokenizer)
    added = tokenizer["added_tokens"] = tokenizer.get("added_tokens") or []
    numbers = _unused(tokenizer["model"], mark, {token["content"] for token in added})
    """The ids of the tokens that stand for no text."""
    for token in added:
        token |= {"lstrip": False, "rstrip": False}
        if _is_special(token) or token["id"] in eos_token_ids:
            ids[token["content"]] = token["id"]
            numbers[token["content"]] = token["id"]
            token |= _special(token["id"])
        else:
            token["content"] = token["content"].replace(mark, " ")
    added += [{"id": number, **_special(number)} for number in {*numbers.values()} - {*ids.values()}]
    _rename(tokenizer["model"], {piece: _name(number) for piece, number in numbers.items()}, mark)
    tokenizer["pre_tokenizer"] = _without_marks(tokenizer)
    tokenizer["normalizer"] = None
    return msgspec.json.encode(tokenizer).decode(), SpecialTokens(ids)


def _name(number: int) -> str:
    """Return the name of a token that no text has. Unicode reserves its character for use within a program."""
    return f"\U0010ffff{number}\U0010ffff"


def _special(number: int) -> dict[str, Any]:
    """Return the fields of an added token that stands for no text."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {**plain, "content": _name(number), "special": True}


def _unused(model: dict[str, Any], mark: str, added: Collection[str]) -> dict[str, int]:
    """Return the ids of pieces that have a space although `mark` stands for it: no text is split into them."""
    if mark == " ":
        return {}
    vocab = model.get("vocab")
    pieces = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab or ()))
    return {piece: number for piece, number in pieces if " " in piece and piece not in added}


def _is_special(token: dict[str, Any]) -> bool:
    text = token["content"]
    return bool(token.get("special")) or (text.startswith("<") and text.endswith(">"))


def _space_mark(tokenizer: dict[str, Any]) -> str:
    """Return the character that stands for a space in the vocabulary, as in SentencePiece's; a space if none does."""
    mark = _mark_of_normalizer(tokenizer)
    if mark is not None:
        return mark
    for part in _parts(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if part["type"] == "Metaspace":
            return str(part["replacement"])
    return " "


def _mark_of_normalizer(tokenizer: dict[str, Any]) -> str | None:
    """Return what the normalizer writes in place of a space, before the pre-tokenizer; None: it keeps spaces."""
    for part in _parts(tokenizer.get("normalizer"), "normalizers"):
        if part["type"] == "Replace" and part["pattern"].get("String") == " ":
            return str(part["content"])
    return None


def _parts(component: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return a component of a tokenizer, or the parts of a sequence, which are in its field `name`."""
    if component is None:
        return []
    return [component] if name not in component else [each for part in component[name] for each in _parts(part, name)]


def _without_marks(tokenizer: dict[str, Any]) -> dict[str, Any] | None:
    """Return a pre-tokenizer that adds no space before a text, and leaves the spaces in it.

    A part that splits at spaces is left out if the normalizer replaces them: then it splits nothing.
    """
    replaces_spaces = _mark_of_normalizer(tokenizer) is not None
    kept = []
    for part in _parts(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if replaces_spaces and part["type"] == "Split" and part["pattern"].get("String") == " ":
            continue
        changed = dict(part)
        if part["type"] == "Metaspace":
            if not part.get("split", True):
                continue
            changed = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithNext", "invert": False}
        if "add_prefix_space" in changed:
            changed["add_prefix_space"] = False
        kept.append(changed)
    return {"type": "Sequence", "pretokenizers": kept} if kept else None


def _rename(model: dict[str, Any], names: Mapping[str, str], mark: str) -> None:
    """Rename tokens in the vocabulary of a tokenizer's model, and write spaces in place of `mark`."""

    def renamed(piece: str) -> str:
        return names.get(piece) or piece.replace(mark, " ")

    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {renamed(piece): number for piece, number in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[renamed(piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if merges := model.get("merges"):
        pairs = map(_pair, merges)
        model["merges"] = [
            [renamed(left), renamed(right)]
            for left, right in pairs
            if names.keys().isdisjoint((left, right, left + right))
        ]


def _pair(merge: str | list[str]) -> tuple[str, str]:
    """Return the two pieces that a merge joins."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right
