"""A peer reads any bytes as a message, or refuses them with an error that its docstring names."""

import itertools
import random
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mp import wire
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.live_requests import LiveRequests
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.stream import GenerationStream
from vllm_mp.client.prompts.request import GenerationRequest
from vllm_mp.client.stats import EngineStats
from vllm_mp.core.images.image_store import StoredImage
from vllm_mp.core.images.request_images import RequestImages
from vllm_mp.core.scheduler.waiting.memory_quota import MAX_BYTES, MemoryQuota
from vllm_mp.requests.images import ImageArray, PlacedImage, ProcessedImage
from vllm_mp.requests.prompt_embeds import MAX_EMBEDS_BYTES, PromptEmbeds
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.testing.fuzzing import ClientFrames, CoreFrames, slots_named
from vllm_mp.validation.image_validation import ImageShape

VOCAB_SIZE = 97
SEEDS = st.integers(0, 2**32)
UNTYPED_FIELDS = ["guided_decoding", "structured_outputs", "extra_args"]


@settings(deadline=None)
@given(SEEDS)
def test_core_reads_a_frame_or_refuses_it_with_a_documented_error(seed):
    for hostile in itertools.islice(ClientFrames(seed, 1, VOCAB_SIZE), 50):
        for frame in hostile.frames:
            try:
                message = wire.decode_client_message(frame)
            except (ValueError, RecursionError):
                continue
            assert isinstance(message, wire.ClientMessage)


def stream_in(processor, stats, request_id, **params):
    """Return the stream of a new request in the output processor and the statistics."""
    request = GenerationRequest(request_id, None, [1, 2, 3], wire.pack_ids([1, 2, 3]), SamplingParams(**params), 0.0)
    stream = GenerationStream(request, [Completion(0, request.params, token_text=chr)])
    processor.requests.reserve(request_id)
    processor.enter(stream)
    stats.note_sent(stream, 0.0, {})
    return stream


@settings(deadline=None)
@given(SEEDS)
def test_message_about_some_requests_does_not_change_others(seed):
    stats = EngineStats(max_model_len=100)
    processor, frames = OutputProcessor(LiveRequests(stats.note_end)), CoreFrames(seed, 1, VOCAB_SIZE)
    kinds = ({}, {"logprobs": 1}, {"prompt_logprobs": 1}, {"logprobs": 0, "prompt_logprobs": 0})
    calm = [stream_in(processor, stats, f"calm {i}", **kinds[i]) for i in range(4)]
    spared = {stream.completions[0].slot for stream in calm}
    victims = {}
    names = itertools.count()
    for _ in range(60):
        while len(victims) < 6:
            stream = stream_in(processor, stats, f"victim {next(names)}", **random.Random(seed).choice(kinds))
            victims[stream.completions[0].slot] = 0
        for frame in frames.draw(victims, spared).frames:
            try:
                message = wire.decode_core_message(frame)
            except (ValueError, RecursionError):
                continue
            if isinstance(message, wire.StepOutput) and not slots_named(message) & spared:
                stats.note_step(message)
                try:
                    unwanted = processor.process(message)
                except ValueError as error:
                    assert "disagree" in str(error)  # noqa: PT017
                    unwanted = []
                assert not {*unwanted} & spared
        victims = {slot: count for slot, count in victims.items() if processor._entries[slot]}
    assert all(not stream.is_over and stream.completions[0].token_ids == [] for stream in calm)
    assert all(processor._entries[slot] for slot in spared)
    assert np.isfinite(stats.cells.total()).all()


@pytest.mark.parametrize("field", UNTYPED_FIELDS)
def test_untyped_field_of_a_large_message_is_refused_before_it_is_decoded(field):
    empty_lists = b"\xdd" + (2**20).to_bytes(4, "big") + b"\x90" * 2**20
    shape = empty_lists if field != "extra_args" else b"\x81\xa1x" + empty_lists
    frame = b"\x96\x02\x01\x00\xa1x\xc4\x04\x01\x00\x00\x00\x81" + msgspec.msgpack.encode(field) + shape
    with pytest.raises(msgspec.ValidationError, match=rf"Expected `null`.*{field}"):
        wire.decode_client_message(frame)


def test_untyped_fields_are_exactly_those_that_large_messages_must_not_have():
    untyped = {field.name for field in msgspec.structs.fields(SamplingParams) if "Any" in str(field.type)}
    assert untyped == {*UNTYPED_FIELDS}


def test_large_request_arrives_unchanged():
    params = SamplingParams(seed=1, logit_bias=dict.fromkeys(range(2**16), 0.5), stop=["x"])
    sent = wire.AddRequest(
        1, 2, "id", wire.pack_ids([5] * 2**16), params, isolate_until_num_tokens=1, extra_args=b"\x81\xa1x\x01"
    )
    arrived = wire.decode_client_message(wire.encode(sent))
    assert isinstance(arrived, wire.AddRequest)
    assert msgspec.to_builtins(arrived) == msgspec.to_builtins(sent)


