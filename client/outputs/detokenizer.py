"""Incremental detokenization: token ids in, whole characters out."""

from __future__ import annotations

import codecs
import functools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_utf_8_decode = codecs.utf_8_decode
"""Called as (bytes, errors, final), it returns the text and the number of bytes that it has read; unless `final` is
set, it leaves an incomplete character at the end unread."""
_MAX_CHAR_TOKENS = 4
"""Tokens that may hold parts of one character: UTF-8 uses at most 4 bytes for it."""
_CONTEXT_SIZES = (6, 5, 7, 4, 3, 2, 1)
"""Sizes of a window's context to try, in tokens, the preferred size first. A run of byte tokens can only be cut between
characters, and the last whole character starts at most 7 tokens before the end: 3 tokens of an incomplete character,
and its own 4."""
_MAX_WINDOW = 16
"""Number of tokens above which a window is cut to its context."""
_REMEMBERED_TEXTS = 65_536
"""Number of texts that `token_texts` remembers for a tokenizer."""


class IncrementalDetokenizer:
    """Turns a growing list of token ids into text, and never emits half a character.

    The results of `append` and `flush`, joined, are the text of prompt + output without the text of the prompt. The
    prompt matters because text depends on the tokens before it: a sentencepiece word keeps its leading space only if it
    is not the first word, and a prompt may end in the middle of a character, which then counts as output.

    Ids that the tokenizer does not know (models pad their vocabularies) have empty text. The tokenizer's vocabulary is
    read once per tokenizer: tokens that are added to it later may be missed.

    Args:
        tokenizer: a `transformers` tokenizer, fast or slow.
        prompt_token_ids: the ids that the output continues; only the last few are used.
        skip_special_tokens: leave special tokens (end of text, …) out of the text.
        spaces_between_special_tokens: False joins consecutive added tokens without the space that some tokenizers put
            between them. Without effect if special tokens are skipped.
    """

    __slots__ = ("append", "byte_text", "flush")

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        vocabulary = _vocabulary_of(tokenizer)
        text: ByteText | _TextWindow
        self.byte_text: ByteText | None = None
        """What `append` and `flush` belong to, for a byte-level tokenizer."""
        if vocabulary.byte_level is not None:
            # These tokenizers never put a space between special tokens, so spaces_between_special_tokens has no effect.
            text = self.byte_text = ByteText(vocabulary.byte_level[skip_special_tokens], prompt_token_ids)
        else:
            skipped: frozenset[int] = vocabulary.special_ids if skip_special_tokens else frozenset()
            joined = {} if skip_special_tokens or spaces_between_special_tokens else vocabulary.added_tokens
            text = _TextWindow(_decoder(tokenizer, vocabulary), skipped, joined, prompt_token_ids)
        self.append: Callable[[Sequence[int]], str] = text.append
        """Add output tokens, any number at once; return the text that became certain, possibly ""."""
        self.flush: Callable[[], str] = text.flush
        """Return the text that is still held back at the end: an incomplete character as U+FFFD, or ""."""


