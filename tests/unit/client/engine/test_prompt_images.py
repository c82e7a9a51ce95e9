"""Prompts with images have the tokens and the arrays that transformers' own processors make."""

import asyncio
import importlib.util
import json
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from support.image_models import (
    BEGIN,
    CROPPED,
    END,
    GRID,
    IMAGE_TOKEN,
    PATCH_SIZE,
    RESIZED,
    TILED,
    TOKENS_PER_IMAGE,
    TOKENS_PER_TILE,
    image_fields,
    image_tokenizer,
    picture,
    placeholder,
)
from support.image_models import processor_files as files_of
from transformers.models.smolvlm import processing_smolvlm

from vllm_mp.client.engine.prompt_images import PromptImages
from vllm_mp.client.images.media import GivenImage
from vllm_mp.client.images.process_pool import ImageProcess
from vllm_mp.client.images.processor import model_processor
from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer
from vllm_mp.config import MultiModalConfig
from vllm_mp.model_config.images import ImageConfig, read_image_config

pytestmark = pytest.mark.extended
IMAGES = [picture(50, 40), picture(33, 64, 1), picture(1, 1, 2)]
TEXT = f"A {IMAGE_TOKEN} and {IMAGE_TOKEN}, then\n{IMAGE_TOKEN}?"
FAMILIES = ["idefics3", "smolvlm", "llava", "qwen2_vl", "gemma3"]


class Prompts:
    """The images of prompts to a small model."""

    def __init__(self, family, files=None, **options):
        self.family = family
        self.placeholder = placeholder(family)
        self.text = TEXT.replace(IMAGE_TOKEN, self.placeholder)
        self.tokenizer = image_tokenizer()
        self.token_id = self.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        model = SimpleNamespace(
            images=read_image_config(image_fields(family)),
            served_model_name="small",
            hf_config={},
        )
        config = SimpleNamespace(model_config=model, multimodal_config=MultiModalConfig(**options))
        self.images = PromptImages(config, PromptTokenizer(self.tokenizer), lambda: files or files_of(family))

    def prompt(self, images, text=None, token_ids=None, names=None, **options):
        given = list(map(GivenImage, images, names or [None] * len(images)))
        return asyncio.run(self.images.prompt(given, options, text, token_ids, {}, None, "", 0))


@pytest.fixture(scope="module", params=FAMILIES)
def prompts(request):
    prompts = Prompts(request.param)
    yield prompts
    prompts.images.close()


def gemma3_processor(tokenizer):
    for name, text in (("boi", BEGIN), ("eoi", END), ("image", IMAGE_TOKEN)):
        setattr(tokenizer, f"{name}_token", text)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(text))
    image_processor = transformers.Gemma3ImageProcessorPil(**RESIZED)
    return transformers.Gemma3Processor(image_processor, tokenizer, image_seq_length=TOKENS_PER_IMAGE)


