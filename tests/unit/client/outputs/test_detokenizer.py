"""Text from token ids that arrive one by one or in chunks."""

from __future__ import annotations

import gc
import time
import weakref
from functools import cache
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vllm_mp.client.outputs.detokenizer import IncrementalDetokenizer, special_texts, token_bytes, token_texts
from vllm_mp.outputs import Logprob
from vllm_mp.server.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then some more words follow.",
    "你好，世界。今天天气很好。こんにちは世界",
    "Smile 😀😀 👍🏽 and the family 👩‍👩‍👧‍👦 waves 🏳️‍🌈",
    "naïve café — “quoted” text…",
] * 4
SPECIAL = ["<s>", "</s>", "<pad>"]
SAMPLES = ["👩‍👩‍👧‍👦", "👍🏽", "🏳️‍🌈", "你好", "世界", "𝕏", "é", "e\u0301", "。", "ﷺ"]
SAMPLES += [" ", "  ", "\n", "hello", " the", "The"]
KINDS = ["byte_level", "windowed_byte_level", "sentencepiece"]
MAX_ID = 2**32 - 1


@cache
def tokenizer_of(kind: str) -> Any:
    if kind == "sentencepiece":
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=["<unk>", *SPECIAL, *byte_tokens],
            limit_alphabet=60,
            show_progress=False,
        )
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        plain = decoders.ByteLevel()
        # A sequence with one decoder decodes the same, and is not recognised as byte-level.
        backend.decoder = plain if kind == "byte_level" else decoders.Sequence([plain])
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    backend.train_from_iterator(CORPUS, trainer)
    if kind == "sentencepiece":
        # The trainer registers byte tokens as special tokens; a sentencepiece vocabulary has them as normal tokens.
        plain_backend = Tokenizer(backend.model)
        plain_backend.pre_tokenizer = backend.pre_tokenizer
        plain_backend.decoder = backend.decoder
        plain_backend.add_special_tokens(SPECIAL)
        backend = plain_backend
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode(tokenizer: Any, ids: list[int], skip_special_tokens: bool = True) -> str:
    return str(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def in_chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """Return `ids` in chunks of `sizes`, which are repeated as needed; in chunks of 1 without sizes."""
    chunks = []
    rounds = cycle(sizes or [1])
    while ids:
        size = next(rounds)
        chunks.append(ids[:size])
        ids = ids[size:]
    return chunks


def run(detokenizer: IncrementalDetokenizer, chunks: list[list[int]]) -> list[str]:
    return [*(detokenizer.append(chunk) for chunk in chunks), detokenizer.flush()]


texts = (
    st.lists(st.one_of(st.sampled_from(SAMPLES), st.text(max_size=6)), max_size=25)
    .map("".join)
    .filter(lambda text: "\ufffd" not in text)
)
chunk_sizes = st.lists(st.integers(1, 40), max_size=8)


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(text=texts, split=st.floats(0, 1), sizes=chunk_sizes, specials=st.booleans())
def test_deltas_add_up_to_the_text_and_hold_only_whole_characters(
    kind: str, text: str, split: float, sizes: list[int], specials: bool
) -> None:
    tokenizer = tokenizer_of(kind)
    ids = encode(tokenizer, text)
    # The prompt ends with a whole character, so the whole text begins with the text of the prompt.
    cut = int(split * len(ids))
    while not decode(tokenizer, ids).startswith(decode(tokenizer, ids[:cut])):
        cut -= 1
    prompt, output = ids[:cut], ids[cut:]
    if specials:
        output = [
            x for i, token in enumerate(output) for x in ([token, *tokenizer.all_special_ids] if i % 3 else [token])
        ]
    expected = decode(tokenizer, prompt + output)[len(decode(tokenizer, prompt)) :]

    deltas = run(IncrementalDetokenizer(tokenizer, prompt), in_chunks(output, sizes))

    assert "".join(deltas) == expected
    assert not any("\ufffd" in delta for delta in deltas)


def test_long_run_of_byte_tokens_is_cut_between_characters() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    text = "𐀀👩\u200d👩\u200d👧\u200d👦世界\x80\x80\x80𐀀\x80\x80ࠀ" * 4
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]
    for size in range(1, len(ids)):
        assert "".join(run(IncrementalDetokenizer(tokenizer, []), in_chunks(ids, [size]))) == text


