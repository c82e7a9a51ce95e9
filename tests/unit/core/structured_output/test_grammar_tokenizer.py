"""The vocabulary for grammars comes from the model's tokenizer files."""

import json

import pytest
from support.tiny_tokenizers import byte_level

from vllm_mp.core.structured_output.grammar import GrammarError
from vllm_mp.core.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource


@pytest.fixture
def folder(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def load(folder, vocab_size=1000, eos_token_ids=(5,)):
    return GrammarTokenizer(TokenizerSource(str(folder), vocab_size, list(eos_token_ids)))


def test_vocabulary_has_the_size_of_the_model(folder):
    tokenizer = load(folder).llguidance()
    assert tokenizer.vocab_size == 1000
    assert tokenizer.eos_tokens == [5]
    [end] = tokenizer.tokenize_str("<end>", parse_special=True)
    assert tokenizer.is_special_token(end)


def test_tokens_that_only_the_tokenizer_config_adds_are_known(folder):
    number = load(folder).llguidance().tokenize_str("<end>", parse_special=True)[0] + 1
    added = {str(number): {"content": "<call>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = load(folder, eos_token_ids=[number]).llguidance()
    assert tokenizer.tokenize_str("<call>", parse_special=True) == [number]


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
