"""Prompts with images are answered as by transformers, read once, and survive the death of the core."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import os
import signal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.forked_cores import forking
from support.image_models import (
    CROPPED,
    GRID,
    IMAGE_TOKEN,
    RESIZED,
    TILED,
    TOKENS_PER_IMAGE,
    image_tokenizer,
    picture,
    placeholder,
    save_processor,
)

from vllm_mp import AsyncEngineArgs, AsyncLLM, EngineGenerateError, SamplingParams
from vllm_mp.client.images.process_pool import ImageProcess, ImageProcesses
from vllm_mp.core_link.core_environment import core_environment, package_path
from vllm_mp.testing.image_models import save_image_model

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("forked_ranks")]
IMAGES = [picture(50, 40), picture(33, 64, 1), picture(1, 1, 2)]
PROMPTS = [
    (f"What is on {IMAGE_TOKEN}, and which colour does it have?", IMAGES[:1]),
    (f"What is on {IMAGE_TOKEN}, and which colour does it have?", [picture(50, 40, 3)]),
    (f"A {IMAGE_TOKEN} and {IMAGE_TOKEN}, then\n{IMAGE_TOKEN}?", IMAGES),
    (f"{IMAGE_TOKEN}{IMAGE_TOKEN}", [IMAGES[1], IMAGES[1]]),
    ("No image at all", []),
]


TOWERS = ["clip", "siglip"]
"""Modules of transformers with the vision towers that models of other modules have."""
FAMILIES = ["smolvlm", "llava", "qwen2_vl", "qwen2_5_vl", "gemma3"]


class Served:
    """A small model on disk, its engine, and transformers' model."""

    def __init__(self, family, folder):
        tokenizer = image_tokenizer()
        self.token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        size = -(-len(tokenizer) // 8) * 8
        sizes = {"vocab_size": size, "max_position_embeddings": 1024}
        self.hub_model = save_image_model(family, folder, self.token_id, **sizes)
        self.hub_model.generation_config.eos_token_id = None
        save_processor(folder, family)
        self.family = family
        # transformers takes images of Qwen2-VL side by side for one.
        between = " " if family.startswith("qwen") else ""
        self.prompts = [
            (text.replace("><", f">{between}<").replace(IMAGE_TOKEN, placeholder(family)), images)
            for text, images in PROMPTS
        ]
        self.args = AsyncEngineArgs(
            model=str(folder),
            dtype="float32",
            max_model_len=1024,
            max_num_batched_tokens=64,  # so that prompts are read in parts
            kv_cache_memory_bytes=2**24,
        )
        self._generated = {}
        """What transformers' model has generated, by the arguments of `expected`."""

    @functools.cached_property
    def llm(self):
        """An engine for the tests that neither configure nor harm it, and count what they cause."""
        return AsyncLLM.from_engine_args(self.args)

    def close(self):
        if "llm" in self.__dict__:
            self.llm.shutdown()

    def num_tiles(self, images):
        """Return the number of tiles that the images have together."""
        if self.family in ("llava", "qwen2_vl", "qwen2_5_vl", "gemma3"):
            return len(images)
        processor = transformers.Idefics3ImageProcessorPil(**TILED)
        return sum(processor([image], return_tensors="np")["pixel_values"].shape[1] for image in images)

    def expected(self, token_ids, images, num_tokens, **options):
        """Return the token ids that transformers' model generates greedily."""
        key = (*token_ids, *map(id, images), num_tokens, *options.items())
        if key not in self._generated:
            self._generated[key] = self._generate(token_ids, images, num_tokens, **options)
        return self._generated[key]

    def _generate(self, token_ids, images, num_tokens, **options):
        inputs = {}
        if images and self.family == "llava":
            made = transformers.CLIPImageProcessorPil(**CROPPED)(images, return_tensors="pt")
            inputs = {"pixel_values": made["pixel_values"]}
        elif images and self.family.startswith("qwen"):
            made = transformers.Qwen2VLImageProcessorPil(**GRID)(images, return_tensors="pt")
            inputs = dict(made) | {"mm_token_type_ids": torch.tensor([[int(i == self.token_id) for i in token_ids]])}
        elif images and self.family == "gemma3":
            made = transformers.Gemma3ImageProcessorPil(**RESIZED, **options)(images, return_tensors="pt")
            inputs = {
                "pixel_values": made["pixel_values"],
                "token_type_ids": (torch.tensor([token_ids]) == self.token_id).long(),
            }
        elif images:
            made = transformers.Idefics3ImageProcessorPil(**TILED)([images], return_tensors="pt")
            inputs = {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}
        ids = torch.tensor([token_ids])
        lengths = {"max_new_tokens": num_tokens, "do_sample": False}
        made = self.hub_model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, **lengths)
        return made[0, len(token_ids) :].tolist()


