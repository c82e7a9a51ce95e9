"""Models of texts and images in two GGUF files answer as the same weights in a checkpoint do."""

import asyncio
import dataclasses
import json
import os
import signal

import pytest
from support.image_gguf import DEVIATION, F16, F32, MEAN, Q8_0, make_half_model, rounded, write_mmproj, write_text_part
from support.image_models import IMAGE_TOKEN, image_tokenizer, picture, processor_files

from vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams

pytestmark = pytest.mark.extended
IMAGES = [picture(50, 40), picture(33, 64, 1)]
PROMPTS = [
    (f"What is on {IMAGE_TOKEN}, and which colour does it have?", IMAGES[:1]),
    (f"A {IMAGE_TOKEN} and {IMAGE_TOKEN}?", IMAGES),
    ("No image at all", []),
]
OPTIONS = AsyncEngineArgs(dtype="float32", max_model_len=1024, max_num_batched_tokens=64, kv_cache_memory_bytes=2**24)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_MP_CACHE", str(tmp_path / "cache"))


def save_pair(folder, family, kind=F32):
    """Save a model as two GGUF files in `folder`/gguf, and as a checkpoint in `folder`/hub."""
    tokenizer = image_tokenizer()
    sizes = {"vocab_size": -(-len(tokenizer) // 8) * 8, "max_position_embeddings": 1024}
    model = make_half_model(family, tokenizer.convert_tokens_to_ids(IMAGE_TOKEN), **sizes)
    (folder / "gguf").mkdir()
    write_text_part(folder / "gguf" / "model.gguf", model, tokenizer)
    write_mmproj(folder / "gguf" / "mmproj-model.gguf", model, kind=kind)
    if kind != F32:
        rounded(model, kind)
    model.save_pretrained(folder / "hub")
    tokenizer.save_pretrained(folder / "hub")
    for name, content in processor_files(family).items():
        if name == "preprocessor_config.json":
            content = {**content, "image_mean": MEAN, "image_std": DEVIATION}
        (folder / "hub" / name).write_text(json.dumps(content))


async def answer(llm, text, images, **params):
    prompt = {"prompt": text, "multi_modal_data": {"image": images}} if images else text
    async for output in llm.generate(prompt, SamplingParams(temperature=0, ignore_eos=True, **params)):
        last = output
    return last.prompt_token_ids, last.outputs[0].token_ids


async def answers(model, **options):
    async with await AsyncLLM.start(dataclasses.replace(OPTIONS, model=str(model), **options)) as llm:
        return [await answer(llm, *each, max_tokens=12) for each in PROMPTS]


@pytest.mark.parametrize(("family", "kind"), [("smolvlm", F16), ("llava", F32), ("idefics3", Q8_0)])
def test_two_gguf_files_answer_as_the_checkpoint(family, kind, tmp_path):
    save_pair(tmp_path, family, kind)
    assert asyncio.run(answers(tmp_path / "gguf")) == asyncio.run(answers(tmp_path / "hub"))


def test_named_file_has_images_with_mmproj_only_and_survives_a_kill(tmp_path):
    save_pair(tmp_path, "smolvlm")
    mmproj = (tmp_path / "gguf" / "mmproj-model.gguf").rename(tmp_path / "vision.gguf")
    text_part = tmp_path / "gguf" / "model.gguf"

    async def run():
        args = dataclasses.replace(OPTIONS, model=str(text_part), mmproj=str(mmproj))
        async with await AsyncLLM.start(args) as llm:
            undisturbed = [await answer(llm, *each, max_tokens=60) for each in PROMPTS]
            await llm.reset_mm_cache()
            running = [asyncio.create_task(answer(llm, *each, max_tokens=60)) for each in PROMPTS]
            async for _ in llm.generate("Begin", SamplingParams(max_tokens=3)):
                pass
            os.kill((await llm.core_status())["pid"], signal.SIGKILL)
            killed = await asyncio.gather(*running)
        async with await AsyncLLM.start(dataclasses.replace(args, mmproj=None)) as llm:
            with pytest.raises(ValueError, match="takes no images"):
                await answer(llm, *PROMPTS[0])
        return undisturbed, killed

    undisturbed, killed = asyncio.run(run())
    assert killed == undisturbed
