"""Requests wait for their images outside of the queue, and lines take turns with encoding them."""

import random

import pytest
from support.stand_in_engine import Engine

from vllm_mp.core.images.image_store import StoredImage
from vllm_mp.core.images.request_images import RequestImages
from vllm_mp.core.scheduler.encoding_pace import MAX_SLICE_S, EncodingPace
from vllm_mp.core.scheduler.waiting import image_turns
from vllm_mp.requests.images import ImageArray, PlacedImage, ProcessedImage
from vllm_mp.validation.image_validation import ImageShape

TILE, FIRST = 4, 2


@pytest.fixture
def engine():
    return Engine(budget=60)


def make_image(num_tiles=1, content=0, num_bytes=1):
    data = bytes([content]) * num_tiles * num_bytes
    image = ProcessedImage(bytes(32), [ImageArray("pixel_values", "uint8", [len(data)], data)])
    return StoredImage(image, ImageShape(num_tiles, TILE), 8)


def add_image(engine, slot, image=None, **options):
    image = make_image() if image is None else image
    length = FIRST + image.num_tokens + 3
    images = RequestImages([PlacedImage(bytes(32), [(FIRST, image.num_tokens)])], [image], length)
    return engine.add(slot, prompt=[90] * length, images=images, **{"max_tokens": 1, **options})


def test_others_are_admitted_and_get_tokens_while_an_image_is_encoded(engine):
    engine.add(0, num_prompt_tokens=1, max_tokens=40)
    engine.step()
    add_image(engine, 1)
    engine.add(2, num_prompt_tokens=5, max_tokens=3)
    for count in range(2, 8):
        engine.step()
        engine.encode_slice(is_last=False)
        assert len(engine.outputs[0]) == count
    assert 2 in engine.ends
    assert engine.scheduler.num_waiting == 1
    engine.encode_slice()
    engine.step()
    assert 1 in engine.ends
    assert set(engine.slices) == {1}


def test_lone_request_is_work_while_its_image_is_encoded(engine):
    add_image(engine, 0, make_image(num_tiles=2))
    for _ in range(2):
        assert engine.step() is None
        assert engine.scheduler.has_work
        engine.encode_slice()
    assert engine.encode_slice() is None
    engine.step()
    assert 0 in engine.ends


def test_equal_prompts_share_the_blocks_of_an_image_that_they_waited_for(engine):
    image = make_image(num_tiles=3)
    for slot in range(3):
        add_image(engine, slot, image)
    engine.step()
    for _ in range(3):
        engine.encode_slice()
    step = engine.step()
    assert sorted(step.counts.tolist()) == [1, 1, FIRST + image.num_tokens + 3]
    assert len(engine.slices) == 3


def test_request_whose_image_is_cached_does_not_wait_for_its_encoding(engine):
    add_image(engine, 0)
    engine.step()
    engine.encode_slice()
    engine.run()
    add_image(engine, 1, make_image())
    engine.step()
    assert 1 in engine.ends


@pytest.mark.parametrize("shares_image", [True, False])
def test_end_of_a_request_gives_up_the_tile_unless_another_request_waits_for_it(engine, shares_image):
    image = make_image(num_tiles=2)
    add_image(engine, 0, image)
    if shares_image:
        add_image(engine, 1, image)
    engine.step()
    engine.encode_slice(is_last=False)
    engine.end([(0, engine.scheduler.abort(0, 0))])
    turns = engine.scheduler.waiting.images
    assert [begun.request.slot for begun in turns.begun] == ([1] if shares_image else [])
    begun = engine.encode_slice(is_last=False)
    assert (begun is not None) == shares_image
    assert engine.scheduler.has_work == shares_image


def test_lines_are_encoded_side_by_side_and_the_requests_of_one_line_one_after_the_other(engine):
    add_image(engine, 0, make_image(content=1), client=5)
    add_image(engine, 1, make_image(content=2), client=5)
    engine.step()
    engine.encode_slice(is_last=False)
    add_image(engine, 2, make_image(content=3), client=6)
    engine.step()
    for _ in range(4):
        engine.encode_slice(is_last=False)
    assert engine.slices == [0, 2, 0, 2, 0]
    for _ in range(3):
        engine.encode_slice()
    assert engine.slices[5:] == [2, 0, 1]