class ByteText:
    """Detokenization for byte-level tokenizers, whose tokens are fixed strings of bytes.

    The bytes are read as UTF-8, regardless of the borders of tokens. The bytes of an incomplete character at the end
    are held back. While there are none, the text of a token that consists of whole characters depends on no other
    token, and is made once for all streams.
    """

    __slots__ = ("_held", "_texts", "_token_bytes")

    def __init__(self, vocabulary: _ByteVocabulary, prompt_token_ids: Sequence[int]) -> None:
        self._token_bytes = token_bytes = vocabulary.token_bytes
        self._texts = vocabulary.texts
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = token_bytes[token_id] + tail
            if len(tail) >= _MAX_CHAR_TOKENS:
                break
        self._held = tail[_utf_8_decode(tail, "replace", False)[1] :]

    def append(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1 and not self._held:
            text = self._texts[token_ids[0]]
            if text is not None:
                return text
        token_bytes = self._token_bytes
        data = self._held + b"".join([token_bytes[token_id] for token_id in token_ids])
        text, num_read = _utf_8_decode(data, "replace", False)
        self._held = data[num_read:]
        return text

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")


class _TextWindow:
    """Detokenization for any other tokenizer, by decoding a short window of the last tokens again and again.

    The window begins with context: tokens whose text has been emitted. `_emitted` is the part of the window's text that
    has been emitted; the text after it is new, except for a trailing run of U+FFFD, which is an incomplete character
    and is held back. Nothing is emitted while the window's text does not start with `_emitted`: byte-fallback decoders
    turn a whole run of byte tokens into U+FFFD while its last character is incomplete.

    The work per token is bounded. A long window is cut to a few tokens whose text is a suffix of the emitted text. If
    there are no such tokens, because only invalid bytes arrive, all but the last 4 tokens become final.
    """

    __slots__ = ("_decode", "_emitted", "_follows_added", "_joined", "_skipped", "_whole", "_window")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skipped: frozenset[int],
        joined: dict[int, str],
        prompt_token_ids: Sequence[int],
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._joined = joined
        self._follows_added = len(prompt_token_ids) > 0 and int(prompt_token_ids[-1]) in joined
        recent = self._last_kept(prompt_token_ids, 2 * _MAX_WINDOW)
        for size in (*_CONTEXT_SIZES, 2 * _MAX_WINDOW):
            self._window = recent[-size:]
            self._emitted, num_incomplete = self._certain(self._window, self._decode(self._window))
            if self._emitted[:1] not in ("", _REPLACEMENT):
                break
        self._whole = len(self._window) - num_incomplete
        """Number of tokens in the longest emitted prefix of the window that ends with a whole character."""

    def append(self, token_ids: Sequence[int]) -> str:
        if self._joined:
            return "".join([self._append_apart(token_id) for token_id in token_ids])
        return self._extend(token_ids)

    def flush(self) -> str:
        text = self._decode(self._window)
        delta = self._new_part(text, len(self._window))
        self._emitted = text
        self._whole = len(self._window)
        return delta

    def _extend(self, token_ids: Sequence[int]) -> str:
        window, emitted = self._window, self._emitted
        before = len(window)
        if self._skipped:
            skipped = self._skipped
            window += [token_id for token_id in token_ids if token_id not in skipped]
        else:
            window += token_ids
        if len(window) == before:
            return ""
        text = self._decode(window)
        if text[-1:] != _REPLACEMENT:
            delta = self._new_part(text, len(window))
            self._emitted = text
            self._whole = len(window)
            if not delta and emitted:
                # Tokens without text are no context for later tokens, and must not displace tokens with text.
                del window[before:]
                self._whole = before
        else:
            delta = ""
            certain, num_incomplete = self._certain(window, text)
            if certain.startswith(emitted):
                delta = certain[len(emitted) :]
                self._emitted = certain
                if num_incomplete:
                    self._whole = len(window) - num_incomplete
        if len(window) > _MAX_WINDOW and delta and self._slide():
            return delta
        if len(window) > 2 * _MAX_WINDOW:
            delta += self._cut()
        return delta

    def _certain(self, window: list[int], text: str) -> tuple[str, int]:
        """Return `text`, decoded from `window`, without the incomplete character at its end.

        Also return the number of tokens at the end without which the text is whole; 0 if there is no such number.
        """
        certain = text.rstrip(_REPLACEMENT)
        if len(text) - len(certain) > 1:
            # In a run of byte tokens, perhaps only the last are incomplete.
            for num_incomplete in range(1, min(_MAX_CHAR_TOKENS, len(window))):
                shorter = self._decode(window[:-num_incomplete])
                if shorter[-1:] != _REPLACEMENT:
                    return (shorter, num_incomplete) if len(shorter) >= len(certain) else (certain, 0)
        return certain, 0

    def _new_part(self, text: str, size: int) -> str:
        """Return what `text`, decoded from the window's first `size` tokens, adds to the emitted text."""
        if text.startswith(self._emitted):
            return text[len(self._emitted) :]
        # Invalid bytes made the decoder rewrite the whole run of bytes, but emitted text cannot be taken back.
        return self._decode(self._window[self._whole : size])

    def _slide(self) -> bool:
        """Cut the window to its last few tokens if they are sufficient context; return whether they are."""
        window = self._window
        for size in _CONTEXT_SIZES:
            tail = window[-size:]
            certain, _ = self._certain(tail, self._decode(tail))
            if certain and self._emitted.endswith(certain):
                self._window = tail
                self._emitted = certain
                self._whole = max(0, self._whole - (len(window) - size))
                return True
        return False

    def _cut(self) -> str:
        """Make all but the window's last 4 tokens final, and return their new text."""
        final = self._window[:-_MAX_CHAR_TOKENS]
        text = self._decode(final)
        tail = self._window[-2 * _MAX_CHAR_TOKENS :]
        if len(self._emitted) > len(text):
            delta = ""
            self._emitted, _ = self._certain(tail, self._decode(tail))
        else:
            delta = self._new_part(text, len(final))
            self._emitted = self._decode(tail[:_MAX_CHAR_TOKENS])
        self._window = tail
        self._whole = _MAX_CHAR_TOKENS
        return delta

    def _append_apart(self, token_id: int) -> str:
        """Add one token; consecutive added tokens are joined without the decoder's space."""
        content = self._joined.get(token_id)
        follows, self._follows_added = self._follows_added, content is not None
        if content is None or not follows:
            return self._extend((token_id,))
        held = self.flush()
        self._window = [token_id]
        self._emitted = self._decode(self._window)
        self._whole = 1
        return held + content

    def _last_kept(self, token_ids: Sequence[int], size: int) -> list[int]:
        """Return the last `size` ids that are not skipped, or all of them if there are fewer."""
        kept: list[int] = []
        for token_id in reversed(token_ids):
            if token_id not in self._skipped:
                kept.append(token_id)
                if len(kept) == size:
                    break
        kept.reverse()
        return kept


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary (the inverse of GPT-2's `bytes_to_unicode`).

    Printable Latin-1 characters stand for themselves, U+0100 and up for the other bytes.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level vocabulary, computed on first use."""

    def __init__(self, id_to_token: Callable[[int], str | None], skipped: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(skipped, b""))
        self._id_to_token = id_to_token

    def __missing__(self, token_id: int) -> bytes:
        try:
            token = self._id_to_token(token_id) or ""
        except OverflowError:
            token = ""
        try:
            token_bytes = bytes([_BYTE_OF[char] for char in token])
        except KeyError:
            token_bytes = token.encode()
        self[token_id] = token_bytes
        return token_bytes


class _WholeTexts(dict[int, str | None]):
    """The text of each token that consists of whole characters, None for other tokens; computed on first use."""

    def __init__(self, token_bytes: _TokenBytes) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        text: str | None
        try:
            text = self._token_bytes[token_id].decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


class _ByteVocabulary:
    """The tokens of a byte-level tokenizer."""

    def __init__(self, id_to_token: Callable[[int], str | None], skipped: frozenset[int]) -> None:
        """Tokens in `skipped` have no bytes."""
        self.token_bytes = _TokenBytes(id_to_token, skipped)
        self.texts = _WholeTexts(self.token_bytes)


class _Vocabulary:
    """The data that detokenizers of one tokenizer share. It holds no reference to the tokenizer itself."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added: dict[int, Any] = tokenizer.added_tokens_decoder
        self.added_tokens: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids: frozenset[int]
        self.special_texts = frozenset(tokenizer.all_special_tokens)
        """The texts of the tokens that `skip_special_tokens` leaves out."""
        self.byte_level: tuple[_ByteVocabulary, _ByteVocabulary] | None = None
        """The tokens for skip_special_tokens False and True; None unless the tokenizer is byte-level."""
        self.known_ids: frozenset[int] | None = None
        """All ids of a slow tokenizer, which fails on other ids; None for a fast tokenizer."""
        if not tokenizer.is_fast:
            self.special_ids = frozenset(tokenizer.all_special_ids)
            self.known_ids = frozenset(tokenizer.get_vocab().values()) | added.keys()
            return
        from tokenizers.decoders import ByteLevel

        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts |= {token.content for token in added.values() if token.special}
        backend = tokenizer.backend_tokenizer
        if isinstance(backend.decoder, ByteLevel):
            id_to_token = backend.id_to_token
            self.byte_level = (
                _ByteVocabulary(id_to_token, frozenset()),
                _ByteVocabulary(id_to_token, self.special_ids),
            )


def special_texts(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the texts of the tokens that `skip_special_tokens` leaves out.

    They may be more than `tokenizer.all_special_tokens`, which has only those that have a name.
    """
    return _vocabulary_of(tokenizer).special_texts


_vocabularies: weakref.WeakKeyDictionary[Any, _Vocabulary] = weakref.WeakKeyDictionary()


def _vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> _Vocabulary:
    """Return the data of `tokenizer`, which is read on the first call only."""
    vocabulary = _vocabularies.get(tokenizer)
    if vocabulary is None:
        vocabulary = _vocabularies[tokenizer] = _Vocabulary(tokenizer)
    return vocabulary


def _decoder(tokenizer: PreTrainedTokenizerBase, vocabulary: _Vocabulary) -> Callable[[list[int]], str]:
    """Return a function that decodes ids without skipping or cleaning up; unknown ids have no text."""
    if vocabulary.known_ids is not None:
        known = vocabulary.known_ids

        def decode_slow(token_ids: list[int]) -> str:
            ids = [int(token_id) for token_id in token_ids if token_id in known]
            text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            return text

        return decode_slow
    decode = tokenizer.backend_tokenizer.decode

    def decode_fast(token_ids: list[int]) -> str:
        try:
            text: str = decode(token_ids, skip_special_tokens=False)
        except OverflowError:
            text = decode([i for i in token_ids if 0 <= i < 2**32], skip_special_tokens=False)
        return text

    return decode_fast


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of a vocabulary with byte fallback that stands for one byte."""


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], bytes]:
    """Return a function that gives the bytes of a single token, which may be a part of a character in UTF-8."""
    vocabulary = _vocabulary_of(tokenizer)
    text_of = token_texts(tokenizer)
    byte_level = vocabulary.byte_level

    def bytes_of(token_id: int) -> bytes:
        text = text_of(token_id)
        if _REPLACEMENT not in text:
            return text.encode()
        if byte_level is not None:
            return byte_level[0].token_bytes[token_id]
        token = tokenizer.convert_ids_to_tokens(token_id) or ""
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        try:  # the Python tokenizer of a byte-level vocabulary
            return bytes([_BYTE_OF[char] for char in token])
        except KeyError:
            return text.encode()

    return bytes_of


def token_texts(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """Return a function that gives the text of a single token, also of a special token, and remembers it."""
    decode = _decoder(tokenizer, _vocabulary_of(tokenizer))
    return functools.lru_cache(maxsize=_REMEMBERED_TEXTS)(lambda token_id: decode([token_id]))