@pytest.mark.parametrize(
    "frame",
    [
        wire.encode(wire.AbortRequests(1, [0] * (wire.MAX_LIVE_REQUESTS + 1))),
        wire.encode(wire.Call(1, 1, "ping", [0] * 17)),
        msgspec.msgpack.encode([2, 1, 0, "x", b"", {"stop": [""] * 65}]),
        msgspec.msgpack.encode([2, 1, 0, "x", b"", {"stop_token_ids": [0] * 1025}]),
        msgspec.msgpack.encode([2, 1, 0, "x", b"", {"allowed_token_ids": [0] * (2**18 + 1)}]),
        msgspec.msgpack.encode([2, 1, 0, "x", b"", {"logit_bias": dict.fromkeys(range(2**18 + 1), 0)}]),
        msgspec.msgpack.encode([2, 1, 0, "x", b"", {}, 0, b"", "", "", [[]] * 2049]),
        msgspec.msgpack.encode([2, 1, 0, "x", b"", {}, 0, b"", "", "", [[0] * 1025]]),
        wire.encode(wire.AddRequest(1, 0, "x", b"", SamplingParams(), extra_args=bytes(2**14 + 1))),
        wire.encode(
            wire.AddRequest(
                1, 0, "x", b"", SamplingParams(), prompt_embeds=PromptEmbeds("float32", 1, bytes(MAX_EMBEDS_BYTES + 1))
            )
        ),
    ],
    ids=[
        "slots",
        "args",
        "stop",
        "stop_token_ids",
        "allowed_token_ids",
        "logit_bias",
        "bad_words",
        "tokens of a bad word",
        "extra_args",
        "prompt_embeds",
    ],
)
def test_lists_are_bounded_before_they_are_decoded(frame):
    with pytest.raises(msgspec.ValidationError, match=r"of length <= \d+"):
        wire.decode_client_message(frame)


class Taker(NamedTuple):
    """What a request takes of the memory, and for whom."""

    owner: str
    line: tuple[int, int]
    num_bytes: int = 2**20
    images: RequestImages | None = None
    is_replay: bool = False


def fits(memory, taker):
    try:
        memory.check(taker)
    except ValueError:
        return False
    return True


def fill(memory, taker):
    """Take memory for `taker` until it may take no more; return how often it could."""
    count = 0
    while fits(memory, taker):
        memory.take(taker)
        count += 1
    return count


@pytest.mark.parametrize("lines", [[(i, 0) for i in range(6)], [(0, i) for i in range(6)]], ids=["clients", "tenants"])
def test_memory_quota_leaves_room_for_another_client_and_tenant(lines):
    memory = MemoryQuota()
    takers = [Taker("process 1", line) for line in lines]
    shares = [fill(memory, taker) for taker in takers]
    assert shares == [3 * MAX_BYTES // 2**23 // 2**i for i in range(6)]
    for _ in range(shares[0]):
        memory.give_back(takers[0])
    assert fill(memory, takers[0]) > shares[1]


def test_memory_quota_leaves_room_for_the_client_of_another_owner_than_that_of_thousands():
    memory = MemoryQuota()
    for client in range(1000):
        fill(memory, Taker("process 1", (client, 0)))
    assert not fits(memory, Taker("process 1", (5000, 0)))
    assert fill(memory, Taker("process 2", (5001, 0))) > 100


def test_memory_quota_has_room_for_the_only_request_of_an_owner_if_it_is_a_replay():
    memory = MemoryQuota()
    large = Taker("process 1", (0, 0), MAX_BYTES)
    assert not fits(memory, large)
    assert fits(memory, large._replace(is_replay=True))
    memory.take(Taker("process 2", (1, 0)))
    assert fits(memory, large._replace(is_replay=True))
    memory.take(Taker("process 1", (2, 0)))
    assert not fits(memory, large._replace(is_replay=True))


def test_memory_quota_counts_an_image_once_and_as_large_as_it_is():
    array = ImageArray("pixel_values", "uint8", [2**28], bytes(2**28))
    image = StoredImage(ProcessedImage(bytes(32), [array]), ImageShape(1, 4), token_bytes=4)
    taker = Taker("process 1", (0, 0), 1024, RequestImages([PlacedImage(bytes(32), [(0, 4)])], [image], 4))
    other = Taker("process 1", (0, 0), 2**29)
    memory = MemoryQuota()
    for _ in range(100):
        memory.check(taker)
        memory.take(taker)
    assert not fits(memory, other)
    image.note_encoded(0, torch.zeros(4, 1))
    memory.check(taker)  # which looks at the images of the line again
    assert fits(memory, other)
    for _ in range(100):
        memory.give_back(taker)
    assert memory._total == 0
