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
    names = {}
    ids = {}
    for token in tokenizer.get("added_tokens") or []:
        token |= {"lstrip": False, "rstrip": False}
        if _is_special(token) or token["id"] in eos_token_ids:
            # Unicode reserves this character for use within a program.
            name = f"\U0010ffff{token['id']}\U0010ffff"
            ids[token["content"]] = token["id"]
            names[token["content"]] = name
            token |= {"content": name, "special": True, "normalized": False}
    _rename(tokenizer["model"], names)
    tokenizer["normalizer"] = _spaces_only(tokenizer.get("normalizer"))
    tokenizer["pre_tokenizer"] = _without_first_space(tokenizer.get("pre_tokenizer"))
    return msgspec.json.encode(tokenizer).decode(), SpecialTokens(ids)


def _is_special(token: dict[str, Any]) -> bool:
    text = token["content"]
    return bool(token.get("special")) or (text.startswith("<") and text.endswith(">"))


def _spaces_only(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the parts of a normalizer that write a space as the vocabulary has it, as in SentencePiece's."""
    parts = [normalizer, *normalizer.get("normalizers", [])] if normalizer else []
    kept = [part for part in parts if part["type"] == "Replace" and part["pattern"].get("String") == " "]
    return {"type": "Sequence", "normalizers": kept} if kept else None


def _without_first_space(pre_tokenizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a pre-tokenizer that adds no space before a text."""
    if pre_tokenizer is None:
        return None
    changed = dict(pre_tokenizer)
    if "add_prefix_space" in changed:
        changed["add_prefix_space"] = False
    if "prepend_scheme" in changed:
        changed["prepend_scheme"] = "never"
    if "pretokenizers" in changed:
        changed["pretokenizers"] = [_without_first_space(part) for part in changed["pretokenizers"]]
    return changed


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens in the vocabulary of a tokenizer's model."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if merges := model.get("merges"):
        model["merges"] = [merge for merge in merges if names.keys().isdisjoint(_pieces(merge))]


def _pieces(merge: str | list[str]) -> tuple[str, str, str]:
    """Return the two pieces that a merge joins, and the joined piece."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right
