"""The token ids of prompts, as the tokenizer gives them, without a wait for other prompts."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.covering import covering
from support.tiny_tokenizers import (
    TEXTS,
    byte_fallback,
    byte_level,
    transformers_tokenizer,
    unigram,
    with_begin,
    word_pieces,
)
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from vllm_mp.client.prompts.prompt import LONG_TEXT_CHARS, TooManyTokensError, parse_prompt
from vllm_mp.client.prompts.prompt_tokenizer import _SHORT_CHARS, PromptTokenizer

BACKENDS = {
    "byte-level": with_begin(byte_level()),
    "byte fallback": byte_fallback(),
    "word pieces": word_pieces(),
    "unigram": unigram(),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_special_tokens": False},
    {"add_special_tokens": True},
    {"truncation": True, "max_length": 4},
    {"truncation": True, "max_length": 1},
    {"truncation": True, "max_length": 3},
    {"truncation": True, "max_length": 4, "add_special_tokens": False},
    {"truncation": True, "max_length": 100_000},
    {"truncation": False},
    {"truncation": True},
    {"max_length": 4},
]


def ids(tokenizer: Any, texts: list[str], options: dict[str, Any], max_tokens: int | None = None) -> list[Any]:
    prompt_tokenizer = PromptTokenizer(tokenizer)

    async def main() -> list[Any]:
        calls = [prompt_tokenizer.ids(text, options, max_tokens) for text in texts]
        return await asyncio.gather(*calls, return_exceptions=True)

    try:
        return asyncio.run(main())
    finally:
        prompt_tokenizer.close()


@pytest.mark.parametrize(
    ("name", "options", "side"), covering([*BACKENDS], OPTIONS, ["right", "left"], rest_is_extended=True), ids=str
)
def test_token_ids_are_those_of_a_call_of_the_tokenizer(name: str, options: dict[str, Any], side: str) -> None:
    tokenizer = transformers_tokenizer(BACKENDS[name])
    tokenizer.truncation_side = side
    texts = ["", "a", *TEXTS, "<s> [CLS]", "long " * (1 + _SHORT_CHARS // 5)]
    assert ids(tokenizer, texts, options) == [tokenizer(text, **options).input_ids for text in texts]


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(), max_size=20))
def test_token_ids_of_any_texts_are_those_of_a_call_of_the_tokenizer(texts: list[str]) -> None:
    tokenizer = transformers_tokenizer(BACKENDS["byte-level"])
    assert ids(tokenizer, texts, {}) == [tokenizer(text).input_ids for text in texts]


def test_settings_of_the_tokenizer_and_calls_of_it_change_no_token_ids() -> None:
    backend = with_begin(byte_level())
    backend.enable_padding(pad_id=3, pad_token="<s>", length=64)
    backend.enable_truncation(2)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, split_special_tokens=True, pad_token="<s>")
    prompt_tokenizer = PromptTokenizer(tokenizer)
    texts = ["<s>", *TEXTS]

    async def main() -> list[list[int]]:
        tokenizer("a b c d", truncation=True, max_length=1, split_special_tokens=False)
        return [await prompt_tokenizer.ids(text, {}) for text in texts]

    assert asyncio.run(main()) == [tokenizer(text).input_ids for text in texts]


def test_tokenizer_with_code_of_its_own_is_called() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus([part.upper() for part in text] if isinstance(text, list) else text.upper())

    tokenizer = Shouting(tokenizer_object=byte_level())
    loud = transformers_tokenizer(byte_level())
    assert ids(tokenizer, ["abc", "d"], {}) == [loud("ABC").input_ids, loud("D").input_ids]


@pytest.mark.parametrize("name", BACKENDS)
def test_more_tokens_than_the_limit_are_refused_and_as_many_are_not(name: str) -> None:
    tokenizer = transformers_tokenizer(BACKENDS[name])
    for text in (TEXTS[0], TEXTS[0] * 2000):
        expected = tokenizer(text).input_ids
        assert ids(tokenizer, [text], {}, len(expected)) == [expected]
        (error,) = ids(tokenizer, [text], {}, len(expected) - 1)
        assert isinstance(error, TooManyTokensError)
        assert str(error) == f"{len(expected)} tokens"


def test_text_that_cannot_fit_is_refused_without_being_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = transformers_tokenizer(BACKENDS["byte-level"])
    monkeypatch.setattr("vllm_mp.client.prompts.prompt_tokenizer._encode", lambda *_: pytest.fail("it was tokenized"))
    (error,) = ids(tokenizer, ["x" * 1_000_000], {}, 100)
    assert isinstance(error, TooManyTokensError)
    assert str(error).startswith("1000000 characters, which are at least ")


@pytest.mark.parametrize("name", BACKENDS)
def test_long_text_that_is_no_unicode_is_refused_with_the_place_of_its_fault(name: str) -> None:
    text = "é" * LONG_TEXT_CHARS + "a\ud800b"
    assert parse_prompt(text).text is text, "it was checked on the event loop"
    (error,) = ids(transformers_tokenizer(BACKENDS[name]), [text], {})
    assert isinstance(error, ValueError)
    assert f"'\\ud800' at character {LONG_TEXT_CHARS + 1} is half of a surrogate pair" in str(error)
    with pytest.raises(ValueError, match="surrogate"):
        parse_prompt({"prompt": text, "prompt_token_ids": [1]})


def test_text_that_fits_once_it_is_truncated_is_not_refused_for_its_size() -> None:
    tokenizer = transformers_tokenizer(BACKENDS["byte-level"])
    options = {"truncation": True, "max_length": 5}
    text = "x" * 100_000
    assert ids(tokenizer, [text], options, 100) == [tokenizer(text, **options).input_ids]
    (error,) = ids(tokenizer, [text], options, 4)
    assert isinstance(error, TooManyTokensError)


def test_refused_text_affects_no_other_of_its_batch() -> None:
    tokenizer = transformers_tokenizer(BACKENDS["byte-level"])
    texts = ["a", TEXTS[0] * 10, "\ud800", "b"]
    first, long, invalid, last = ids(tokenizer, texts, {}, 40)
    assert [first, last] == [tokenizer("a").input_ids, tokenizer("b").input_ids]
    assert isinstance(long, TooManyTokensError)
    assert isinstance(invalid, Exception)


@pytest.mark.parametrize("options", [{}, {"truncation": True, "max_length": 5}], ids=["whole", "truncated"])
def test_short_texts_do_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    from vllm_mp.client.prompts import prompt_tokenizer as module

    tokenizer = transformers_tokenizer(BACKENDS["byte-level"])
    entered, gate, encode = threading.Event(), threading.Event(), module._encode

    def blocking(backend: Tokenizer, jobs: list[Any]) -> list[list[int]]:
        if len(jobs[0].text) > _SHORT_CHARS:
            entered.set()
            assert gate.wait(60)
        return encode(backend, jobs)

    monkeypatch.setattr(module, "_encode", blocking)
    prompt_tokenizer = PromptTokenizer(tokenizer)
    text = "long " * _SHORT_CHARS

    async def main() -> None:
        long = [asyncio.ensure_future(prompt_tokenizer.ids(text, options)) for _ in range(3)]
        await asyncio.to_thread(entered.wait, 60)
        for short in ("a", "some words " * 200):
            assert await prompt_tokenizer.ids(short, {}) == tokenizer(short).input_ids
        cut = {"truncation": True, "max_length": 3}
        assert await prompt_tokenizer.ids("some words", cut) == tokenizer("some words", **cut).input_ids
        assert not any(task.done() for task in long)
        long[1].cancel()
        gate.set()
        assert await long[0] == await long[2] == tokenizer(text, **options).input_ids

    asyncio.run(main())
    prompt_tokenizer.close()


def test_short_texts_do_not_wait_for_long_ones_of_a_tokenizer_in_python() -> None:
    entered, gate = threading.Event(), threading.Event()

    class Characters(PreTrainedTokenizer):
        vocab_size = 256

        def get_vocab(self) -> dict[str, int]:
            return {chr(code): code for code in range(256)}

        def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
            if len(text) > _SHORT_CHARS:
                entered.set()
                assert gate.wait(60)
            return list(text)

        def _convert_token_to_id(self, token: str) -> int:
            return ord(token)

        def _convert_id_to_token(self, index: int) -> str:
            return chr(index)

    prompt_tokenizer = PromptTokenizer(Characters())
    text = "x" * (_SHORT_CHARS + 1)

    async def main() -> None:
        long = asyncio.ensure_future(prompt_tokenizer.ids(text, {}))
        await asyncio.to_thread(entered.wait, 60)
        for options in ({}, {"truncation": True, "max_length": 2}):
            assert await prompt_tokenizer.ids("ab", options) == [97, 98]
        assert await prompt_tokenizer.decode([97, 98], {}) == "a b"
        assert not long.done()
        gate.set()
        assert await long == [120] * len(text)

    asyncio.run(main())
    prompt_tokenizer.close()


def test_tokenizer_is_refused_in_a_forked_child() -> None:
    prompt_tokenizer = PromptTokenizer(transformers_tokenizer(BACKENDS["byte-level"]))
    assert asyncio.run(prompt_tokenizer.ids("a", {}))
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(asyncio.wait_for(prompt_tokenizer.ids("long " * _SHORT_CHARS, {}), 30))
        except RuntimeError as error:
            os._exit(0 if "create it after the fork" in str(error) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    prompt_tokenizer.close()


def test_close_fails_callers_of_every_kind() -> None:
    prompt_tokenizer = PromptTokenizer(transformers_tokenizer(BACKENDS["byte-level"]))

    async def main() -> None:
        prompt_tokenizer.close()
        for text, options in (("a", {}), ("long " * _SHORT_CHARS, {}), ("a", {"truncation": True, "max_length": 1})):
            with pytest.raises(RuntimeError, match="closed"):
                await prompt_tokenizer.ids(text, options)

    asyncio.run(main())
