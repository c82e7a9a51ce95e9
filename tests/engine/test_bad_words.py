"""Bad words with white space are barred as they are spelled, and no other word."""

import asyncio
import itertools

import pytest

from vllm_mp.testing.engines import answer, greedy

LOT = 100.0
"""A bias with which a token is chosen at each position."""


@pytest.mark.parametrize(
    ("word", "others"),
    [
        ("\n", [" ", "\n\n", "Human"]),
        ("\n\n", ["\n", " "]),
        ("\t", [" ", "\n"]),
        (" ", ["\n"]),
        ("  ", [" ", "\n"]),
    ],
    ids=repr,
)
def test_white_space_is_barred_as_it_is_spelled(llm, word, others):
    tokenizer = llm.get_tokenizer()

    def forced(text: str) -> list[int]:
        """Return the tokens of an answer that repeats the one token of `text` unless it is barred."""
        [token] = tokenizer.encode(text, add_special_tokens=False)
        params = greedy(4, ignore_eos=True, logit_bias={token: LOT}, bad_words=[word])
        tokens = asyncio.run(answer(llm, "Hello", params)).outputs[0].token_ids
        assert set(tokens) == {token} or token not in tokens
        return [token] if token in tokens else []

    assert forced(word) == []
    for other in others:
        assert forced(other) != [], other


def test_word_behind_white_space_is_barred_only_there(llm):
    tokenizer = llm.get_tokenizer()
    newline, human, _ = tokenizer.encode("\nHuman:", add_special_tokens=False)

    def pairs(*words: str) -> set[tuple[int, int]]:
        """Return the neighbours in an answer of random newlines and words."""
        params = greedy(64, ignore_eos=True, allowed_token_ids=[newline, human], bad_words=list(words), seed=1)
        params.temperature = 100.0
        tokens = asyncio.run(answer(llm, "Hello", params)).outputs[0].token_ids
        return set(itertools.pairwise(tokens))

    barred, allowed = (newline, human), (human, newline)
    assert {barred, allowed} <= pairs()
    assert {barred, allowed} & pairs("\nHuman") == {allowed}
    assert {barred, allowed} <= pairs("\nHuman:")
