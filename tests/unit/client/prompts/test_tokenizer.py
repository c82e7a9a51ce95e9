"""Tokenizers from all kinds of folders, and the refusal of damaged folders."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vllm_mp.client.outputs.detokenizer import IncrementalDetokenizer
from vllm_mp.client.prompts.tokenizer import load_tokenizer

CORPUS = ["The quick brown fox jumps over the lazy dog.", "你好，世界", "Smile 😀 and wave 👋"] * 4
TEXT = "The dog said 你好 😀<|end|> and left"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def backend_of_bpe() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    return backend


@pytest.fixture
def fast_folder(tmp_path: Path) -> Path:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend_of_bpe(), bos_token="<|start|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path / "fast"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def sentencepiece_folder(tmp_path: Path) -> Path:
    """Return a folder with nothing but tokenizer.model, as the first models of the Llama family have."""
    folder = tmp_path / "sentencepiece"
    folder.mkdir()
    with (folder / "tokenizer.model").open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_writer=file,
            model_type="bpe",
            vocab_size=310,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **names}))
    return folder


@pytest.fixture
def vocabulary_folder(tmp_path: Path) -> Path:
    """Return a folder with vocabulary and merges but no tokenizer.json, as older models such as GPT-2 have."""
    folder = tmp_path / "vocabulary"
    folder.mkdir()
    backend = backend_of_bpe()
    backend.model.save(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    names = {f"{name}_token": "<|end|>" for name in ("bos", "eos", "unk")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **names}))
    return folder


def make_python_only(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "ctrl"}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "CTRLTokenizer", "unk_token": "<|end|>"})
    )


def load(folder: Path, **options: Any) -> Any:
    return load_tokenizer(folder, cache_dir=folder.parent / "cache", **options)


def assert_same(tokenizer: Any, expected: Any) -> None:
    assert tokenizer(TEXT).data == expected(TEXT).data
    assert tokenizer(TEXT, add_special_tokens=False).data == expected(TEXT, add_special_tokens=False).data
    ids = expected(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == expected.decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == expected.decode(ids, skip_special_tokens=True)
    assert tokenizer.special_tokens_map == expected.special_tokens_map
    assert tokenizer.all_special_ids == expected.all_special_ids
    assert tokenizer.added_tokens_decoder == expected.added_tokens_decoder
    assert tokenizer.get_vocab() == expected.get_vocab()
    assert tokenizer.chat_template == expected.chat_template
    assert tokenizer.model_max_length == expected.model_max_length
    assert tokenizer.padding_side == expected.padding_side


def test_file_of_sentencepiece_is_converted(sentencepiece_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_folder, cache_dir=tmp_path / "cache")
    expected = SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
    text = "The dog said 你好 😀"
    assert tokenizer.encode(text, add_special_tokens=False) == expected.encode(text)
    assert tokenizer.decode(expected.encode(text)) == text


def test_tokenizer_json_loads_as_with_auto_tokenizer(fast_folder: Path) -> None:
    assert_same(load(fast_folder), AutoTokenizer.from_pretrained(fast_folder))


@pytest.mark.parametrize("legacy", ["special_tokens_map.json", "added_tokens.json", "added_tokens_decoder"])
def test_special_tokens_are_found_where_older_folders_keep_them(fast_folder: Path, legacy: str) -> None:
    path = fast_folder / "tokenizer_config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if not key.endswith("_token")}
    special = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    if legacy == "special_tokens_map.json":
        (fast_folder / legacy).write_text(json.dumps(special))
    elif legacy == "added_tokens.json":
        (fast_folder / legacy).write_text(json.dumps({"<|start|>": 0, "<|end|>": 1}))
        config |= special
    else:
        flags = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
        tokens = {0: "<|start|>", 1: "<|end|>", load(fast_folder).vocab_size: "dog"}
        config[legacy] = {str(token_id): {"content": token, **flags} for token_id, token in tokens.items()}
        config |= special
    path.write_text(json.dumps(config))
    tokenizer = load(fast_folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert_same(tokenizer, AutoTokenizer.from_pretrained(fast_folder))


def test_tokenizer_json_alone_is_enough(fast_folder: Path) -> None:
    expected = load(fast_folder)(TEXT).data
    (fast_folder / "tokenizer_config.json").unlink()
    assert load(fast_folder)(TEXT)["input_ids"] == expected["input_ids"]


@pytest.mark.extended
def test_vocabulary_and_merges_are_converted_once(vocabulary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same(load(vocabulary_folder), AutoTokenizer.from_pretrained(vocabulary_folder))
    (converted,) = (vocabulary_folder.parent / "cache" / "tokenizers").iterdir()

    def no_child(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("converted again")

    monkeypatch.setattr(subprocess, "run", no_child)
    load(vocabulary_folder)
    (vocabulary_folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="converted again"):
        load(vocabulary_folder)
    assert list(converted.parent.iterdir()) == [converted]


def test_two_processes_may_convert_at_once(vocabulary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = AutoTokenizer.from_pretrained(vocabulary_folder)
    cache = vocabulary_folder.parent / "cache" / "tokenizers"

    def convert(command: list[str], **kwargs: Any) -> Any:
        expected.save_pretrained(command[-1])
        return subprocess.CompletedProcess(command, 0)

    def convert_too_late(command: list[str], **kwargs: Any) -> Any:
        other.rename(converted)
        return convert(command)

    monkeypatch.setattr(subprocess, "run", convert)
    load(vocabulary_folder)
    (converted,) = cache.iterdir()
    other = converted.rename(converted.with_name("other"))
    monkeypatch.setattr(subprocess, "run", convert_too_late)
    assert_same(load(vocabulary_folder), expected)
    assert list(cache.iterdir()) == [converted]


@pytest.mark.extended
def test_tokenizer_that_exists_in_python_only_is_loaded_in_this_process(vocabulary_folder: Path) -> None:
    make_python_only(vocabulary_folder)
    tokenizer = load(vocabulary_folder)
    assert not tokenizer.is_fast
    ids = tokenizer("the dog")["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(vocabulary_folder)("the dog")["input_ids"]
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:1], skip_special_tokens=False)
    text = "".join(detokenizer.append([token_id]) for token_id in [10**6, *ids[1:], -1]) + detokenizer.flush()
    assert tokenizer.decode(ids[:1]) + text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["fast_folder", pytest.param("vocabulary_folder", marks=pytest.mark.extended)])
def test_loading_leaves_torch_out_of_the_process(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    script = (
        "import sys; from pathlib import Path\n"
        "from vllm_mp.client.prompts.tokenizer import load_tokenizer\n"
        "from vllm_mp.client.outputs.detokenizer import IncrementalDetokenizer\n"
        "assert 'transformers' not in sys.modules\n"
        "tokenizer = load_tokenizer(Path(sys.argv[1]), cache_dir=Path(sys.argv[2]))\n"
        "ids = tokenizer('hello')['input_ids']\n"
        "assert tokenizer.decode(ids, skip_special_tokens=True) == 'hello'\n"
        "assert IncrementalDetokenizer(tokenizer, []).append(ids) == 'hello'\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(folder), str(folder.parent / "cache")], check=True)


def test_slow_mode_asks_auto_tokenizer(vocabulary_folder: Path) -> None:
    make_python_only(vocabulary_folder)
    assert not load(vocabulary_folder, mode="slow").is_fast
    assert not (vocabulary_folder.parent / "cache").exists()


def test_code_in_the_folder_runs_only_if_it_is_trusted(fast_folder: Path) -> None:
    path = fast_folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}))
    (fast_folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (fast_folder / "mine.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\nclass Mine(PreTrainedTokenizerFast):\n    pass\n"
    )
    assert type(load(fast_folder)).__name__ != "Mine"
    assert type(load(fast_folder, trust_remote_code=True)).__name__ == "Mine"


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_template_of_the_processor_is_that_of_a_tokenizer_without_one(fast_folder: Path, file: str) -> None:
    (fast_folder / file).write_text(json.dumps({"chat_template": "<{{ messages[0]['content'] }}>"}))
    (fast_folder / "chat_template.jinja").unlink(missing_ok=True)
    assert load(fast_folder).apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<hi>"
    (fast_folder / "chat_template.jinja").write_text("own")
    assert load(fast_folder).chat_template == "own"


def test_chat_template_replaces_the_one_of_the_folder(fast_folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = load(fast_folder, chat_template="<{{ messages[0]['content'] }}>")
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<hi>"
    assert load(fast_folder).apply_chat_template(messages, tokenize=False) == "hi"


def test_unknown_mode_is_refused(fast_folder: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer_mode must be 'auto' or 'slow', got 'mistral'"):
        load(fast_folder, mode="mistral")


def damage_nothing_there(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def damage_truncated(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:500])


def damage_not_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def damage_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"bos_token": ')


def damage_config_type(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (damage_nothing_there, "no tokenizer files"),
        (damage_truncated, ""),
        (damage_not_a_tokenizer, ""),
        (damage_config, "tokenizer_config.json is not valid JSON"),
        (damage_config_type, "tokenizer_config.json holds a list"),
    ],
)
def test_folder_without_a_valid_tokenizer_is_refused_by_name(fast_folder: Path, damage: Any, cause: str) -> None:
    damage(fast_folder)
    with pytest.raises(ValueError) as caught:
        load(fast_folder)
    message = str(caught.value)
    assert str(fast_folder) in message
    assert cause in message
    assert "Download the model's tokenizer files again" in message


def test_folder_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone does not exist"):
        load(tmp_path / "gone")


@pytest.mark.extended
def test_conversion_that_fails_says_why_and_leaves_no_files(vocabulary_folder: Path) -> None:
    (vocabulary_folder / "vocab.json").write_text("not json")
    with pytest.raises(ValueError, match="failed with exit code 1"):
        load(vocabulary_folder)
    assert list((vocabulary_folder.parent / "cache" / "tokenizers").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file_is_refused_by_name(fast_folder: Path) -> None:
    (fast_folder / "tokenizer.json").chmod(stat.S_IWUSR)
    with pytest.raises(ValueError, match=str(fast_folder)):
        load(fast_folder)


def test_working_folder_that_was_removed_is_the_named_cause(default_model, tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ValueError, match=r"^the working folder of this process was removed: change to a folder"):
        load_tokenizer(default_model, cache_dir=tmp_path)
