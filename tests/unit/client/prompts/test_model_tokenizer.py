"""A tokenizer that is made from a record does what the tokenizer of transformers does that was recorded."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as library_logging

from vllm_mp.client.outputs.detokenizer import IncrementalDetokenizer, token_bytes
from vllm_mp.client.prompts import tokenizer as loading
from vllm_mp.client.prompts.chat_template import ChatTemplate, ChatTemplateError
from vllm_mp.client.prompts.model_tokenizer import LibraryNeeded, ModelTokenizer, template_arguments
from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer
from vllm_mp.client.prompts.token_length import token_length
from vllm_mp.client.prompts.tokenizer import load_tokenizer

CORPUS = ["The quick brown fox jumps over the lazy dog.", "你好，世界", "Smile 😀 and wave 👋", "naïve café…"] * 4
SPECIAL = ["<s>", "</s>", "<unk>", "<pad>"]
KINDS = ["byte_level", "sentencepiece", "unigram", "wordpiece"]
PIECES = [
    *SPECIAL,
    "<|im_start|>",
    "e\u0301",
    "\ufffd",
    "👩‍👩‍👧‍👦",
    "🏳️‍🌈",
    "ﷺ",
    "  ",
    "\n",
    "\u2581",
    "\x00",
    "dog",
    "It 's .",
]
TEXTS = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(PIECES)), max_size=6).map("".join)
ID_LISTS = st.lists(st.integers(0, 500), max_size=12)
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FULL_TEMPLATE = (
    "{%- set state = namespace(number=0) %}{%- for message in messages %}{%- if loop.first and tools %}"
    "{{ tools | tojson(indent=2) }}{%- endif %}{%- if message.content is none %}{%- continue %}{%- endif %}"
    "{% generation %}{{ message.content | trim }}{% endgeneration %}"
    "{{ message.thinking }}{{ message.reasoning_content }}"
    "{%- set state.number = state.number + 1 %}{%- endfor %}{{ state.number }}{{ dict(a=1) | tojson }}{{ bos_token }}"
    "{{ strftime_now('%Y') }}{{ documents is none }}{{ language | default('none') }}"
)


def backend_of(kind: str) -> Tokenizer:
    options: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
    if kind == "byte_level":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options
        )
    elif kind == "sentencepiece":
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        options["special_tokens"] = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=440, limit_alphabet=60, **options)
    elif kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.normalizer = normalizers.NFKC()
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", **options)
    else:
        backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=120, **options)
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return backend


def write_folder(folder: Path, kind: str = "byte_level", **settings: Any) -> Path:
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **settings}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend_of(kind), **names)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def recorded(folder: Path, cache_dir: Path) -> ModelTokenizer | None:
    return loading._recorded_tokenizer(folder, cache_dir, partial(load_tokenizer, folder, cache_dir=cache_dir))


def both(folder: Path) -> tuple[ModelTokenizer, Any]:
    cache_dir = folder.parent / "cache"
    library = load_tokenizer(folder, cache_dir=cache_dir)
    tokenizer = recorded(folder, cache_dir)
    assert tokenizer is not None
    return tokenizer, library


@cache
def pair_of(kind: str) -> tuple[ModelTokenizer, Any, PromptTokenizer]:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        tokenizer, library = both(write_folder(Path(name) / kind, kind))
    return tokenizer, library, PromptTokenizer(tokenizer)


def assert_equal_texts(tokenizer: ModelTokenizer, library: Any, ids: list[int]) -> None:
    for skips in (False, True):
        assert tokenizer.decode(ids, skip_special_tokens=skips) == library.decode(ids, skip_special_tokens=skips)
        arrived = []
        for each in (tokenizer, library):
            detokenizer = IncrementalDetokenizer(each, ids[:2], skip_special_tokens=skips)
            arrived.append("".join(detokenizer.append([token_id]) for token_id in ids[2:]) + detokenizer.flush())
        assert arrived[0] == arrived[1]
    assert tokenizer.convert_ids_to_tokens(ids) == library.convert_ids_to_tokens(ids)
    assert [*map(token_bytes(tokenizer), ids)] == [*map(token_bytes(library), ids)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(text=TEXTS, ids=ID_LISTS, length=st.integers(3, 9), adds=st.booleans())
def test_token_ids_and_texts_equal_those_of_the_library(
    kind: str, text: str, ids: list[int], length: int, adds: bool
) -> None:
    tokenizer, library, prompts = pair_of(kind)
    expected = library(text, add_special_tokens=adds).input_ids
    assert prompts.ids_now(text, {"add_special_tokens": adds}) == expected
    assert tokenizer.encode(text, add_special_tokens=adds) == expected
    options = {"add_special_tokens": adds, "truncation": True, "max_length": length}
    assert prompts.ids_now(text, options) == library(text, **options).input_ids
    assert_equal_texts(tokenizer, library, expected)
    assert_equal_texts(tokenizer, library, ids)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"split_special_tokens": True, "truncation_side": "left", "model_max_length": 77},
        {"additional_special_tokens": ["<tool>"], "add_prefix_space": True, "clean_up_tokenization_spaces": True},
        {"add_bos_token": True, "add_eos_token": True, "padding_side": "left"},
    ],
    ids=["default", "split", "more_tokens", "bos"],
)
@pytest.mark.parametrize("kind", ["byte_level", "wordpiece"])
def test_settings_are_those_of_the_library(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, library = both(write_folder(tmp_path / "model", kind, **settings))
    for name in ("special_tokens_map", "all_special_tokens", "all_special_ids", "split_special_tokens"):
        assert getattr(tokenizer, name) == getattr(library, name)
    for name in ("truncation_side", "model_max_length", "chat_template", "added_tokens_decoder", "is_fast"):
        assert getattr(tokenizer, name) == getattr(library, name)
    assert len(tokenizer) == len(library)
    assert template_arguments(tokenizer) == template_arguments(library)
    assert tokenizer.token_length == token_length(library.backend_tokenizer.to_str())
    for text in ("The dog </s> said <tool> it 's .", " a  b "):
        ids = library(text).input_ids
        assert PromptTokenizer(tokenizer).ids_now(text, {}) == ids
        assert_equal_texts(tokenizer, library, ids)


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " hi <b>&amp; 'you' "}],
    [{"role": "system", "content": "S", "name": None}, {"role": "user", "content": "U\n"}],
    [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A ", "reasoning": "because"}],
    [{"role": "user", "content": None}, {"role": "assistant", "content": "the end ", "thinking": "so"}],
]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"continue_final_message": True},
    {"add_generation_prompt": True, "continue_final_message": True},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": [1, 2.5, True, None, "é"]}}}]},
    {"language": "Dansk", "bos_token": "mine"},
    {"chat_template": "{{ messages[0].content }}{{ undefined.x }}"},
    {"chat_template": "{{ raise_exception('no such role') }}"},
    {"chat_template": "{% if"},
    {"chat_template": "{{ namespace(_x=1) }}"},
    {"chat_template": "{{ ''.__class__ }}{{ messages.append(1) }}"},
    {"documents": [{"title": "t", "text": "x"}]},
]


@pytest.mark.parametrize("template", [TEMPLATE, FULL_TEMPLATE], ids=["short", "full"])
def test_chats_are_rendered_as_by_the_library(template: str, tmp_path: Path) -> None:
    tokenizer, library = both(write_folder(tmp_path / "model"))
    tokenizer.chat_template = library.chat_template = template
    num_left = 0
    for messages in [*CONVERSATIONS, []]:
        for variant in VARIANTS:
            results = []
            for each in (tokenizer.render_chat, library.apply_chat_template):
                try:
                    results.append(each(messages, tokenize=False, **variant))
                except (jinja2.TemplateError, ValueError, TypeError) as error:
                    # The library refuses a name in other words.
                    results.append((type(error), "" if "a namespace" in str(error) else str(error)))
                except LibraryNeeded:
                    num_left += 1
                    break
            assert len(results) < 2 or results[0] == results[1], (messages, variant)
    assert num_left <= len(VARIANTS) + 2 * len(CONVERSATIONS) + 1
    assert tokenizer._library is None


def test_chat_that_only_the_library_can_render_loads_it(tmp_path: Path) -> None:
    tokenizer, library = both(write_folder(tmp_path / "model"))
    tokenizer.chat_template = {"default": "default {{ messages[0].content }}", "tool_use": "tools"}
    messages = [{"role": "user", "content": "hi"}]

    async def render() -> None:
        template = ChatTemplate(tokenizer)
        assert await template.render(messages) == "default hi"
        assert await template.render(messages, template="tool_use", tool_fallback=False) == "tools"
        with pytest.raises(ChatTemplateError, match="'padding'"):
            await template.render(messages, variables={"padding": True})

    asyncio.run(render())
    assert type(tokenizer.library()) is type(library)


def test_changes_of_the_library_s_tokenizer_hold_for_chats(tmp_path: Path) -> None:
    tokenizer, _ = both(write_folder(tmp_path / "model"))
    tokenizer.chat_template = "before"
    library = tokenizer.library()
    assert tokenizer.library() is library
    assert library.chat_template == "before"
    library.chat_template = "after"
    library.eos_token = "<pad>"
    assert tokenizer.chat_template == "after"
    assert tokenizer.special_tokens_map["eos_token"] == "<pad>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "after"


def test_rarer_calls_go_to_the_library(tmp_path: Path) -> None:
    tokenizer, library = both(write_folder(tmp_path / "model", "wordpiece", clean_up_tokenization_spaces=True))
    assert tokenizer("a", "b", return_token_type_ids=True).data == library("a", "b", return_token_type_ids=True).data
    ids = library("the dog . it 's").input_ids
    assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.batch_decode([ids, ids]) == library.batch_decode([ids, ids])


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "new.json"])
def test_record_is_not_used_after_a_file_has_changed(file: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    both(folder)
    path = folder / file
    path.write_text((path.read_text() if path.exists() else "{}") + "\n")
    assert recorded(folder, tmp_path / "cache") is None


def test_record_is_not_used_after_a_file_was_replaced_by_one_of_its_length(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text("{{ 'before' }}")
    both(folder)
    template.write_text("{{ 'behind' }}")
    assert recorded(folder, tmp_path / "cache") is None


def test_damaged_record_is_replaced(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    both(folder)
    (path,) = (tmp_path / "cache" / "tokenizer-records").iterdir()
    path.write_text(path.read_text()[:-9])
    assert recorded(folder, tmp_path / "cache") is None
    both(folder)


def test_tokenizer_that_transformers_changes_is_recorded_with_the_change(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "bos_token": "<start>", "extra_special_tokens": ["fox"]})
    )
    tokenizer, library = both(folder)
    assert tokenizer._record.tokenizer_json is not None
    ids = library("the quick fox <start>").input_ids
    assert PromptTokenizer(tokenizer).ids_now("the quick fox <start>", {}) == ids
    assert_equal_texts(tokenizer, library, ids)
    assert len(tokenizer) == len(library)


def test_tokenizer_is_not_recorded_if_transformers_warns_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "model")
    original = loading.load_fast_tokenizer

    def warn(place: Path) -> Any:
        library_logging.get_logger("transformers.x").warning("the regular expression is wrong")
        return original(place)

    monkeypatch.setattr(loading, "load_fast_tokenizer", warn)
    load_tokenizer(folder, cache_dir=tmp_path / "cache")
    assert recorded(folder, tmp_path / "cache") is None
    assert not logging.getLogger("transformers").filters


def test_cache_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (tmp_path / "cache").write_text("a file")
    assert load_tokenizer(folder, cache_dir=tmp_path / "cache")("dog").input_ids


@pytest.mark.parametrize("options", [{"mode": "slow"}, {"trust_remote_code": True}])
def test_other_tokenizers_are_not_recorded(options: dict[str, Any], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    load_tokenizer(folder, cache_dir=tmp_path / "cache", **options)
    assert recorded(folder, tmp_path / "cache") is None


def test_recorded_tokenizer_works_without_transformers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    both(folder)
    script = (
        "import sys; from pathlib import Path\n"
        "from vllm_mp.client.prompts.tokenizer import _recorded_tokenizer\n"
        "from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer\n"
        "tokenizer = _recorded_tokenizer(Path(sys.argv[1]), Path(sys.argv[2]), None)\n"
        "ids = PromptTokenizer(tokenizer).ids_now('the dog', {'truncation': True, 'max_length': 9})\n"
        "assert tokenizer.decode(ids, skip_special_tokens=True) == 'the dog'\n"
        "messages = [{'role': 'user', 'content': 'hi'}]\n"
        "assert tokenizer.apply_chat_template(messages, tokenize=False) == '[user]hi</s>\\n'\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(folder), str(tmp_path / "cache")], check=True)