@pytest.fixture(scope="module")
def core_template():
    """The process from which cores are forked; it has imported the vision towers, which takes seconds."""
    towers = ["vllm_mp.testing.image_models", *(f"transformers.models.{each}.modeling_{each}" for each in TOWERS)]
    with forking(core_environment() | package_path(), towers) as forked_core:
        yield forked_core


@pytest.fixture(scope="module", autouse=True)
def _kept_image_processes():
    """Let engines have one image process, and that of an earlier engine with the same settings: starts take long."""
    kept = collections.defaultdict(list)

    def start(pool):
        processes = kept[pool._settings]
        return processes.pop() if processes else ImageProcess(pool._settings)

    def drop(pool, process):
        if process is not None:
            kept[pool._settings].append(process)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_mp.client.images.process_pool._NUM_PROCESSES", 1)
        patch.setattr(ImageProcesses, "_start", start)
        patch.setattr(ImageProcesses, "_drop", drop)
        yield
    for process in [each for processes in kept.values() for each in processes]:
        process.close()


@pytest.fixture(scope="module")
def model(forked_ranks, tmp_path_factory):
    """A function that returns the model of a family, and makes it at the first call."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def of_family(family):
            return stack.enter_context(contextlib.closing(Served(family, tmp_path_factory.mktemp(family))))

        yield of_family


def prompt(text, images):
    return {"prompt": text, "multi_modal_data": {"image": images}} if images else text


async def answer(llm, text, images, options=None, **params):
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True} | params
    given = prompt(text, images) if options is None else prompt(text, images) | {"mm_processor_kwargs": options}
    async for output in llm.generate(given, SamplingParams(**params)):
        last = output
    return last


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers_and_images_are_read_once(model, family):
    served = model(family)
    llm = served.llm

    async def num_encoded():
        return (await llm.core_status())["num_encoded_tiles"]

    async def run():
        await llm.reset_mm_cache()
        counts = [await num_encoded()]
        outputs = await asyncio.gather(*(answer(llm, *each) for each in served.prompts))
        counts.append(await num_encoded())
        again = [await answer(llm, *each) for each in served.prompts]
        longer = await answer(llm, served.prompts[0][0] + " And why?", served.prompts[0][1])
        counts.append(await num_encoded())
        await llm.sleep(level=2)
        await llm.wake_up()
        await llm.reset_mm_cache()
        again.append(await answer(llm, *served.prompts[0]))
        return outputs, again, longer, counts

    outputs, again, longer, (before, first, second) = asyncio.run(run())
    assert again.pop().outputs[0].token_ids == outputs[0].outputs[0].token_ids
    for output, repeated, (_, images) in zip(outputs, again, served.prompts, strict=True):
        assert repeated.outputs[0].token_ids == output.outputs[0].token_ids
        assert output.outputs[0].token_ids == served.expected(output.prompt_token_ids, images, 12)
    assert first == second == before + served.num_tiles([*IMAGES, served.prompts[1][1][0]])
    # All full blocks of the prompt but the last, in which the questions differ.
    assert longer.num_cached_tokens >= len(outputs[0].prompt_token_ids) // 16 * 16 - 16 > 0
    assert longer.outputs[0].token_ids == served.expected(longer.prompt_token_ids, served.prompts[0][1], 12)


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_vl"])
def test_kill_of_the_core_loses_nothing(model, family):
    served = model(family)
    llm = served.llm

    async def run():
        undisturbed = [await answer(llm, *each, max_tokens=60) for each in served.prompts]
        await llm.reset_mm_cache()
        before = await llm.core_status()
        running = [asyncio.create_task(answer(llm, *each, max_tokens=60)) for each in served.prompts * 2]
        async for _ in llm.generate(prompt(*served.prompts[1]), SamplingParams(max_tokens=3)):
            pass
        os.kill(before["pid"], signal.SIGKILL)
        return undisturbed * 2, await asyncio.gather(*running), before, await llm.core_status()

    undisturbed, killed, before, status = asyncio.run(run())
    assert status["restarts"] == before["restarts"] + 1
    assert status["num_recomputed_tokens"] <= 16 * len(killed)
    assert [each.outputs[0].token_ids for each in killed] == [each.outputs[0].token_ids for each in undisturbed]


@pytest.mark.parametrize("level", [1, 2])
def test_images_are_encoded_with_the_weights_that_a_wake_up_has_read(tmp_path, level):
    """A live request goes on, too, and its next token is chosen by the new weights alone."""
    served = Served("smolvlm", tmp_path)
    text, images = served.prompts[0]
    args = dataclasses.replace(served.args, fault_injection="slow@step=*,seconds=0.02")

    async def run():
        async with await AsyncLLM.start(args) as llm:
            before = await answer(llm, text, images)
            running = asyncio.create_task(answer(llm, text, images, max_tokens=100))
            waiting = asyncio.create_task(answer(llm, text, images, max_tokens=1))
            await waiting  # so that the other one has begun
            await llm.sleep(level=level, mode="keep")
            await llm.wake_up()
            same = (await running).outputs[0].token_ids
            running = asyncio.create_task(answer(llm, text, images, max_tokens=100))
            await answer(llm, text, images, max_tokens=1)
            await llm.sleep(level=level, mode="keep")
            change_vision_weights(tmp_path)
            await llm.wake_up()
            return before, await answer(llm, text, images), same, (await running).outputs[0].token_ids

    async def fresh(prompt_token_ids):
        async with await AsyncLLM.start(args) as llm:
            return await answer(llm, text, images)

    before, after, same, live = asyncio.run(run())
    assert same[:12] == before.outputs[0].token_ids
    assert len(same) == len(live) == 100
    expected = before if level == 1 else asyncio.run(fresh(after.prompt_token_ids))
    assert after.outputs[0].token_ids == expected.outputs[0].token_ids
    assert (live == same) == (level == 1)


def change_vision_weights(folder):
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(9)
    tensors = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) if "vision" in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, folder / "new", {"format": "pt"})
    (folder / "new").replace(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_images_the_vision_tower_is_not_loaded(model, family):
    served = model(family)
    text = "No image at all"
    args = dataclasses.replace(served.args, limit_mm_per_prompt={"image": 0})

    async def run():
        async with await AsyncLLM.start(args) as llm:
            output = await answer(llm, text, [])
            with pytest.raises(ValueError, match=r"at most 0 images .limit_mm_per_prompt., got 1"):
                await answer(llm, *served.prompts[0])
            await llm.reset_mm_cache()
            return output, await llm.core_status()

    output, status = asyncio.run(run())
    assert output.outputs[0].token_ids == served.expected(output.prompt_token_ids, [], 12)
    assert "num_encoded_tiles" not in status


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(
            "smolvlm",
            {"data_parallel_size": 2, "mm_processor_cache_gb": 0, "enable_prefix_caching": False},
            id="cores without caches",
        ),
        pytest.param(
            "qwen2_vl",
            {"tensor_parallel_size": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
            id="ranks and drafts",
        ),
        pytest.param("gemma3", {"pipeline_parallel_size": 2}, id="stages"),
        pytest.param("qwen2_vl", {"pipeline_parallel_size": 2}, id="other stages", marks=pytest.mark.slow),
        pytest.param("gemma3", {"tensor_parallel_size": 2}, id="other ranks", marks=pytest.mark.slow),
    ],
)
def test_other_engines_answer_as_transformers(model, family, options):
    served = model(family)

    async def run():
        async with await AsyncLLM.start(dataclasses.replace(served.args, **options)) as llm:
            outputs = await asyncio.gather(*(answer(llm, *each) for each in served.prompts * 2))
            return [*outputs, await answer(llm, *served.prompts[0], n=9, temperature=1, top_k=1)]

    outputs = asyncio.run(run())
    expected = [
        served.expected(output.prompt_token_ids, images, 12)
        for output, (_, images) in zip(outputs, served.prompts, strict=False)
    ]
    found = [each.token_ids for output in outputs for each in output.outputs]
    assert found == [*expected * 2, *expected[:1] * 9]


def test_images_that_a_step_may_not_divide_are_read_whole_beside_running_requests(model):
    """Steps have fewer tokens than an image, and the KV cache is too small for all requests at once."""
    served = model("gemma3")
    limits = {"max_model_len": 320, "block_size": 8, "kv_cache_memory_bytes": 42 * 3072}
    limits |= {"max_num_batched_tokens": 7, "max_num_seqs": 6}
    # So that the first requests are not done before the last one has its images.
    args = dataclasses.replace(served.args, fault_injection="slow@step=*,seconds=0.01", **limits)
    options = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20}
    defaults = {"pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}
    wide = [picture(100, 40)]

    async def run():
        async with await AsyncLLM.start(args) as llm:
            outputs = await asyncio.gather(*(answer(llm, *each, max_tokens=40) for each in served.prompts * 2))
            panned = await answer(llm, f"A wide {placeholder('gemma3')}?", wide, options)
            return outputs, panned, await llm.core_status()

    outputs, panned, status = asyncio.run(run())
    for output, (_, images) in zip(outputs, served.prompts * 2, strict=True):
        assert output.outputs[0].token_ids == served.expected(output.prompt_token_ids, images, 40)
    assert panned.prompt_token_ids.count(served.token_id) == 4 * TOKENS_PER_IMAGE
    assert panned.outputs[0].token_ids == served.expected(panned.prompt_token_ids, wide, 12, **options, **defaults)
    assert status["num_preemptions"] > 0


def test_streams_go_on_while_an_image_is_encoded_and_its_request_can_be_cancelled(model):
    served = model("qwen2_vl")
    # Each chunk takes longer than a slice.
    args = dataclasses.replace(served.args, fault_injection="slow@image,seconds=0.3;slow@step=*,seconds=0.02")
    text, images = served.prompts[0]

    async def run():
        tokens = []

        async def stream():
            async for output in llm.generate("No image at all", SamplingParams(max_tokens=980, ignore_eos=True)):
                tokens[:] = output.outputs[0].token_ids

        async def counts_until(is_reached):
            """Return the numbers of tokens of the stream at which a request was seen to wait for its image."""
            counts = set()
            while not is_reached(status := await llm.core_status()):
                assert not running.done(), "the stream ended first"
                if status["num_waiting"] and not status["num_encoded_tiles"]:
                    counts.add(len(tokens))
                await asyncio.sleep(0.01)
            return counts

        async with await AsyncLLM.start(args) as llm:
            running = asyncio.create_task(stream())
            cancelled = asyncio.create_task(answer(llm, text, images))
            await counts_until(lambda status: status["num_waiting"])
            cancelled.cancel()
            await counts_until(lambda status: not status["num_waiting"])
            answered = asyncio.create_task(answer(llm, text, images))
            await counts_until(lambda status: status["num_waiting"])
            counts = await counts_until(lambda status: status["num_encoded_tiles"])
            running.cancel()
            return counts, await answered, await llm.core_status()

    counts, output, status = asyncio.run(run())
    assert len(counts) >= 3, "a stream gets tokens between the slices"
    assert status["num_encoded_tiles"] == 1
    assert output.outputs[0].token_ids == served.expected(output.prompt_token_ids, images, 12)


def test_image_for_which_the_core_has_no_memory_fails_its_request_alone(model):
    served = model("qwen2_vl")
    args = dataclasses.replace(served.args, fault_injection="slow@step=*,seconds=0.02;oom@image,once")
    text, images = served.prompts[0]

    async def run():
        async with await AsyncLLM.start(args) as llm:
            running = asyncio.create_task(answer(llm, "No image at all", [], max_tokens=100))
            with pytest.raises(EngineGenerateError, match=r"no memory to encode an image .*; give a smaller image"):
                await answer(llm, text, images)
            return await answer(llm, text, images), await running, await llm.core_status()

    again, running, status = asyncio.run(run())
    assert status["restarts"] == 0
    assert again.outputs[0].token_ids == served.expected(again.prompt_token_ids, images, 12)
    assert running.outputs[0].token_ids == served.expected(running.prompt_token_ids, [], 100)


def test_core_that_dies_while_it_encodes_an_image_fails_its_request_alone(model):
    served = model("qwen2_vl")
    args = dataclasses.replace(served.args, fault_injection="slow@step=*,seconds=0.02;segv@image", max_core_restarts=6)
    texts = ["No image at all", "Nor here"]

    async def run():
        async with await AsyncLLM.start(args) as llm:
            running = [asyncio.create_task(answer(llm, text, [], max_tokens=100)) for text in texts]
            with pytest.raises(EngineGenerateError, match="2 cores that died"):
                await answer(llm, *served.prompts[0])
            return await asyncio.gather(*running), await llm.core_status()

    outputs, status = asyncio.run(run())
    assert status["restarts"] == 2
    for output in outputs:
        assert output.outputs[0].token_ids == served.expected(output.prompt_token_ids, [], 100)
