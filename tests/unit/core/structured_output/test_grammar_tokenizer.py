"""The vocabulary for grammars comes from the model's tokenizer files."""

import json

import pytest
from support.grammar_library import Library
from support.tiny_tokenizers import byte_fallback, byte_level
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers

from vllm_mp.core.structured_output.exact_tokenizer import SpecialTokens, exact_tokenizer
from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.core.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource
from vllm_mp.core.structured_output.trial import _walk
from vllm_mp.requests.structured_outputs import Constraint

SPACES = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
"""The decoder of SentencePiece's vocabularies, without the removal of a text's first space."""


@pytest.fixture
def folder(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def load(folder, vocab_size=1000, eos_token_ids=(5,)):
    return GrammarTokenizer(TokenizerSource(str(folder), vocab_size, list(eos_token_ids)))


def saved_library(folder, backend):
    """Return the library for a tokenizer whose end-of-sequence token is "</s>"."""
    backend.save(str(folder / "tokenizer.json"))
    return Library.load(TokenizerSource(str(folder), backend.get_vocab_size(), [backend.token_to_id("</s>")]))


def test_vocabulary_has_the_size_of_the_model(folder):
    tokenizer = load(folder).llguidance()
    assert tokenizer.vocab_size == 1000
    assert tokenizer.eos_tokens == [5]


def test_special_tokens_are_split_off_and_never_part_of_a_text(folder):
    loaded = load(folder)
    before, end, after = loaded.special_tokens().split("a<end>b")
    assert (before, after) == ("a", "b")
    tokenizer = loaded.llguidance()
    assert tokenizer.is_special_token(end)
    tokens = tokenizer.tokenize_str("a<end>b")
    assert end not in tokens
    assert tokenizer.decode_str(tokens) == "a<end>b"


def test_tokens_that_only_the_tokenizer_config_adds_are_known(folder):
    [end] = load(folder).special_tokens().split("<end>")
    added = {str(end + 1): {"content": "<call>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    loaded = load(folder, eos_token_ids=[end + 1])
    assert loaded.special_tokens().split("<call><end>") == [end + 1, end]
    assert loaded.llguidance().is_special_token(end + 1)


def test_a_special_token_may_begin_with_another():
    special_tokens = SpecialTokens({"<a>": 1, "<a><b>": 2})
    assert special_tokens.split("x<a><b><a>") == ["x", 2, 1]
    assert SpecialTokens({}).split("x") == ["x"]


def test_names_of_special_tokens_in_a_lark_grammar_become_ids():
    special_tokens = SpecialTokens({"<a>": 1})
    text = 'start: <a> "<a>" /<a>\\/<a>/ <[7]> // <a>\n# <a>\n'
    assert special_tokens.numbered(text) == text.replace("<a>", "<[1]>", 1)
    with pytest.raises(GrammarError, match=r"no special token '<b>'; use one of <a>, <\[5\]> for token 5"):
        special_tokens.numbered("start: <b>")


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_constants_may_contain_the_text_of_a_special_token(tmp_path, kind):
    backend = kind()
    backend.add_special_tokens(["</s>", "<s>", "quick"])
    backend.decoder = decoders.ByteLevel() if kind is byte_level else SPACES
    text = "the quick</s><s> fox"
    library = saved_library(tmp_path, backend)
    assert library.spelled(Constraint("choice", json.dumps([text]))) == text


def test_added_tokens_between_angle_brackets_are_special(tmp_path):
    backend = byte_level()
    backend.add_special_tokens(["</s>"])
    backend.add_tokens([AddedToken("<call>", lstrip=True, normalized=False)])
    call = backend.token_to_id("<call>")
    library = saved_library(tmp_path, backend)
    assert library.grammar_tokenizer.special_tokens().split("a <call>") == ["a ", call]
    assert library.spelled(Constraint("choice", '["a <call> b"]')) == "a <call> b"


@pytest.mark.parametrize(
    "normalizer",
    [normalizers.NFC(), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])],
    ids=["NFC", "NFKC and lower case"],
)
def test_constants_are_spelled_as_they_are_whatever_the_tokenizer_normalizes(tmp_path, normalizer):
    backend = byte_level(normalizer)
    backend.add_special_tokens(["</s>"])
    library = saved_library(tmp_path, backend)
    text = "Cafe\u0301 \u2126 \ufb01"
    assert library.spelled(Constraint("json", json.dumps({"const": text}))) == f'"{text}"'


def prefix_space():
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=True)])
    backend.decoder = decoders.ByteLevel()
    return backend


def metaspace():
    backend = byte_fallback()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = SPACES
    return backend


def replaced_spaces():
    backend = byte_fallback()
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), backend.normalizer])
    backend.decoder = SPACES
    return backend


