"""Cumulative outputs behave as plain outputs, and cost nothing until they are read."""

import copy
import dataclasses
import pickle
import tracemalloc

import pytest

from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.cumulative import GrowingText
from vllm_mp.outputs import CompletionOutput
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams
from vllm_mp.wire import Finished


class Detokenizer:
    """Writes each token as ten characters."""

    def append(self, token_ids):
        return "".join(f"{token_id:10}" for token_id in token_ids)

    def flush(self):
        return ""


def completion_of(num_tokens, kind=RequestOutputKind.CUMULATIVE):
    completion = Completion(0, SamplingParams(output_kind=kind), Detokenizer())
    completion.token_ids.extend(range(num_tokens))
    return completion


def outputs_of(completion, num_tokens):
    """Return the outputs of a consumer that takes one after each token."""
    outputs = []
    for token_id in range(num_tokens):
        completion.token_ids.append(token_id)
        outputs.append(completion.output())
    return outputs


def test_outputs_that_are_not_read_copy_neither_text_nor_token_ids():
    num_tokens = 4000
    tracemalloc.start()
    try:
        outputs = outputs_of(completion_of(0), num_tokens)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Copies would take 8 million token ids and 80 million characters.
    assert size < 1000 * num_tokens
    assert outputs[-1].token_ids == list(range(num_tokens))
    assert len(outputs[-1].text) == 10 * num_tokens


def test_each_output_keeps_its_own_state_in_whatever_order_they_are_read():
    outputs = outputs_of(completion_of(0), 30)
    for number in [29, 3, 17, 0, 18]:
        assert outputs[number].token_ids == list(range(number + 1))
        assert outputs[number].text == "".join(f"{token_id:10}" for token_id in range(number + 1))
        assert outputs[number].logprobs is None


def test_text_is_joined_from_new_pieces_only():
    class Piece(str):
        __slots__ = ()

    text, pieces = GrowingText(), [Piece(number) for number in range(100)]
    joined = []
    for count, piece in enumerate(pieces, 1):
        text.append(piece)
        joined.append(text.until(count))
    assert joined[-1] == "".join(pieces)
    assert text.until(3) == "012"
    assert text._num_joined == len(text) == 100


def test_cumulative_output_equals_shows_copies_and_pickles_as_a_plain_output():
    def output():
        completion = completion_of(2)
        completion.finish = Finished(0, 2, "length")
        return completion.output()

    plain = CompletionOutput(0, f"{0:10}{1:10}", [0, 1], finish_reason="length")
    assert output() == plain
    assert plain == output()
    assert output() == output()
    assert output() != CompletionOutput(0, "", [])
    assert repr(output()) == repr(plain)
    for copied in (copy.copy(output()), copy.deepcopy(output()), pickle.loads(pickle.dumps(output()))):
        assert copied == plain
    assert vars(output()) == vars(plain)
    assert dataclasses.asdict(output()) == dataclasses.asdict(plain)
    assert dataclasses.replace(output(), text="other") == dataclasses.replace(plain, text="other")
    assert isinstance(output(), CompletionOutput)
    assert output().finished()
    with pytest.raises(AttributeError, match="no attribute 'txt'"):
        _ = output().txt


def test_token_ids_are_a_list_of_the_consumer():
    completion = completion_of(2)
    output = completion.output()
    output.token_ids.append(9)
    output.text += "!"
    assert output.token_ids == [0, 1, 9]
    assert completion.output().token_ids == [0, 1]
    assert not completion.output().text.endswith("!")


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_consumer_that_stops_reading_gets_one_merged_output_and_holds_only_its_tokens(kind):
    num_tokens = 20_000
    completion = completion_of(0, kind)
    tracemalloc.start()
    try:
        for token_id in range(num_tokens):
            assert completion.take_in(1000 + token_id, token_id & 0xFFFF)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 60 * num_tokens, "an int and its place in the list, for each token"
    output = completion.output()
    assert len(output.token_ids) == num_tokens
    assert not completion.has_news(1)
