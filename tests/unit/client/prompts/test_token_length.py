"""The number of tokens that a text has at least, without tokenizing it."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_tokenizers import TEXTS, byte_fallback, byte_level, with_begin, word_pieces
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from vllm_mp.client.prompts.token_length import token_length

KNOWN = {
    "byte-level": with_begin(byte_level()),
    "byte-level with a regular expression": byte_level(splits=True),
    "byte-level of NFC": byte_level(normalizers.NFC()),
    "byte fallback": byte_fallback(),
}


def lacking_bytes() -> Tokenizer:
    """Return a byte-level BPE whose vocabulary has no byte but those of lower case letters and of other scripts."""
    alphabet = [
        character for character in pre_tokenizers.ByteLevel.alphabet() if character.islower() or character > "~"
    ]
    vocab = {character: number for number, character in enumerate([*alphabet, "ab"])}
    backend = Tokenizer(models.BPE(vocab, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_text_has_fewer_tokens(name: str, data: st.DataObject) -> None:
    backend = KNOWN[name]
    length = token_length(backend.to_str())
    assert length is not None
    pieces = st.sampled_from(
        [*sorted(backend.get_vocab(), key=len)[-20:], *TEXTS, "a\u0323\u0302", "\u1111\u1171\u11b6"]
    )
    text = "".join(data.draw(st.lists(st.one_of(st.text(), pieces, st.builds(str.__mul__, pieces, st.just(20))))))
    assert length.min_tokens(text, len(text)) <= len(backend.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("name", KNOWN)
def test_long_text_is_known_to_have_many_tokens(name: str) -> None:
    length = token_length(KNOWN[name].to_str())
    assert length is not None
    assert length.min_tokens("x" * 1_000_000, 10**6) > 1_000_000 / 300
    assert 10 < length.min_tokens("x" * 1_000_000, 10) <= 10 + 2**16, "more characters than necessary were counted"


def test_characters_that_the_vocabulary_lacks_do_not_count() -> None:
    backend = lacking_bytes()
    length = token_length(backend.to_str())
    assert length is not None
    assert length.min_tokens("A1" * 100, 200) == 0 == len(backend.encode("A1" * 100))
    assert length.min_tokens("ab" * 100, 200) == 100 == len(backend.encode("ab" * 100))


def test_tokenizers_that_remove_or_join_characters_have_no_known_length() -> None:
    swallowing = byte_level()
    swallowing.add_tokens([AddedToken("<mask>", lstrip=True)])
    splitting = byte_level()
    splitting.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    removing = byte_level()
    removing.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    joining = Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    for backend in (word_pieces(), byte_level(normalizers.Strip()), byte_level(normalizers.NFKC())):
        assert token_length(backend.to_str()) is None
    for backend in (swallowing, splitting, removing):
        assert len(backend.encode(" " * 1000 + "<mask>").ids) < 20
        assert token_length(backend.to_str()) is None
    assert len(joining.encode("x" * 1000)) == 1
    assert token_length(joining.to_str()) is None


def test_longest_decomposition_in_unicode_has_four_characters() -> None:
    assert max(len(unicodedata.normalize("NFD", chr(code))) for code in range(sys.maxunicode + 1)) == 4
