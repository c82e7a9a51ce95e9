"""The tokenizer of a GGUF file gives the tokens that llama.cpp gives with the same file."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from vllm_mp.core.weights.gguf_to_safetensors import use_special_tokens_of_file
from vllm_mp.core.weights.gguf_tokenizer import end_token_ids, read_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = (
    gguf.TokenType.NORMAL,
    gguf.TokenType.UNKNOWN,
    gguf.TokenType.CONTROL,
    gguf.TokenType.USER_DEFINED,
    gguf.TokenType.BYTE,
)
BYTE_LEVEL = {
    "a": NORMAL,
    "b": NORMAL,
    "Ġ": NORMAL,
    "1": NORMAL,
    "2": NORMAL,
    "ab": NORMAL,
    "12": NORMAL,
    "ba": NORMAL,
    "<s>": CONTROL,
}
MERGES = ["a b", "1 2"]
DEEPSEEK = {**BYTE_LEVEL, "<｜begin▁of▁sentence｜>": CONTROL, "<｜User｜>": USER_DEFINED}
SENTENCE_PIECE = {"<unk>": UNKNOWN, "<s>": CONTROL, "▁": NORMAL, "a": NORMAL, "▁a": NORMAL, "▁▁": NORMAL}
PHI3 = {
    **SENTENCE_PIECE,
    "<0x0A>": BYTE,
    "<|endoftext|>": CONTROL,
    "<|user|>": CONTROL,
    "<|end|>": CONTROL,
    "<|assistant|>": CONTROL,
    "</s>": USER_DEFINED,
}


def tokenizer_of(path: Path, tokens: dict[str, Any], *, architecture: str = "llama", **values: Any) -> Any:
    """Return the tokenizer of a file with these tokens and their types, and `values` under `tokenizer.ggml`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    model = "llama" if "▁" in tokens else "gpt2"
    writer.add_tokenizer_model(model)
    if tokens:
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(tokens.values()))
    if model == "gpt2":
        writer.add_token_merges(MERGES)
    elif values.get("scores", 1) is None:
        del values["scores"]
    elif "scores" not in values:
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    for key, value in values.items():
        add: Any = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"tokenizer.ggml.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_tokenizer(path, gguf.GGUFReader(path))


def test_control_tokens_with_any_characters_stay_whole_and_keep_their_ids(tmp_path: Path) -> None:
    bos = list(DEEPSEEK).index("<｜begin▁of▁sentence｜>")
    tokenizer = tokenizer_of(
        tmp_path / "a.gguf",
        DEEPSEEK,
        pre="deepseek-r1-qwen",
        architecture="qwen2",
        bos_token_id=bos,
        add_bos_token=True,
    )
    assert tokenizer("ab").input_ids == [bos, 5]
    chat = tokenizer("<｜begin▁of▁sentence｜><｜User｜>ab", add_special_tokens=False).input_ids
    assert chat == [bos, bos + 1, 5]
    assert (tokenizer.bos_token, tokenizer.bos_token_id, len(tokenizer)) == (
        "<｜begin▁of▁sentence｜>",
        bos,
        len(DEEPSEEK),
    )
    assert tokenizer.decode(chat, skip_special_tokens=True) == "<｜User｜>ab"


@pytest.mark.parametrize("split", ["llama-bpe", "tekken"])
def test_texts_of_llama_3_begin_with_bos_and_words_need_no_merges(tmp_path: Path, split: str) -> None:
    tokenizer = tokenizer_of(tmp_path / "a.gguf", BYTE_LEVEL, pre=split, bos_token_id=8)
    assert tokenizer("ba").input_ids == [8, 7]
    told = tokenizer_of(tmp_path / "b.gguf", BYTE_LEVEL, pre=split, bos_token_id=8, add_bos_token=False)
    assert told("ba").input_ids == [7]
    other = tokenizer_of(tmp_path / "c.gguf", BYTE_LEVEL, pre="qwen2", bos_token_id=8, architecture="qwen2")
    assert other("ba").input_ids == [1, 0]


def test_texts_of_qwen2_vl_are_split_as_those_of_qwen2(tmp_path: Path) -> None:
    own, known = (
        tokenizer_of(tmp_path / f"{name}.gguf", BYTE_LEVEL, pre="qwen2", architecture=name).backend_tokenizer
        for name in ("qwen2vl", "qwen2")
    )
    text = "It's 12\n\n ab  ba's é e\u0301!? \n\t x"
    assert own.pre_tokenizer.pre_tokenize_str(text) == known.pre_tokenizer.pre_tokenize_str(text)
    assert own.normalizer.normalize_str(text) == known.normalizer.normalize_str(text) != text