def reference(prompts):
    """Return the token ids and the pixels of each image, as the processor of transformers makes them."""
    tokenizer = prompts.tokenizer
    if prompts.family == "gemma3":
        processor = gemma3_processor(tokenizer)
        made = processor(images=IMAGES, text=prompts.text)
        return made["input_ids"][0], [np.asarray(pixels)[None] for pixels in made["pixel_values"]]
    if prompts.family == "llava":
        processor = transformers.LlavaProcessor(
            transformers.CLIPImageProcessorPil(**CROPPED),
            tokenizer,
            patch_size=PATCH_SIZE,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
        made = processor(images=IMAGES, text=TEXT)
        return made["input_ids"][0], [np.asarray(pixels)[None] for pixels in made["pixel_values"]]
    if prompts.family == "qwen2_vl":
        processor = transformers.Qwen2VLImageProcessorPil(**GRID)
        text, pixels = TEXT, []
        for image in IMAGES:
            made = processor([image], return_tensors="np")
            text = text.replace(IMAGE_TOKEN, "[image]" * (int(made["image_grid_thw"].prod()) // 4), 1)
            frames = made["pixel_values"].reshape(-1, 3, 2, 16)
            assert np.array_equal(frames[:, :, 0], frames[:, :, 1])
            pixels.append(frames[:, :, 0].reshape(len(frames), -1))
        return tokenizer(text.replace("[image]", IMAGE_TOKEN)).input_ids, pixels
    image_processor = transformers.Idefics3ImageProcessorPil(**TILED)
    pixels = [image_processor([image], return_tensors="np")["pixel_values"] for image in IMAGES]
    if prompts.family == "idefics3":
        processor = transformers.Idefics3Processor(image_processor, tokenizer, image_seq_len=TOKENS_PER_TILE)
        return processor(images=IMAGES, text=TEXT)["input_ids"][0], pixels
    # The processor of SmolVLM needs packages for videos; this is how it writes images.
    text = TEXT
    for image in IMAGES:
        sizes = image_processor([image], return_row_col_info=True)
        string = processing_smolvlm.get_image_prompt_string(
            sizes["rows"][0][0],
            sizes["cols"][0][0],
            TOKENS_PER_TILE,
            fake_token_around_image="<fake_token_around_image>",
            image_token="[image]",
            global_image_token="<global-img>",
        )
        text = text.replace(IMAGE_TOKEN, string, 1)
    return tokenizer(text.replace("[image]", IMAGE_TOKEN)).input_ids, pixels


def test_prompt_has_the_tokens_and_the_arrays_of_transformers(prompts):
    token_ids, pixels = reference(prompts)
    made = prompts.prompt(IMAGES, prompts.text)
    assert made.token_ids == token_ids
    by_digest = {image.digest: image.arrays[0] for image in made.images}
    for placed, expected in zip(made.placed, pixels, strict=True):
        array = by_digest[placed.digest]
        assert array.name == "pixel_values"
        assert np.array_equal(np.frombuffer(array.data, np.float32).reshape(array.shape), expected.astype(np.float32))
    spans = [span for placed in made.placed for span in placed.spans]
    covered = [index for start, length in spans for index in range(start, start + length)]
    assert covered == [index for index, token in enumerate(token_ids) if token == prompts.token_id]


def test_token_ids_with_placeholders_give_the_same_prompt(prompts):
    images = IMAGES[:1]
    of_text = prompts.prompt(images, f"A{prompts.placeholder}")
    ids = prompts.tokenizer(f"A{prompts.placeholder}").input_ids
    assert prompts.prompt(images, token_ids=ids) == of_text


def test_images_are_refused_where_they_cannot_be_used(prompts):
    with pytest.raises(ValueError, match=r"\['image'\]\[1\] cannot be used: it is no image in the format"):
        prompts.prompt([IMAGES[0], b"x"], prompts.placeholder * 2)
    with pytest.raises(ValueError, match="'crop'; correct mm_processor_kwargs"):
        prompts.prompt(IMAGES[:1], prompts.placeholder, crop=1)
    with pytest.raises(ValueError, match=r"has 1 image tokens .'<image>'. and no image"):
        prompts.images.check_without_images([5, prompts.token_id])


@pytest.mark.parametrize(
    ("settings", "options", "num_tokens"),
    [
        ({"max_pixels": 32 * 32}, {}, 16),
        ({"size": {"shortest_edge": 64, "longest_edge": 32 * 32}}, {}, 16),
        ({}, {"max_pixels": 16 * 16}, 4),
        ({"size": {"shortest_edge": 64 * 64, "longest_edge": 12_845_056}}, {}, 64),
    ],
)
def test_pixels_of_an_image_are_bounded_by_settings_and_options(settings, options, num_tokens):
    files = files_of("qwen2_vl")
    files["preprocessor_config.json"] |= {"size": None} | settings
    prompts = Prompts("qwen2_vl", files)
    try:
        [placed] = prompts.prompt([picture(50, 50)], IMAGE_TOKEN, **options).placed
    finally:
        prompts.images.close()
    assert placed.spans == [(0, num_tokens)]


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("qwen2_vl", {"min_pixels": 10**9, "max_pixels": 10**9}, "mm_processor_kwargs: min_pixels must be at most"),
        ("qwen2_vl", {"size": {"shortest_edge": 10**9}}, r"mm_processor_kwargs: size\.shortest_edge must be at most"),
        ("llava", {"crop_size": {"height": 16, "width": 16}}, r"what the model does not take \(pixel_values must be"),
    ],
)
def test_options_that_make_what_a_model_does_not_take_are_refused(family, options, said):
    prompts = Prompts(family)
    try:
        with pytest.raises(ValueError, match=said):
            prompts.prompt(IMAGES[:1], IMAGE_TOKEN, **options)
    finally:
        prompts.images.close()


def test_image_of_more_pixels_than_a_message_holds_is_scaled_down():
    files = {"preprocessor_config.json": {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}}}
    images = ImageConfig(
        family="qwen2_vl", token_id=0, tile_size=0, tile_tokens=0, has_many_tiles=False, patch_size=14, merge_size=2
    )
    settings = json.loads(model_processor(images, lambda _: IMAGE_TOKEN, files, {}).image_processor.settings)
    assert settings["size"] == {"shortest_edge": 3136, "longest_edge": 6241 * 28 * 28}