def test_large_images_are_encoded_one_after_the_other(engine, monkeypatch):
    monkeypatch.setattr(image_turns, "_MAX_BEGUN_BYTES", 15)
    for slot, num_bytes in enumerate((10, 10, 3)):
        add_image(engine, slot, make_image(content=slot, num_bytes=num_bytes), client=slot)
    engine.step()
    for _ in range(2):
        engine.encode_slice(is_last=False)
    assert engine.slices == [0, 0]
    for _ in range(3):
        engine.encode_slice()
    assert engine.slices[2:] == [0, 1, 2]


def test_image_of_a_request_of_higher_priority_goes_first():
    engine = Engine(budget=60, policy="priority")
    add_image(engine, 0, priority=1)
    engine.step()
    engine.encode_slice(is_last=False)
    add_image(engine, 1, make_image(content=1), priority=0)
    engine.step()
    for _ in range(2):
        engine.encode_slice(is_last=False)
    for _ in range(2):
        engine.encode_slice()
    assert engine.slices == [0, 1, 1, 1, 0]


def test_suspect_waits_for_its_image_with_its_group(engine):
    engine.add(0, num_prompt_tokens=1, max_tokens=40)
    engine.step()
    add_image(engine, 1, isolate_until_num_tokens=1)
    for _ in range(4):
        engine.step()
        engine.encode_slice(is_last=False)
    assert len(engine.outputs[0]) >= 4
    engine.encode_slice()
    for _ in range(3):
        engine.step()
    assert 1 in engine.ends
    add_image(engine, 2, make_image(content=1), isolate_until_num_tokens=1)
    engine.step()
    engine.step()
    engine.encode_slice(is_last=False)
    engine.end([(0, engine.scheduler.abort(0, 2))])
    assert engine.encode_slice() is None


def test_sleeping_core_encodes_nothing_and_goes_on_after_it(engine):
    add_image(engine, 0)
    engine.step()
    engine.encode_slice(is_last=False)
    done = engine.sleep.sleep(1)
    engine.settle_sleep()
    assert done.done()
    assert engine.encode_slice() is None
    engine.sleep.wake_up()
    engine.settle_sleep()
    engine.encode_slice()
    engine.run()
    assert 0 in engine.ends


def test_no_request_is_lost_in_random_runs():
    chance = random.Random(1)
    for seed in range(12):
        engine = Engine(
            num_blocks=chance.randrange(16, 40), budget=chance.randrange(8, 40), max_num_seqs=4, ahead=seed % 2
        )
        images = [make_image(chance.randrange(1, 4), content) for content in range(4)]
        aborted = set()
        for slot in range(14):
            client, image = chance.randrange(3), images[chance.randrange(4)]
            options = {"client": client, "isolate_until_num_tokens": int(chance.random() < 0.2)}
            if chance.random() < 0.7:
                add_image(engine, slot, image, max_tokens=chance.randrange(1, 12), **options)
            else:
                engine.add(slot, num_prompt_tokens=chance.randrange(1, 20), **options)
            for _ in range(chance.randrange(4)):
                engine.step()
                engine.process_all_but(0)
                engine.encode_slice(is_last=chance.random() < 0.3)
            if chance.random() < 0.2 and slot not in engine.ends:
                engine.end([(client, engine.scheduler.abort(client, slot))])
                aborted.add(slot)
        for _ in range(500):
            engine.step()
            engine.process_all_but(0)
            engine.encode_slice(is_last=chance.random() < 0.5)
        assert set(engine.ends) == set(range(14))
        assert not engine.scheduler.has_work
        assert not engine.scheduler.waiting.images.begun
        assert all(engine.ends[slot] == "abort" for slot in aborted)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize(("slowdown", "share"), [(2.0, 0.5), (1.25, 0.2), (1.0, 1 / 11), (3.0, 2 / 3)])
def test_images_have_their_share_of_the_time_however_long_their_chunks_are(slowdown, share):
    clock = Clock()
    pace = EncodingPace(slowdown, clock)
    in_slices, began = 0.0, clock.now
    for _ in range(2000):
        clock.now += 0.02
        if (seconds := pace.seconds(is_alone=False)) > 0:
            assert seconds <= MAX_SLICE_S
            taken = max(seconds, 0.15)
            clock.now += taken
            in_slices += taken
            pace.note_slice()
    assert in_slices / (clock.now - began) == pytest.approx(share, abs=0.02)


def test_lone_image_is_encoded_without_a_break():
    clock = Clock()
    pace = EncodingPace(2.0, clock)
    for _ in range(10):
        assert pace.seconds(is_alone=True) == MAX_SLICE_S
        clock.now += 5.0
        pace.note_slice()
    assert pace.seconds(is_alone=False) == 0.0
    assert EncodingPace(0.0, clock).seconds(is_alone=False) == float("inf")
