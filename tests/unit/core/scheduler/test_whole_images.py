"""Images whose tokens attend to one another: a step computes all tokens of an image or none."""

import random

import numpy as np
import torch
from support.stand_in_engine import Engine

from vllm_mp.core.images.image_store import StoredImage
from vllm_mp.core.images.request_images import RequestImages
from vllm_mp.requests.images import ImageArray, PlacedImage, ProcessedImage
from vllm_mp.validation.image_validation import ImageShape

TILE = 6
IMAGE_TOKEN = 90


def whole_images(firsts, num_prompt_tokens, contents=None):
    """Return encoded images of one tile each, the first tokens of which are at `firsts`."""
    placed, images = [], []
    for number, first in enumerate(firsts):
        content = number if contents is None else contents[number]
        array = ImageArray("pixel_values", "uint8", [1], bytes([content]))
        image = StoredImage(ProcessedImage(bytes(32), [array]), ImageShape(1, TILE, is_whole=True), 8)
        image.note_encoded(0, torch.zeros(TILE, 1))
        images.append(image)
        placed.append(PlacedImage(bytes(32), [(first, TILE)]))
    return RequestImages(placed, images, num_prompt_tokens)


def prompt_of(length, firsts):
    tokens = np.arange(length) % 50
    for first in firsts:
        tokens[first : first + TILE] = IMAGE_TOKEN
    return tokens.tolist()


def chunks_of(engine, slot):
    """Run all steps; return (first token, end) of each chunk of the request in `slot`, which runs in row 0."""
    chunks = []
    while (step := engine.step()) is not None:
        chunks += [int(count) for row, count in zip(step.rows, step.counts, strict=True) if row == 0]
    assert slot in engine.ends
    return chunks


def add(engine, slot, length, firsts, contents=None, **options):
    engine.add(
        slot, prompt=prompt_of(length, firsts), images=whole_images(firsts, length, contents), max_tokens=1, **options
    )


def test_chunk_ends_before_an_image_that_does_not_fit():
    engine = Engine(budget=8, max_num_seqs=4)
    add(engine, 0, 27, [6, 13, 20])
    assert chunks_of(engine, 0) == [6, 7, 7, 7]


def test_image_that_exceeds_the_budget_is_computed_in_one_step_by_itself():
    engine = Engine(budget=4, max_num_seqs=4)
    add(engine, 0, 17, [5])
    assert chunks_of(engine, 0) == [4, 1, 6, 4, 2]


def test_image_beside_decodes_that_leave_too_few_tokens_is_not_put_off_for_ever():
    engine = Engine(budget=4, max_num_seqs=4)
    for slot in (1, 2, 3):
        engine.add(slot, num_prompt_tokens=1, max_tokens=50)
    engine.step()
    add(engine, 4, 12, [0])
    for _ in range(7):
        engine.step()
    assert 4 in engine.ends
    assert not {1, 2, 3} & engine.ends.keys()


def test_only_one_prompt_of_a_step_may_exceed_the_budget():
    engine = Engine(budget=4, max_num_seqs=4, max_num_partial_prefills=2)
    for slot in (0, 1):
        add(engine, slot, 8, [0], [slot])
    sizes = [int(engine.step().counts.sum()) for _ in range(4)]
    assert sizes == [6, 2, 6, 2]


def test_cached_prefix_may_end_in_an_image_whose_other_tokens_are_computed_at_once():
    engine = Engine(budget=5, max_num_seqs=4)
    add(engine, 0, 12, [3])  # blocks of 4 tokens: the second ends in the image
    engine.run()
    length = 14
    tokens = prompt_of(length, [3])
    tokens[9:] = [60, 61, 62, 63, 64]
    engine.add(1, prompt=tokens, images=whole_images([3], length), max_tokens=1)
    step = engine.step()
    assert (step.counts.tolist(), step.attention_ends.tolist()) == ([5], [9, 10, 11, 12, 13])
    add(engine, 2, 14, [3], contents=[7])  # another image
    assert engine.step().counts.tolist()[-1] != 5


def check(engine, step, firsts_of):
    """Check that a step that was just scheduled divides no image, and what its tokens see."""
    expected = []
    for row, count in zip(step.rows.tolist(), step.counts.tolist(), strict=True):
        computed, firsts = int(engine.batch.num_computed_tokens[row]), firsts_of[engine.batch.request(row).slot]
        assert not any(first < computed + count < first + TILE for first in firsts)
        for position in range(computed, computed + count):
            image = [first for first in firsts if first <= position < first + TILE]
            expected.append(image[0] + TILE if image else position + 1)
    if step.attention_ends is not None:
        assert step.attention_ends.tolist() == expected
    else:
        ends = engine.batch.num_computed_tokens[step.rows] + step.counts
        assert expected == [
            end for last, n in zip(ends, step.counts, strict=True) for end in range(last - n + 1, last + 1)
        ]


def test_no_step_divides_an_image_in_random_runs_and_each_token_sees_its_image(monkeypatch):
    chance, num_preemptions = random.Random(0), 0
    for _ in range(8):
        budget = chance.randrange(4, 24)
        engine = Engine(
            num_blocks=chance.randrange(24, 60),
            budget=budget,
            max_num_seqs=4,
            max_model_len=80,
            ahead=chance.randrange(2),
            max_num_partial_prefills=chance.randrange(1, 4),
        )
        firsts_of = {}
        for slot in range(12):
            length, firsts = chance.randrange(8, 60), []
            at = chance.randrange(4)
            while at + TILE <= length:
                firsts.append(at)
                at += TILE + chance.randrange(8)
            firsts_of[slot] = firsts
            images = whole_images(firsts, length, [chance.randrange(2) for _ in firsts])
            engine.add(slot, prompt=prompt_of(length, firsts), images=images, max_tokens=chance.randrange(1, 20))
        schedule = engine.scheduler.schedule

        def checked(schedule=schedule, engine=engine, budget=budget, firsts_of=firsts_of):
            if (step := schedule()) is not None:
                assert step.counts.sum() <= budget + TILE - 1
                check(engine, step, firsts_of)
            return step

        monkeypatch.setattr(engine.scheduler, "schedule", checked)
        engine.run()
        num_preemptions += engine.scheduler.num_preemptions
        assert len(engine.ends) == 12
    assert num_preemptions > 0