@pytest.mark.parametrize("kind", KINDS)
def test_every_character_is_emitted_with_its_last_token(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = encode(tokenizer, "a 你好 𝕏 👩‍👩‍👧‍👦 é and the quick ﷺ end")
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    emitted = ""
    for i, token_id in enumerate(ids):
        emitted += detokenizer.append([token_id])
        so_far = decode(tokenizer, ids[: i + 1])
        if "\ufffd" not in so_far:
            assert emitted == so_far


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=50)
@given(
    prompt=st.lists(st.integers(0, 500), max_size=30),
    ids=st.lists(st.one_of(st.integers(0, 500), st.sampled_from([-1, MAX_ID, 2**40])), max_size=120),
    sizes=chunk_sizes,
    skip=st.booleans(),
    spaces=st.booleans(),
)
def test_any_ids_have_a_text(
    kind: str, prompt: list[int], ids: list[int], sizes: list[int], skip: bool, spaces: bool
) -> None:
    detokenizer = IncrementalDetokenizer(
        tokenizer_of(kind), prompt, skip_special_tokens=skip, spaces_between_special_tokens=spaces
    )
    run(detokenizer, in_chunks(ids, sizes))


@settings(deadline=None, max_examples=50)
@given(ids=st.lists(st.integers(0, 420), max_size=120), sizes=chunk_sizes, skip=st.booleans())
def test_invalid_bytes_read_as_the_tokenizer_reads_them(ids: list[int], sizes: list[int], skip: bool) -> None:
    tokenizer = tokenizer_of("byte_level")
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip)
    assert "".join(run(detokenizer, in_chunks(ids, sizes))) == decode(tokenizer, ids, skip)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary_have_empty_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    the, dog = encode(tokenizer, "The"), encode(tokenizer, "The dog")[len(encode(tokenizer, "The")) :]
    detokenizer = IncrementalDetokenizer(tokenizer, the)
    assert run(detokenizer, [[5000, -1]] * 40) == [""] * 41
    assert "".join(run(detokenizer, [dog])) == " dog"


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_that_ends_inside_a_character_leaves_it_to_the_output(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = encode(tokenizer, "café 𝕏𝕐𝕎")
    for cut in range(len(ids)):
        expected = "café 𝕏𝕐𝕎"[len(decode(tokenizer, ids[:cut]).rstrip("\ufffd")) :]
        deltas = run(IncrementalDetokenizer(tokenizer, ids[:cut]), [[token_id] for token_id in ids[cut:]])
        if kind == "sentencepiece":
            # An incomplete character changes its neighbours in the plain decode, which is no reference here.
            assert "café 𝕏𝕐𝕎".endswith("".join(deltas))
        else:
            assert "".join(deltas) == expected


def test_prompt_that_ends_inside_a_run_of_byte_tokens_is_not_repeated() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    byte = [tokenizer.convert_tokens_to_ids(f"<0x{value:02X}>") for value in range(256)]
    prompt = [byte[value] for value in "x𝕏𝕐".encode()[:-1]]
    assert IncrementalDetokenizer(tokenizer, prompt).append([byte["𝕐".encode()[-1]]]) == "𝕐"


def test_flush_does_not_repeat_the_run_of_byte_tokens_before_an_incomplete_character() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "𝕏𝕐".encode()]
    for chunk in (1, 7):
        assert "".join(run(IncrementalDetokenizer(tokenizer, []), in_chunks(ids[:7], [chunk]))) == "𝕏���"


