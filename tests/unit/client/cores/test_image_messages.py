"""Which images a client sends to its core, and when again."""

import asyncio

import pytest
from support.stand_in_core import StandInSupervisor

from vllm_mp import EngineGenerateError, SamplingParams, wire
from vllm_mp.client.cores.core_group import CoreGroup
from vllm_mp.client.cores.recovery import waiting_replays
from vllm_mp.client.cores.recovery.news import Death
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.live_requests import LiveRequests
from vllm_mp.client.outputs.stream import GenerationStream
from vllm_mp.client.prompts.request import GenerationRequest, digest_of
from vllm_mp.client.stats import EngineStats
from vllm_mp.requests.images import ImageArray, PlacedImage, ProcessedImage

CAT, DOG = (ProcessedImage(bytes([n]) * 32, [ImageArray("pixel_values", "uint8", [1], b"x")]) for n in (1, 2))


class Cores(StandInSupervisor):
    """The cores of a client, one after the other, and the client."""

    def __init__(self):
        super().__init__()
        self.client = CoreGroup([self], LiveRequests(), EngineStats(64, False)).first
        self.client._listen()

    def request(self, name, *images, num_completions=1):
        params = SamplingParams(seed=1)
        return GenerationStream(
            GenerationRequest(
                name,
                "",
                [5] * len(images),
                wire.pack_ids([5] * len(images)),
                params,
                0.0,
                placed_images=[PlacedImage(image.digest, [(index, 1)]) for index, image in enumerate(images)],
                images={image.digest: image for image in images},
            ),
            [Completion(index, params) for index in range(num_completions)],
        )

    def add(self, name, *images, num_completions=1):
        stream = self.request(name, *images, num_completions=num_completions)
        self.client.add(stream)
        return stream

    def take(self):
        """Return what was sent since the last call: the number of an image, or the id of a request."""
        sent = [
            message.image.digest[0] if isinstance(message, wire.PutImage) else message.request_id
            for message in self.sent
            if isinstance(message, wire.PutImage | wire.AddRequest)
        ]
        self.sent.clear()
        return sent

    def lack(self, slot, *images):
        self.on_message(wire.MissingImages(0, slot, [image.digest for image in images]))

    def give_token(self, slot):
        self.on_message(wire.StepOutput(0, 1, bytes([slot, 0]), bytes([5, 0, 0, 0]), bytes(2)))

    def die(self):
        self.client._on_death(Death("it died; log", {}, 0, False, time=1.0))
        self.client._replay_to(self.start())


@pytest.fixture
def cores():
    return Cores()


def test_core_gets_an_image_once_before_the_first_request_with_it(cores):
    cores.add("a", CAT, DOG, num_completions=2)
    cores.add("b", DOG)
    assert cores.take() == [1, 2, "a", "a", "b"]
    cores.client.forget_images()
    cores.add("c", DOG)
    assert cores.take() == [2, "c"]


def test_next_core_gets_the_images_of_live_requests_again(cores):
    cores.add("a", CAT)
    cores.add("b", CAT)
    cores.take()
    cores.die()
    assert cores.take() == [1, "a", "b"]


def test_replays_get_images_when_the_core_has_read_those_of_earlier_replays(cores, monkeypatch):
    monkeypatch.setattr(waiting_replays, "_MAX_UNREAD_BYTES", 1)
    for name, images in {"a": [CAT], "b": [DOG], "c": [CAT], "d": [], "e": [DOG]}.items():
        cores.add(name, *images)
    cores.die()
    cores.take()
    cores.die()
    assert cores.take() == [1, "a", "c", "d"]
    cores.give_token(3)
    cores.give_token(0)
    assert cores.take() == [], "the core may need the arrays for c"
    cores.give_token(2)
    assert cores.take() == [2, "b", "e"]


def test_replay_whose_image_the_core_has_lost_gets_it_again_however_often(cores, monkeypatch):
    monkeypatch.setattr(waiting_replays, "_REST_S", 0.0)
    stream = cores.add("a", CAT)
    cores.die()
    for _ in range(20):
        cores.take()
        cores.lack(0, CAT)
        cores.client._send_waiting()
        assert cores.take() == [1, "a"]
    assert not stream.is_over


def test_core_that_has_lost_an_image_gets_it_and_the_request_again(cores):
    stream = cores.add("a", CAT, DOG)
    cores.take()
    cores.lack(0, DOG)
    assert cores.take() == [2, "a"]
    assert not stream.is_over


def test_live_request_that_the_core_has_removed_for_its_images_goes_on(cores):
    stream = cores.add("a", CAT)
    cores.give_token(0)
    cores.take()
    for _ in range(20):  # more often than a core may lack room for the images of a request
        cores.on_message(wire.MissingImages(0, 0, [CAT.digest], was_admitted=True))
        [_, again] = cores.sent
        assert (again.slot, again.output, again.is_replay) == (0, wire.pack_ids([5]), True)
        assert cores.take() == [1, "a"]
    assert not stream.is_over


def test_request_that_was_aborted_is_not_sent_again_and_its_slot_is_free(cores):
    cores.add("a", CAT)
    cores.client.abort("a")
    cores.take()
    cores.lack(0, CAT)
    assert cores.take() == []
    assert cores.client.requests.num_slots_in_use == 0
    cores.add("b", CAT)
    assert cores.take() == [1, "b"]


def test_request_whose_images_the_core_never_keeps_fails(cores):
    stream = cores.add("a", CAT)
    other = cores.add("b")
    for _ in range(20):
        cores.lack(0, CAT)
    with pytest.raises(EngineGenerateError, match="no memory for its images; raise mm_processor_cache_gb"):
        asyncio.run(stream.next())
    assert cores.client.requests.num_slots_in_use == 1
    assert not other.is_over


def test_digest_of_a_request_covers_its_images(cores):
    digests = {digest_of(cores.request(name, image)._request) for name, image in (("a", CAT), ("b", CAT), ("c", DOG))}
    assert len(digests) == 2
