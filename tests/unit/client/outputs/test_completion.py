"""Completions and their requests as a core's messages arrive: text, tokens, log-probabilities, stops, slots."""

import asyncio
import codecs
import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from vllm_mp import wire
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.logprob_columns import LogprobColumns
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import GenerationStream
from vllm_mp.client.prompts.request import GenerationRequest
from vllm_mp.errors import EngineGenerateError, RequestInterruptedError
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams
from vllm_mp.wire import Finished, TokenLogprobs

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind

WORDS = ("ab", "ba b", "", " a", "é", "😀", "\n\n")
"""The texts of tokens 256 and up; tokens below 256 are bytes."""
EOS = 999


class Detokenizer:
    """A detokenizer that holds back half a character; the end-of-sequence token has a text too."""

    def __init__(self):
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def append(self, token_ids):
        return self._decode(b"".join(bytes_of(token_id) for token_id in token_ids))

    def flush(self):
        return self._decode(b"", True)


def bytes_of(token_id):
    if token_id == EOS:
        return b"<eos>"
    return bytes([token_id]) if token_id < 256 else WORDS[token_id - 256].encode()


def text_of(token_ids):
    return b"".join(map(bytes_of, token_ids)).decode(errors="replace")


def ids_of(text):
    return list(text.encode())


def make_stream(processor, n=1, interval=1, prompt=(1,), **params):
    completions = [
        Completion(index, SamplingParams(**params), Detokenizer(), lambda token_id: f"<{token_id}>")
        for index in range(n)
    ]
    stream = GenerationStream(
        request_of(f"id {len(processor.requests)} {time.monotonic_ns()}", prompt, **params), completions, interval
    )
    processor.requests.reserve(stream.request_id)
    processor.enter(stream)
    return stream


def request_of(request_id, prompt=(1,), **params):
    return GenerationRequest(request_id, None, list(prompt), wire.pack_ids(list(prompt)), SamplingParams(**params), 0.0)


def logprobs_message(slot, position, token_ids):
    """Return a message with a position for each token. Log-probabilities depend on the token; token 0 is the best."""
    ids = np.array([[token_id, 0] for token_id in token_ids], "<i4")
    values = np.array([[-token_id / 64, -0.5] for token_id in token_ids], "<f4")
    return TokenLogprobs(slot, position, ids.tobytes(), values.tobytes(), np.full(len(ids), 7, "<u4").tobytes())


def message(*entries, finished=(), logprobs=()):
    """Return a step output; an entry is (slot, position, tokens)."""
    columns = [(slot, token, position + i) for slot, position, ids in entries for i, token in enumerate(ids)]
    slots, tokens, positions = (np.array([column[i] for column in columns], np.int64) for i in range(3))
    return wire.StepOutput(
        0, 1, *wire.pack_tokens(slots, tokens, positions), finished=list(finished), logprobs=list(logprobs)
    )


def deliver(processor, completion, token_ids, reason=None, logprobs=False):
    """Deliver the next tokens of `completion` in one message, with its end for `reason`; return the slots to abort."""
    slot, position = completion.slot, len(completion.token_ids)
    finished = [Finished(slot, position + len(token_ids), reason)] if reason else []
    own = [logprobs_message(slot, position, token_ids)] if logprobs and token_ids else []
    return processor.process(message((slot, position, token_ids), finished=finished, logprobs=own))


async def take(stream):
    """Return the output that is ready for the consumer; None if there is none."""
    task = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    if task.done():
        return task.result()
    task.cancel()
    return None


def taken(stream):
    return asyncio.run(take(stream))


def whole(outputs, kind, index=0):
    """Return a completion from all outputs of its stream: (text, token ids, logprobs, cumulative, finish, stop)."""
    own = [part for output in outputs for part in output.outputs if part.index == index]
    last = own[-1]
    if kind != DELTA:
        for earlier, later in itertools.pairwise(own):
            assert later.text.startswith(earlier.text)
        text, ids, logprobs = last.text, last.token_ids, last.logprobs
    else:
        text, ids = "".join(part.text for part in own), [token for part in own for token in part.token_ids]
        logprobs = None if last.logprobs is None else [entry for part in own for entry in part.logprobs]
    return text, ids, logprobs, last.cumulative_logprob, last.finish_reason, last.stop_reason


