"""Models of texts and images in two GGUF files answer as the same weights in a checkpoint do."""

import asyncio
import dataclasses
import json
import os
import shutil
import signal

import pytest
from support.image_gguf import DEVIATION, F16, F32, MEAN, make_half_model, rounded, write_mmproj, write_text_part
from support.image_models import BEGIN, IMAGE_TOKEN, image_tokenizer, picture, processor_files
from support.tiny_tokenizers import byte_fallback
from transformers import PreTrainedTokenizerFast

from vllm_mp import AsyncEngineArgs, AsyncLLM, SamplingParams
from vllm_mp.client.prompts.tokenizer import get_tokenizer
from vllm_mp.model_store import resolve_model

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("forked_cores")]
IMAGES = [picture(50, 40), picture(33, 64, 1)]
PROMPTS = [
    (f"What is on {IMAGE_TOKEN}, and which colour does it have?", IMAGES[:1]),
    (f"A {IMAGE_TOKEN} and {IMAGE_TOKEN}?", IMAGES),
    ("No image at all", []),
]
IMAGE_TOKENS = {"gemma3": "<unused7>", "qwen2_5_vl": "<|image_pad|>"}
"""The tokens in the place of each embedding in files, where they are not `IMAGE_TOKEN`."""
PLACEHOLDERS = {"gemma3": BEGIN, "qwen2_5_vl": "<|image_pad|>"}
OPTIONS = AsyncEngineArgs(dtype="float32", max_model_len=1024, max_num_batched_tokens=64, kv_cache_memory_bytes=2**24)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_MP_CACHE", str(tmp_path / "cache"))


def save_pair(folder, family, kind=F32, tokenizer=None):
    """Save a model as two GGUF files in `folder`/gguf, and as a checkpoint in `folder`/hub.

    A `tokenizer` that is given has no token for images: the checkpoint has the first token for them.
    """
    token_id = 0 if tokenizer else image_tokenizer().convert_tokens_to_ids(IMAGE_TOKEN)
    in_file = tokenizer or image_tokenizer(IMAGE_TOKENS.get(family, IMAGE_TOKEN))
    tokenizer = tokenizer or (image_tokenizer() if family == "gemma3" else in_file)
    sizes = {"vocab_size": -(-len(tokenizer) // 8) * 8, "max_position_embeddings": 1024}
    model = make_half_model(family, token_id, **sizes)
    (folder / "gguf").mkdir()
    write_text_part(folder / "gguf" / "model.gguf", model, in_file)
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


async def answers(model, family="llava"):
    async with await AsyncLLM.start(dataclasses.replace(OPTIONS, model=str(model))) as llm:
        return [
            await answer(llm, text.replace(IMAGE_TOKEN, PLACEHOLDERS.get(family, IMAGE_TOKEN)), images, max_tokens=12)
            for text, images in PROMPTS
        ]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param("smolvlm", F16, marks=pytest.mark.slow),
        pytest.param("gemma3", F32, marks=pytest.mark.slow),
        ("qwen2_5_vl", F32),
    ],
)
def test_two_gguf_files_answer_as_the_checkpoint(tmp_path, family, kind):
    save_pair(tmp_path, family, kind)
    assert asyncio.run(answers(tmp_path / "gguf", family)) == asyncio.run(answers(tmp_path / "hub", family))


@pytest.mark.slow
def test_image_token_that_a_file_of_llava_lacks_takes_the_place_of_the_unknown_token(tmp_path):
    save_pair(tmp_path, "llava", tokenizer=PreTrainedTokenizerFast(tokenizer_object=byte_fallback()))
    folder = resolve_model(str(tmp_path / "gguf"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / "hub")
    found = asyncio.run(answers(tmp_path / "gguf"))
    assert found == asyncio.run(answers(tmp_path / "hub"))
    assert [ids.count(0) for ids, _ in found] == [9 * len(images) for _, images in PROMPTS]
    text = "<unk> brown é"
    with_images, text_part = (
        get_tokenizer(str(path)) for path in (tmp_path / "gguf", tmp_path / "gguf" / "model.gguf")
    )
    assert text_part(text).input_ids[0] == 0
    assert 0 not in with_images(text).input_ids
    assert with_images("brown é").input_ids == text_part("brown é").input_ids


def test_named_file_has_images_with_mmproj_only_and_survives_a_kill(tmp_path):
    save_pair(tmp_path, "smolvlm")
    mmproj = (tmp_path / "gguf" / "mmproj-model.gguf").rename(tmp_path / "vision.gguf")
    text_part = tmp_path / "gguf" / "model.gguf"

    args = dataclasses.replace(OPTIONS, model=str(text_part), mmproj=str(mmproj))
    assert dataclasses.replace(args, mmproj=None).create_engine_config().model_config.images is None

    async def run():
        async with await AsyncLLM.start(args) as llm:
            undisturbed = [await answer(llm, *each, max_tokens=60) for each in PROMPTS]
            await llm.reset_mm_cache()
            running = [asyncio.create_task(answer(llm, *each, max_tokens=60)) for each in PROMPTS]
            async for _ in llm.generate("Begin", SamplingParams(max_tokens=3)):
                pass
            os.kill((await llm.core_status())["pid"], signal.SIGKILL)
            killed = await asyncio.gather(*running)
        return undisturbed, killed

    undisturbed, killed = asyncio.run(run())
    assert killed == undisturbed