def test_crops_of_pan_and_scan_follow_the_whole_image():
    prompts = Prompts("gemma3")
    wide = picture(100, 40)
    options = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
    try:
        made = prompts.prompt([wide], f"A {BEGIN}", **options)
        expected = gemma3_processor(prompts.tokenizer)(images=wide, text=f"A {BEGIN}", **options)
        assert made.token_ids == expected["input_ids"][0]
        (array,) = made.images[0].arrays
        assert array.shape == [4, 3, 32, 32]
        pixels = np.frombuffer(array.data, np.float32).reshape(array.shape)
        assert np.array_equal(pixels, np.asarray(expected["pixel_values"], np.float32))
        assert [count for _, count in made.placed[0].spans] == [TOKENS_PER_IMAGE] * 4
    finally:
        prompts.images.close()


def test_placeholders_of_gemma_3_without_images_are_refused():
    prompts = Prompts("gemma3")
    with pytest.raises(ValueError, match=r"has 1 image tokens .'<start_of_image>'. and no image"):
        prompts.images.check_without_images(prompts.tokenizer(f"A {BEGIN}").input_ids)


def test_equal_images_of_requests_at_a_time_are_processed_once(monkeypatch):
    prompts, jobs, run = Prompts("llava"), [], ImageProcess.run

    def run_and_note(process, job):
        jobs.append(job)
        return run(process, job)

    async def at_a_time():
        given = [GivenImage(IMAGES[0])]
        made = [prompts.images.prompt(given, {}, IMAGE_TOKEN, None, {}, None, "", 0) for _ in range(8)]
        return await asyncio.gather(*made)

    monkeypatch.setattr(ImageProcess, "run", run_and_note)
    try:
        made = asyncio.run(at_a_time())
    finally:
        prompts.images.close()
    assert len(jobs) == 1
    assert all(prompt == made[0] for prompt in made)


def test_name_stays_with_its_image_when_another_cannot_be_used():
    prompts = Prompts("llava")
    try:
        made = prompts.prompt(IMAGES[:1], IMAGE_TOKEN, names=["cat"])
        with pytest.raises(ValueError, match="it is no image in the format"):
            prompts.prompt([b"x"], IMAGE_TOKEN, names=["cat"])
        assert prompts.prompt([None], IMAGE_TOKEN, names=["cat"]) == made
    finally:
        prompts.images.close()


def test_options_that_leave_no_token_of_an_image_are_refused():
    prompts = Prompts("llava")
    size = {"crop_size": {"height": 5, "width": 5}, "size": {"shortest_edge": 5}}
    try:
        with pytest.raises(ValueError, match=r"\['image'\]\[0\] cannot be used: it becomes 0 image tokens"):
            prompts.prompt(IMAGES[:1], IMAGE_TOKEN, **size)
    finally:
        prompts.images.close()


def test_missing_pillow_is_named_with_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"need the package Pillow: pip install 'vllm-mp\[images\]'"):
        Prompts("llava").prompt([b"x"], IMAGE_TOKEN)


def test_wrong_numbers_of_images_start_no_process():
    prompts = Prompts("smolvlm", limit_mm_per_prompt={"image": 2})
    for text, images, said in [
        ("x", IMAGES[:1], "0 times '<image>' for 1 images"),
        (TEXT, IMAGES, "at most 2 images .limit_mm_per_prompt., got 3"),
    ]:
        with pytest.raises(ValueError, match=said):
            prompts.prompt(images, text)
    assert prompts.images.process_ids == []


def test_same_image_is_processed_once_and_options_make_another():
    prompts = Prompts("smolvlm", mm_processor_kwargs={"do_image_splitting": False})
    try:
        made = prompts.prompt([IMAGES[0], IMAGES[0]], IMAGE_TOKEN * 2)
        assert len(made.images) == 1
        assert len({placed.digest for placed in made.placed}) == 1
        assert made.images[0].arrays[0].shape == [1, 1, 3, 32, 32]
        again = prompts.prompt([IMAGES[0]], IMAGE_TOKEN)
        assert again.images[0].arrays is made.images[0].arrays
        split = prompts.prompt([IMAGES[0]], IMAGE_TOKEN, do_image_splitting=True)
        assert split.images[0].digest != made.images[0].digest
        prompts.images.forget()
        assert prompts.prompt([IMAGES[0]], IMAGE_TOKEN).images[0].arrays is not made.images[0].arrays
    finally:
        prompts.images.close()