def test_digits_stand_alone_where_the_file_says_so(tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path / "a.gguf", BYTE_LEVEL, pre="smollm")("12").input_ids == [3, 4]
    assert tokenizer_of(tmp_path / "b.gguf", BYTE_LEVEL, pre="gpt-2")("12").input_ids == [6]


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("deepseek-coder", ["Ċ", "ĉret", "Ġ", "1", "2", "Ġ!", "=", "Ġx", "();", "Ċ", "ĉ}"]),
        ("deepseek-llm", ["Ċ", "ĉret", "Ġ", "12", "Ġ!=", "Ġx", "();", "Ċ", "ĉ}"]),
    ],
)
def test_words_of_deepseek_keep_the_white_space_before_them(tmp_path: Path, split: str, words: list[str]) -> None:
    tokenizer = tokenizer_of(tmp_path / "a.gguf", BYTE_LEVEL, pre=split)
    text = "\n\tret 12 != x();\n\t}"
    assert [word for word, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words


def test_sentencepiece_puts_a_space_before_every_text_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "a.gguf", SENTENCE_PIECE, bos_token_id=1)
    assert tokenizer("a").input_ids == [1, 4]
    assert tokenizer(" a").input_ids == [1, 2, 4]
    assert tokenizer.decode([2, 4]) == " a"
    bare = tokenizer_of(tmp_path / "b.gguf", SENTENCE_PIECE, bos_token_id=1, add_space_prefix=False)
    assert bare("a").input_ids == [1, 3]
    assert bare("a a").input_ids == [1, 3, 4]
    assert bare.decode([4]) == " a"


def test_added_tokens_of_phi3_swallow_the_white_space_after_them(tmp_path: Path) -> None:
    def tokens(tokenizer: Any, text: str) -> Any:
        return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False).input_ids)

    read = tokenizer_of(tmp_path / "a.gguf", PHI3, architecture="phi3", bos_token_id=1, eos_token_id=7)
    read.save_pretrained(tmp_path / "saved")
    for tokenizer in (read, PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved")):
        prompt = tokens(tokenizer, "<|user|>\na<|end|>\n<|assistant|>\n")
        assert prompt == ["<|user|>", "▁a", "<|end|>", "<|assistant|>"]
        assert tokens(tokenizer, "</s> \n a") == ["</s>", "▁a"]
        assert tokens(tokenizer, "<s> a<|endoftext|>\n") == ["<s>", "▁", "▁a", "<|endoftext|>", "▁", "<0x0A>"]
    other = tokenizer_of(tmp_path / "b.gguf", PHI3, bos_token_id=1, eos_token_id=7)
    assert tokens(other, "<|user|>\n") == ["<|user|>", "▁", "<0x0A>"]


def test_unknown_way_to_split_text_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"tokenizer\.ggml\.pre is 'strange', .* not known here for the architecture 'llama' \(known are .*gpt-2, "
        r".*smollm.*\); converting the file again does not change it: use the tokenizer of the original model",
    ):
        tokenizer_of(tmp_path / "a.gguf", BYTE_LEVEL, pre="strange")


def test_vocabulary_that_is_missing_or_contradicts_itself_is_refused_by_field(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.tokens is not a list of texts: the file has no vocabulary"):
        tokenizer_of(tmp_path / "a.gguf", {})
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.scores is not a list of 6 numbers"):
        tokenizer_of(tmp_path / "b.gguf", SENTENCE_PIECE, scores=[1.0])
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.scores is missing"):
        tokenizer_of(tmp_path / "d.gguf", SENTENCE_PIECE, scores=None)
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.merges has 'a b', whose parts or whole are no"):
        tokenizer_of(tmp_path / "c.gguf", {"a": NORMAL, "1": NORMAL, "2": NORMAL})


def test_tokens_that_end_a_turn_or_a_text_end_a_generation_though_the_file_names_another(tmp_path: Path) -> None:
    tokens = {
        **BYTE_LEVEL,
        "<|endoftext|>": CONTROL,
        "<|end|>": CONTROL,
        "<|im_end|>": NORMAL,
        "<|eot_id|>": USER_DEFINED,
        "<EOT>": NORMAL,
        "<|end_of_text|>": CONTROL,
        "</s>": USER_DEFINED,
    }
    tokenizer_of(tmp_path / "a.gguf", tokens, pre="dbrx", architecture="phi3", eos_token_id=10)
    assert end_token_ids(gguf.GGUFReader(tmp_path / "a.gguf")) == [10, 9, 12, 14]
    tokenizer_of(tmp_path / "b.gguf", BYTE_LEVEL, pre="dbrx", eos_token_id=8, eot_token_id=7, eom_token_id=6)
    assert end_token_ids(gguf.GGUFReader(tmp_path / "b.gguf")) == [8, 7, 6]


def test_tokens_that_end_a_mapped_model_end_a_converted_model(tmp_path: Path) -> None:
    tokens = {**BYTE_LEVEL, "<|endoftext|>": CONTROL, "<|im_end|>": CONTROL}
    tokenizer_of(tmp_path / "a.gguf", tokens, pre="starcoder", bos_token_id=8, eos_token_id=9)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    model = SimpleNamespace(config=PreTrainedConfig(eos_token_id=2), generation_config=GenerationConfig())
    use_special_tokens_of_file(model, reader)
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id) == (8, end_token_ids(reader)) == (8, [9, 10])