def replaced_before_a_split():
    """A tokenizer like Gemma's, whose pre-tokenizer never finds a space, because the normalizer replaces them all."""
    backend = byte_fallback()
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = SPACES
    return backend


def split_at_spaces():
    backend = metaspace()
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always", split=True)])
    return backend


def with_whole_words():
    """A vocabulary with added tokens that have spaces, and with pieces that have spaces and are never made."""
    content = json.loads(replaced_spaces().to_str())
    for piece in ("▁▁", "▁▁▁", " ", " the"):
        content["model"]["vocab"].setdefault(piece, len(content["model"]["vocab"]))
    backend = Tokenizer.from_str(json.dumps(content))
    backend.add_tokens([AddedToken("▁▁", normalized=False), AddedToken("▁▁▁", normalized=False)])
    return backend


def truncating():
    backend = byte_level()
    backend.enable_truncation(2)
    return backend


def test_tokenizer_that_says_twice_whether_a_first_space_is_added_can_be_used():
    backend = metaspace()
    backend.add_special_tokens(["</s>"])
    content = json.loads(backend.to_str())
    content["pre_tokenizer"] |= {"add_prefix_space": True, "prepend_scheme": "always"}
    text, _ = exact_tokenizer(content, [backend.token_to_id("</s>")])
    assert Tokenizer.from_str(text).encode("the").tokens == ["the"]


@pytest.mark.parametrize(
    "backend",
    [
        prefix_space,
        metaspace,
        replaced_spaces,
        replaced_before_a_split,
        split_at_spaces,
        with_whole_words,
        truncating,
    ],
)
def test_nothing_is_added_to_constants_or_cut_off(tmp_path, backend):
    backend = backend()
    backend.add_special_tokens(["</s>"])
    library = saved_library(tmp_path, backend)
    for text in ("the  quick\nbrown foxe\u0301", " the", "▁the▁ quick", "▁"):
        assert library.spelled(Constraint("choice", json.dumps([text]))) == text


@pytest.mark.parametrize("backend", [byte_level, replaced_before_a_split])
def test_a_text_has_the_tokens_that_the_model_knows_for_it(tmp_path, backend):
    backend = backend()
    backend.add_special_tokens(["</s>"])
    library = saved_library(tmp_path, backend)
    for text in ("the quick  brown fox", " the\nquick "):
        assert library.tokens(text) == backend.encode(text).ids


def test_a_character_that_stands_for_a_space_in_the_vocabulary_is_no_space_in_a_constraint(tmp_path):
    backend = metaspace()
    backend.add_special_tokens(["</s>"])
    library = saved_library(tmp_path, backend)
    constraint = Constraint("regex", "a▁b| c")
    assert [text for text in ("a▁b", "a b", " c", "▁c") if library.allows(constraint, text)] == ["a▁b", " c"]
    [space] = library.tokens(" ")
    assert library.tokenizer.decode_bytes([space]) == b" "


@pytest.mark.parametrize("text", ["the▁", "thé"])
def test_text_that_the_vocabulary_cannot_spell_is_refused_with_the_remedy(tmp_path, text):
    content = json.loads(replaced_spaces().to_str())
    pieces = [piece for piece in content["model"]["vocab"] if not piece.startswith("<0x")]
    content["model"] |= {"vocab": {piece: number for number, piece in enumerate(pieces)}, "byte_fallback": False}
    backend = Tokenizer.from_str(json.dumps(content))
    backend.add_special_tokens(["</s>"])
    library = saved_library(tmp_path, backend)
    with pytest.raises(GrammarError, match=f"demands '.*{text[-1]}', which the model's vocabulary cannot spell; leave"):
        _walk(library.compile(Constraint("choice", json.dumps([text]))), library.source, is_timed=False)


def test_text_that_leads_to_a_limit_of_the_library_is_refused_with_that_reason(tmp_path):
    backend = byte_level()
    backend.add_special_tokens(["</s>"])
    library = saved_library(tmp_path, backend)
    names = [f"r{number}" for number in range(900)]
    rules = "\n".join(f"{name}: A {name} | A" for name in names)
    constraint = Constraint("grammar", f'start: "b" ({" | ".join(names)})\n{rules}\nA: "a"')
    with pytest.raises(GrammarError, match=r"Current row has \d+ items"):
        _walk(library.compile(constraint), library.source, is_timed=False)


def test_a_folder_without_tokenizer_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(
        GrammarError, match=r"^structured output is not possible .*: it has no tokenizer files"
    ) as error:
        load(tmp_path).llguidance()
    assert str(error.value).count("set `tokenizer` to a folder") == 1


def test_a_damaged_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(GrammarError, match="structured output is not possible"):
        load(folder).llguidance()


def test_a_model_without_end_of_sequence_token_is_refused(folder):
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        load(folder, eos_token_ids=()).llguidance()
