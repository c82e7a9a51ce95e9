"""Tiles of images in steps: an image does not make other requests wait for all of its tiles."""

import pytest
import torch
from support.stand_in_engine import Engine

from vllm_mp.core.images.arrays import ImageShape
from vllm_mp.core.images.image_store import StoredImage
from vllm_mp.core.images.request_images import RequestImages
from vllm_mp.requests.images import ImageArray, PlacedImage, ProcessedImage

TILES, TILE, FIRST = 5, 4, 2
LENGTH = FIRST + TILES * TILE + 3


@pytest.fixture
def engine():
    engine = Engine(budget=60, max_prefill_slowdown=2.0, max_num_partial_prefills=4)
    schedule = engine.scheduler.schedule
    engine.tiles = []  # of each step

    def encoding():
        step = schedule()
        if step is None:
            return None
        encoded = []
        for row, count in zip(step.rows.tolist(), step.counts.tolist(), strict=True):
            images, first = engine.batch.request(row).images, int(engine.batch.num_computed_tokens[row])
            for part in () if images is None else images.parts(first, first + count):
                part.image.embeddings(
                    part.offset,
                    part.offset + part.num_tokens,
                    lambda _, first, last: encoded.append(last - first) or torch.zeros((last - first) * TILE, 1),
                )
        engine.tiles.append(sum(encoded))
        assert step.num_tiles >= engine.tiles[-1]
        return step

    engine.scheduler.schedule = encoding
    return engine


def add_image(engine, slot, content=0):
    image = ProcessedImage(bytes(32), [ImageArray("pixel_values", "uint8", [TILES], bytes([content] * TILES))])
    stored = StoredImage(image, ImageShape(TILES, TILE), 8)
    images = RequestImages([PlacedImage(bytes(32), [(FIRST, TILES * TILE)])], [stored], LENGTH)
    engine.add(slot, prompt=[90] * LENGTH, images=images, max_tokens=1)


def test_step_with_decodes_encodes_one_tile(engine):
    engine.add(0, num_prompt_tokens=1, max_tokens=40)
    engine.step()
    add_image(engine, 1)
    for _ in range(TILES + 4):
        engine.step()
    assert 1 in engine.ends
    assert max(engine.tiles) == 1
    assert sum(engine.tiles) == TILES


def test_prompts_without_images_do_not_wait_for_all_tiles(engine):
    add_image(engine, 0)
    add_image(engine, 1, content=1)
    engine.add(2, num_prompt_tokens=5, max_tokens=1)
    engine.step()
    assert engine.tiles == [1]
    assert 2 in engine.ends
    engine.run()
    assert {0, 1} <= engine.ends.keys()


def test_request_alone_has_all_tiles_in_one_step(engine):
    add_image(engine, 0)
    engine.run()
    assert engine.tiles[0] == TILES


def test_time_of_tiles_does_not_shorten_the_chunks_of_texts(engine):
    seconds = []
    engine.scheduler._pace.observe = lambda *arguments: seconds.append(arguments)
    add_image(engine, 0)
    engine.step()
    assert not seconds
    engine.add(1, num_prompt_tokens=5, max_tokens=1)
    engine.run()
    assert seconds
