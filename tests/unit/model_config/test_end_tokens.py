"""Every file that may name a token that ends completions is read."""

import json

import pytest

from vllm_mp.model_config.end_tokens import end_token_ids, unnamed_end_token_id

ADDED = [{"id": 7, "content": "<|im_end|>", "special": True}, {"id": 3, "content": "</s>"}]


def write(folder, **files):
    """Write JSON files, by their names without the suffix."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def ends(folder, generation=None, config=None, override=None):
    return end_token_ids(folder, folder, generation or {}, config or {}, override, 10)


@pytest.mark.parametrize(
    "eos_token", ["<|im_end|>", {"content": "<|im_end|>", "lstrip": False}], ids=["text", "object"]
)
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_end_token_of_the_tokenizer_counts_beside_that_of_the_model(tmp_path, eos_token, file):
    write(tmp_path, tokenizer={"model": {"vocab": {"a": 0}}, "added_tokens": ADDED}, **{file: {"eos_token": eos_token}})
    assert ends(tmp_path, {"eos_token_id": 3}) == [3, 7]
    assert ends(tmp_path, None, {"eos_token_id": 7}) == [7]
    assert ends(tmp_path) == [7]


def test_tokens_that_the_settings_list_need_no_tokenizer_json(tmp_path):
    decoder = {"3": {"content": "</s>"}, "7": {"content": "<|im_end|>"}}
    write(tmp_path, tokenizer_config={"eos_token": "<|im_end|>", "added_tokens_decoder": decoder})
    assert ends(tmp_path) == [7]


def test_configuration_of_the_text_part_counts(tmp_path):
    assert ends(tmp_path, None, {"text_config": {"eos_token_id": [4, 5]}, "eos_token_id": 4}) == [4, 5]
    assert ends(tmp_path, {"eos_token_id": [1, 106]}, {"eos_token_id": 1}) == [1], "106 is outside the vocabulary"


def test_user_replaces_them_all(tmp_path):
    write(tmp_path, tokenizer={"added_tokens": ADDED}, tokenizer_config={"eos_token": "<|im_end|>"})
    assert ends(tmp_path, {"eos_token_id": 3}, {"eos_token_id": 4}, override=5) == [5]
    assert ends(tmp_path, {"eos_token_id": 3}, {"eos_token_id": 4}, override=[5, 6]) == [5, 6]


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config": {"eos_token": None}},
        {"tokenizer_config": {"eos_token": "<unknown>"}, "tokenizer": {"added_tokens": ADDED}},
        {"tokenizer_config": {"eos_token": "</s>"}, "tokenizer": ["nonsense"]},
        {"tokenizer_config": {"eos_token": 5, "added_tokens_decoder": {"x": 1}}},
    ],
)
def test_tokenizer_that_does_not_tell_adds_nothing(tmp_path, files):
    write(tmp_path, **files)
    assert ends(tmp_path, {"eos_token_id": 3}) == [3]


def test_without_a_tokenizer_only_the_model_counts(tmp_path):
    write(tmp_path, tokenizer={"added_tokens": ADDED}, tokenizer_config={"eos_token": "<|im_end|>"})
    assert end_token_ids(tmp_path, None, {"eos_token_id": 3}, {}, None, 10) == [3]


def test_stop_reason_does_not_name_the_own_end_token_of_the_tokenizer(tmp_path):
    assert unnamed_end_token_id(tmp_path, [3, 7]) == 3, "the tokenizer does not tell"
    write(tmp_path, tokenizer={"added_tokens": ADDED}, tokenizer_config={"eos_token": "<|im_end|>"})
    assert unnamed_end_token_id(tmp_path, [3, 7]) == 7
    assert unnamed_end_token_id(None, [3, 7]) is None