@pytest.mark.parametrize("kind", KINDS)
def test_flush_ends_an_incomplete_character(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    incomplete = encode(tokenizer, "x𝕏")[:-1]
    deltas = run(IncrementalDetokenizer(tokenizer, []), [incomplete])
    assert deltas[0] == "x"
    assert set(deltas[1]) == {"\ufffd"}


def test_words_after_skipped_special_tokens_keep_their_space() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    ids = encode(tokenizer, "The dog")
    detokenizer = IncrementalDetokenizer(tokenizer, [1])
    assert "".join(detokenizer.append([token_id]) for token_id in [*ids, *[2] * 100, *ids]) == "The dog The dog"


def test_special_tokens_show_when_they_are_not_skipped() -> None:
    for kind in KINDS:
        tokenizer = tokenizer_of(kind)
        detokenizer = IncrementalDetokenizer(tokenizer, encode(tokenizer, "The"), skip_special_tokens=False)
        assert detokenizer.append([tokenizer.eos_token_id]) == "</s>"


def test_added_tokens_are_joined_without_a_space_on_request() -> None:
    backend = Tokenizer(models.WordLevel({"hello": 0, "world": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.add_special_tokens([AddedToken("<a>", special=True), AddedToken("<b>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = [0, 3, 4, 3, 1, 4]
    kept = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=False)
    assert "".join(run(kept, [ids])) == "hello <a> <b> <a> world <b>"
    joined = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(run(joined, [[token_id] for token_id in ids])) == "hello <a><b><a> world <b>"
    after_prompt = IncrementalDetokenizer(
        tokenizer, [0, 3], skip_special_tokens=False, spaces_between_special_tokens=False
    )
    assert after_prompt.append([4]) == "<b>"


def test_words_longer_than_the_window_are_emitted_once() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "c": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = [1] + [2] * 100 + [3]
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert "".join(run(detokenizer, [[token_id] for token_id in ids])) == "a" + "b" * 100 + " c"


@pytest.mark.parametrize("kind", KINDS)
def test_cost_per_token_of_invalid_bytes_is_bounded(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    lead = tokenizer.convert_tokens_to_ids("<0xE4>" if kind == "sentencepiece" else "ä")
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    emitted = "".join(detokenizer.append([lead]) for _ in range(5000))
    # A window that grew with the output would take minutes to decode, and hold all text back.
    assert len(emitted) > 4900
    started = time.process_time()
    for _ in range(1000):
        detokenizer.append([lead])
    assert time.process_time() - started < 1.0


def test_detokenizers_do_not_keep_a_dropped_tokenizer_alive() -> None:
    tokenizer = tokenizer_of.__wrapped__("byte_level")
    IncrementalDetokenizer(tokenizer, []).append([5])
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["𝕏", "ﷺ", "x𝕏ﷺ"])
def test_bytes_of_tokens_that_are_parts_of_characters_make_the_text(kind, text):
    tokenizer = tokenizer_of(kind)
    bytes_of, text_of = token_bytes(tokenizer), token_texts(tokenizer)
    ids = encode(tokenizer, text)
    assert any("\ufffd" in text_of(token_id) for token_id in ids)
    assert b"".join(map(bytes_of, ids)).decode().strip() == text
    entries = chat_logprobs([{token_id: Logprob(-1.0, 1, text_of(token_id))} for token_id in ids], 1, bytes_of).content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().strip() == text
    assert [entry.top_logprobs[0].bytes for entry in entries] == [entry.bytes for entry in entries]


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_of_tokens_are_those_in_the_text_also_after_parts_of_characters(kind):
    tokenizer = tokenizer_of(kind)
    text_of = token_texts(tokenizer)
    ids = encode(tokenizer, "The 𝕏 fox 😀 and the dog ﷺ jumps</s>")
    text = decode(tokenizer, ids)
    positions = [{token_id: Logprob(-1.0, 1, text_of(token_id))} for token_id in ids]
    offsets = TextOffsets(IncrementalDetokenizer(tokenizer, ()), start=5)
    halves = [completion_logprobs(part, offsets) for part in (positions[:9], positions[9:])]
    found = [offset - 5 for half in halves for offset in half.text_offset]
    begins = [*found, len(text)]
    assert begins == sorted(begins)
    for token_id, begin in zip(ids, found, strict=True):
        if "\ufffd" not in (token := text_of(token_id)) and token not in SPECIAL:
            assert text[begin:].lstrip().startswith(token.lstrip()), (token, begin)


def test_texts_of_special_tokens_without_a_name_are_known() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>")
    tokenizer.add_tokens([AddedToken("[CALLS]", special=True), AddedToken("<call>", special=False)])
    assert "[CALLS]" not in tokenizer.all_special_tokens
    assert special_texts(tokenizer) == {"<s>", "[CALLS]"}
    ids = tokenizer.convert_tokens_to_ids(["[CALLS]", "<call>"])
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert detokenizer.append(ids) + detokenizer.flush() == "<call>"