def play(token_ids, reason, sizes, reads, kind, **params):
    """Deliver a completion in messages of `sizes` tokens, read it after the messages marked in `reads`, return it."""
    processor = OutputProcessor()
    stream = make_stream(processor, output_kind=kind, logprobs=1, **params)
    (completion,) = stream.completions
    outputs = []

    async def run():
        rest = list(token_ids)
        for size, read in itertools.zip_longest(sizes, reads[: len(sizes)]):
            part, rest = rest[:size], rest[size:]
            aborted = deliver(processor, completion, part, logprobs=True)
            if read and (output := await take(stream)):
                outputs.append(output)
            if completion.finish is not None:
                assert aborted == [completion.slot]
                break
        else:
            assert deliver(processor, completion, rest, reason, logprobs=True) == []
        while not (outputs and outputs[-1].finished):
            output = await take(stream)
            assert output is not None
            outputs.append(output)

    asyncio.run(run())
    return whole(outputs, kind)


def expected(token_ids, reason, stop=(), include_stop_str_in_output=False, min_tokens=0):
    """Return (text, number of tokens, finish, stop), by searching the whole text again after every token."""
    shown = token_ids[:-1] if reason == "stop" and not include_stop_str_in_output else token_ids

    def certain(count):
        return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(map(bytes_of, shown[:count])))

    start = len(certain(min_tokens))
    for count in range(min_tokens + 1, len(shown) + 1):
        texts = [certain(count)]
        if count == len(shown):
            texts.append(text_of(shown))
        for number, text in enumerate(texts):
            ends = [
                (end, string)
                for end in range(start + 1, len(text) + 1)
                for string in stop
                if text[:end].endswith(string)
            ]
            if ends:
                end, found = ends[0]
                if not include_stop_str_in_output:
                    end -= len(found)
                # Text that only the end makes certain is found with all tokens of the completion.
                return text[:end], len(token_ids) if number else count, "stop", found
    return text_of(shown), len(token_ids), reason, None


TOKENS = st.lists(st.sampled_from([*b"aab\n", 0xC3, 0xA9, 0xF0, *range(256, 256 + len(WORDS))]), max_size=24)
STOPS = st.lists(
    st.sampled_from(["a", "ab", "aa", "bab", "b\n", "é", "😀", "\n\n", "abb", "�", "a b", "éa"]), min_size=1, max_size=4
)


@settings(max_examples=100, deadline=None)
@given(
    tokens=TOKENS,
    reason=st.sampled_from(["length", "stop"]),
    sizes=st.lists(st.integers(1, 6), max_size=8),
    reads=st.lists(st.booleans(), min_size=8, max_size=8),
    kind=st.sampled_from(RequestOutputKind),
    stop=STOPS | st.just([]),
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
)
def test_completion_does_not_depend_on_how_it_arrives_and_is_read(
    tokens, reason, sizes, reads, kind, stop, include, min_tokens
):
    token_ids = [*tokens, EOS] if reason == "stop" else [*tokens, 97]
    params = {"stop": stop, "include_stop_str_in_output": include, "min_tokens": min(min_tokens, len(token_ids))}
    while sum(sizes) >= len(token_ids):  # the last message has a token and the end
        sizes.pop()
    text, ids, logprobs, cumulative, *end = play(
        token_ids, reason, sizes, reads, kind, max_tokens=len(token_ids), **params
    )
    right_text, count, *right_end = expected(token_ids, reason, **params)
    assert (text, ids, end) == (right_text, token_ids[:count], right_end)
    assert [entry[token].logprob for entry, token in zip(logprobs, ids, strict=True)] == [-i / 64 for i in ids]
    assert cumulative == pytest.approx(-sum(ids) / 64)


@pytest.mark.parametrize("burst", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_token_borders_cuts_text_tokens_and_log_probabilities(include, burst):
    ids = ids_of("one two three")
    sizes = [] if burst else [1] * (len(ids) - 1)
    text, got, logprobs, _, *end = play(
        ids, "length", sizes, [True] * len(ids), DELTA, stop=["wo t"], include_stop_str_in_output=include
    )
    assert text == ("one two t" if include else "one t")
    assert got == ids_of("one two t")
    assert len(logprobs) == len(got)
    assert end == ["stop", "wo t"]


def test_beginning_of_a_stop_string_is_shown_once_the_stop_is_ruled_out():
    processor = OutputProcessor()
    stream = make_stream(processor, output_kind=DELTA, stop=["END"])
    shown = []
    for character in "an ENd":
        deliver(processor, stream.completions[0], ids_of(character))
        shown.append(taken(stream).outputs[0].text)
    assert shown == ["a", "n", " ", "", "", "ENd"]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_text_that_was_held_back_is_shown_when_the_request_is_aborted(kind):
    for by_core in (False, True):
        processor = OutputProcessor()
        stream = make_stream(processor, output_kind=kind, stop=["END"])
        (completion,) = stream.completions
        deliver(processor, completion, [*ids_of("the EN"), 0xC3])
        outputs = [] if (first := taken(stream)) is None else [first]
        if by_core:
            processor.process(message(finished=[Finished(completion.slot, len(completion.token_ids), "abort")]))
        else:
            assert processor.abort(stream.request_id) == [completion.slot]
        outputs.append(taken(stream))
        text, ids, *_, finish, _ = whole(outputs, kind)
        assert text == "the EN�"
        assert ids == [*ids_of("the EN"), 0xC3]
        assert finish == "abort"


def test_stop_string_within_the_first_min_tokens_does_not_count():
    def answered(min_tokens):
        return play(ids_of("a.b.c."), "length", [1] * 5, [True] * 5, CUMULATIVE, stop=["."], min_tokens=min_tokens)

    assert [answered(count)[0] for count in range(6)] == ["a", "a", "a.b", "a.b", "a.b.c", "a.b.c"]
    text, ids, *_, finish, _ = answered(6)
    assert (text, ids, finish) == ("a.b.c.", ids_of("a.b.c."), "length")


@pytest.mark.parametrize(
    ("stop", "text", "min_tokens", "expected_text"),
    [
        (["\n\n"], "a\n\nb", 2, "a"),
        (["\n\n"], "a\n\n\n", 3, "a\n"),
        (["\n\n"], "a\n\nb\n", 3, None),
        (["abcd", "b"], "abxb", 2, "abx"),
        (["abcd", "b"], "abcd", 3, ""),
    ],
)
def test_stop_string_may_begin_but_not_end_within_min_tokens(stop, text, min_tokens, expected_text):
    shown, *_, finish, _ = play(
        ids_of(text), "length", [1] * len(text), [True] * len(text), DELTA, stop=stop, min_tokens=min_tokens
    )
    if expected_text is None:
        assert (shown, finish) == (text, "length")
    else:
        assert (shown, finish) == (expected_text, "stop")


def test_half_a_character_of_the_first_min_tokens_is_not_searched():
    text, *_, finish, stop = play([97, 0xC3], "length", [], [], FINAL_ONLY, stop=["�"], min_tokens=2, max_tokens=2)
    assert (text, finish, stop) == ("a�", "length", None)


@pytest.mark.parametrize(("interval", "expected_sizes"), [(1, [1] * 7), (3, [1, 3, 3]), (10, [1, 6])])
def test_stream_interval_spaces_outputs_except_the_first_and_the_last(interval, expected_sizes):
    processor = OutputProcessor()
    stream = make_stream(processor, interval=interval, output_kind=DELTA)
    sizes = []
    for token_id in range(97, 104):
        deliver(processor, stream.completions[0], [token_id], reason="length" if token_id == 103 else None)
        if output := taken(stream):
            sizes.append(len(output.outputs[0].token_ids))
    assert sizes == expected_sizes


def made(columns):
    """Return the objects of all positions of `columns`."""
    columns.make(len(columns))
    return columns.made


@pytest.mark.parametrize("makes", [False, True])
def test_repeated_log_probabilities_are_ignored_and_a_gap_is_an_error(makes):
    columns = LogprobColumns(None)
    for position, token_ids in ((0, [5, 6]), (0, [5, 6]), (1, [6, 8])):
        columns.append(logprobs_message(0, position, token_ids))
        if makes:
            made(columns)
    with pytest.raises(ValueError, match="position 4 came, but position 3 is the next"):
        columns.append(logprobs_message(0, 4, [9]))
    assert [next(iter(entry)) for entry in made(columns)] == [5, 6, 8]


@pytest.mark.parametrize(
    ("token_ids", "values", "ranks"),
    [
        (bytes(8), bytes(8), b""),
        (b"", b"", bytes(4)),
        (bytes(8), bytes(4), bytes(4)),
        (bytes(7), bytes(8), bytes(4)),
        (bytes(8), bytes(8), bytes(5)),
        (bytes(4), bytes(4), bytes(4)),
        (b"\xff" * 8, bytes(8), bytes(4)),
    ],
)
def test_log_probabilities_whose_parts_disagree_are_an_error(token_ids, values, ranks):
    columns = LogprobColumns(None)
    columns.append(logprobs_message(0, 0, [5]))
    with pytest.raises(ValueError, match="position 1"):
        columns.append(TokenLogprobs(0, 1, token_ids, values, ranks))
    assert len(columns) == 1


def test_sampled_token_comes_first_with_its_own_rank_and_only_once():
    columns = LogprobColumns("text {}".format)
    ids, values = np.array([[5, 3, 5, 4]], "<i4"), np.array([[-2, -1, -2, -3]], "<f4")
    columns.append(TokenLogprobs(0, 0, ids.tobytes(), values.tobytes(), np.array([2], "<u4").tobytes()))
    (entry,) = made(columns)
    assert list(entry) == [5, 3, 4]
    assert [(value.logprob, value.rank, value.decoded_token) for value in entry.values()] == [
        (-2, 2, "text 5"),
        (-1, 1, "text 3"),
        (-3, 3, "text 4"),
    ]


def test_repeated_tokens_and_log_probabilities_change_nothing():
    processor = OutputProcessor()
    stream = make_stream(processor, output_kind=DELTA, logprobs=1)
    slot = stream.completions[0].slot
    for position, ids in ((0, [97, 98]), (0, [97, 98, 99]), (1, [98, 99]), (3, [100])):
        sent = message((slot, position, ids), logprobs=[logprobs_message(slot, position, ids)])
        assert processor.process(sent) == []
    completion = taken(stream).outputs[0]
    assert completion.text == "abcd"
    assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids == [97, 98, 99, 100]
    assert completion.cumulative_logprob == pytest.approx(-(97 + 98 + 99 + 100) / 64)


def test_message_that_is_wrong_for_one_request_reaches_the_others():
    processor = OutputProcessor()
    wrong, prompted, fine = (make_stream(processor, logprobs=1, prompt_logprobs=1, output_kind=DELTA) for _ in range(3))
    slots = [stream.completions[0].slot for stream in (wrong, prompted, fine)]
    sent = message(
        *[(slot, 0, [97]) for slot in slots],
        logprobs=[logprobs_message(slot, 3 if slot == slots[0] else 0, [97]) for slot in slots],
    )
    sent.prompt_logprobs = [logprobs_message(slot, 9 if slot == slots[1] else 1, [5]) for slot in slots]
    assert sorted(processor.process(sent)) == sorted(slots[:2])
    for stream in (wrong, prompted):
        with pytest.raises(EngineGenerateError, match="log-probabilities of position"):
            taken(stream)
    output = taken(fine)
    assert output.outputs[0].text == "a"
    assert len(output.prompt_logprobs) == 2


def test_outputs_show_completions_in_order_and_with_delta_only_those_with_news():
    processor = OutputProcessor()
    stream = make_stream(processor, n=3, output_kind=DELTA)
    deliver(processor, stream.completions[2], [97])
    deliver(processor, stream.completions[0], [98])
    assert [(part.index, part.text) for part in taken(stream).outputs] == [(0, "b"), (2, "a")]
    deliver(processor, stream.completions[1], [99], "length")
    output = taken(stream)
    assert [(part.index, part.text, part.finish_reason) for part in output.outputs] == [(1, "c", "length")]
    assert not output.finished
    for index in (0, 2):
        deliver(processor, stream.completions[index], [100], "length")
    output = taken(stream)
    assert [(part.index, part.text, part.finish_reason) for part in output.outputs] == [
        (0, "d", "length"),
        (2, "d", "length"),
    ]
    assert output.finished
    assert processor.num_slots_in_use == len(processor.requests) == 0


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_first_output_has_all_prompt_log_probabilities_whichever_completion_is_ahead(kind):
    processor = OutputProcessor()
    stream = make_stream(processor, n=2, prompt=[1, 2, 3, 4], prompt_logprobs=1, output_kind=kind)
    first, second = stream.completions
    processor.process(wire.StepOutput(0, 1, b"", b"", b"", prompt_logprobs=[logprobs_message(first.slot, 1, [2, 3])]))
    deliver(processor, second, [98])
    assert taken(stream) is None
    processor.process(wire.StepOutput(0, 1, b"", b"", b"", prompt_logprobs=[logprobs_message(first.slot, 3, [4])]))
    deliver(processor, first, [97])
    output = taken(stream)
    assert [part.text for part in output.outputs] == ["a", "b"]
    assert [entry and next(iter(entry)) for entry in output.prompt_logprobs] == [None, 2, 3, 4]
    deliver(processor, first, [97])
    output = taken(stream)
    assert output.outputs
    assert (output.prompt_logprobs is None) == (kind == DELTA)


def test_consumer_may_change_the_token_ids_of_the_prompt_in_an_output():
    processor = OutputProcessor()
    stream = make_stream(processor, prompt=[1, 2], prompt_logprobs=1)
    (completion,) = stream.completions
    logprobs = [logprobs_message(completion.slot, 1, [2])]
    processor.process(wire.StepOutput(0, 1, b"", b"", b"", prompt_logprobs=logprobs))
    for token in (97, 98):
        deliver(processor, completion, [token])
        output = taken(stream)
        assert output.outputs[0].text.endswith(chr(token))
        output.prompt_token_ids += output.outputs[0].token_ids


def test_cumulative_outputs_repeat_all_completions_and_final_only_waits_for_all_ends():
    for kind in (CUMULATIVE, FINAL_ONLY):
        processor = OutputProcessor()
        stream = make_stream(processor, n=2, output_kind=kind)
        deliver(processor, stream.completions[1], ids_of("bé")[:-1], "length")
        output = taken(stream)
        if kind == CUMULATIVE:
            assert [part.text for part in output.outputs] == ["", "b�"]
            assert not output.finished
        else:
            assert output is None
        deliver(processor, stream.completions[0], ids_of("a"), "length")
        output = taken(stream)
        assert [(part.index, part.text, part.finish_reason) for part in output.outputs] == [
            (0, "a", "length"),
            (1, "b�", "length"),
        ]
        assert output.finished


def test_completion_that_stops_is_aborted_in_the_core_and_the_others_continue():
    processor = OutputProcessor()
    stream = make_stream(processor, n=2, output_kind=FINAL_ONLY, stop=["."])
    first, second = stream.completions
    assert deliver(processor, first, ids_of("a.b")) == [first.slot]
    assert processor.process(message((first.slot, 3, [99]))) == []  # sent before the core heard of the stop
    assert processor.process(message(finished=[Finished(first.slot, 4, "abort")])) == []
    assert deliver(processor, second, ids_of("cd"), "length") == []
    output = taken(stream)
    assert [(part.text, part.finish_reason, part.stop_reason) for part in output.outputs] == [
        ("a", "stop", "."),
        ("cd", "length", None),
    ]
    assert processor.num_slots_in_use == len(processor.requests) == 0


@pytest.mark.parametrize("interrupted", [False, True])
def test_error_of_a_request_that_is_not_at_fault_says_so(interrupted):
    processor = OutputProcessor()
    stream = make_stream(processor)
    end = Finished(stream.completions[0].slot, 0, "error", error="no", interrupted=interrupted)
    processor.process(message(finished=[end]))
    assert type(stream.error) is (RequestInterruptedError if interrupted else EngineGenerateError)


def test_error_of_a_completion_fails_the_request_and_aborts_the_others():
    processor = OutputProcessor()
    stream = make_stream(processor, n=3)
    slots = [completion.slot for completion in stream.completions]
    error = Finished(slots[1], 0, "error", error="not finite")
    assert processor.process(message(finished=[error])) == [slots[0], slots[2]]
    with pytest.raises(EngineGenerateError, match="not finite"):
        taken(stream)
    assert len(processor.requests) == 0
    assert processor.num_slots_in_use == 2
    processor.process(message(finished=[Finished(slot, 0, "abort") for slot in (slots[0], slots[2])]))
    assert processor.num_slots_in_use == 0


def test_late_message_for_a_failed_request_leaves_the_next_request_with_its_id_and_slot_alone():
    processor = OutputProcessor()
    failed = make_stream(processor, n=2, prompt_logprobs=1)
    first, second = [completion.slot for completion in failed.completions]
    processor.process(message(finished=[Finished(second, 0, "error", error="not finite")]))
    processor.requests.reserve(failed.request_id)
    completion = Completion(0, SamplingParams(), Detokenizer())
    stream = GenerationStream(request_of(failed.request_id), [completion])
    processor.enter(stream)
    assert completion.slot == second
    late = wire.StepOutput(1, 1, b"", b"", b"", prompt_logprobs=[logprobs_message(first, 7, [3])])
    assert processor.process(late) == []
    assert processor.streams() == [stream]


def test_end_that_counts_other_tokens_than_arrived_fails_the_request():
    processor = OutputProcessor()
    stream = make_stream(processor)
    processor.process(
        message((stream.completions[0].slot, 0, [97]), finished=[Finished(stream.completions[0].slot, 2, "length")])
    )
    with pytest.raises(EngineGenerateError, match="after the first 1 were lost"):
        taken(stream)


def test_abort_ends_every_completion_and_keeps_its_tokens():
    processor = OutputProcessor()
    stream = make_stream(processor, n=3, output_kind=CUMULATIVE)
    deliver(processor, stream.completions[0], [97], "length")
    deliver(processor, stream.completions[1], [98])
    assert processor.abort(stream.request_id) == [completion.slot for completion in stream.completions[1:]]
    output = taken(stream)
    assert [(part.text, part.finish_reason) for part in output.outputs] == [
        ("a", "length"),
        ("b", "abort"),
        ("", "abort"),
    ]
    assert output.finished


def test_request_that_was_sent_in_part_is_withdrawn():
    processor = OutputProcessor()
    stream = make_stream(processor, n=3)
    slots = [completion.slot for completion in stream.completions]
    assert processor.withdraw(stream, 1) == slots[:1]
    assert len(processor.requests) == 0
    assert processor.num_slots_in_use == 1
    other = make_stream(processor, n=2)
    assert slots[0] not in [completion.slot for completion in other.completions]
    processor.process(message(finished=[Finished(slots[0], 0, "abort")]))
    assert processor.num_slots_in_use == 2


def test_slots_are_limited_to_those_that_the_wire_can_name(monkeypatch):
    monkeypatch.setattr(wire, "MAX_LIVE_REQUESTS", 3)
    processor = OutputProcessor()
    first = make_stream(processor, n=2)
    with pytest.raises(ValueError, match="too many live completions: 2, and the limit is 3"):
        make_stream(processor, n=2)
    assert processor.num_slots_in_use == 2
    deliver(processor, first.completions[0], [97], "length")
    assert {completion.slot for completion in make_stream(processor, n=2).completions} == {2, first.completions[0].slot}


class Slots(RuleBasedStateMachine):
    """A slot is given only if it is free, and is free again once the core reports its end, however the stream ended."""

    streams = Bundle("streams")

    def __init__(self):
        super().__init__()
        self.processor = OutputProcessor()
        self.in_use = set()
        """The slots that the core knows."""

    def end(self, completion, reason):
        self.processor.process(
            message(finished=[Finished(completion.slot, len(completion.token_ids), reason, error="e")])
        )
        self.in_use.discard(completion.slot)

    @rule(target=streams, n=st.integers(1, 4))
    def enter(self, n):
        stream = make_stream(self.processor, n=n, stop=["ab"], output_kind=DELTA)
        slots = {completion.slot for completion in stream.completions}
        assert len(slots) == n
        assert not slots & self.in_use, "a slot was given twice"
        self.in_use |= slots
        return stream, list(stream.completions)

    @rule(n=st.integers(1, 4), num_sent=st.integers(0, 4))
    def withdraw(self, n, num_sent):
        stream = make_stream(self.processor, n=n)
        slots = [completion.slot for completion in stream.completions]
        assert not set(slots) & self.in_use
        sent = self.processor.withdraw(stream, min(n, num_sent))
        assert sent == slots[:num_sent]
        self.in_use |= set(sent)
        for slot in sent:
            self.processor.process(message(finished=[Finished(slot, 0, "abort")]))
            self.in_use.discard(slot)

    @rule(entry=streams, index=st.integers(0, 3), text=st.sampled_from(["a", "b", "xx"]))
    def deliver_text(self, entry, index, text):
        _, completions = entry
        completion = completions[index % len(completions)]
        if completion.slot in self.in_use:
            assert set(deliver(self.processor, completion, ids_of(text))) <= self.in_use

    @rule(entry=streams)
    def abort(self, entry):
        stream, _ = entry
        if not stream.is_over:
            assert set(self.processor.abort(stream.request_id)) <= self.in_use

    @rule(entry=consumes(streams), reason=st.sampled_from(["length", "abort", "error"]))
    def end_all(self, entry, reason):
        stream, completions = entry
        for completion in completions:
            self.end(completion, reason)
            self.end(completion, reason)  # a repetition has no effect
        assert stream.is_over
        assert stream not in self.processor.streams()

    @invariant()
    def processor_knows_the_slots_in_use(self):
        assert self.processor.num_slots_in_use == len(self.in_use)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
