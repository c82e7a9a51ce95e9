"""Answers to prompts with images equal those of transformers, token for token; an image survives its core."""

import asyncio
import os
import signal

import pytest
import torch
import transformers
from support.image_models import (
    CROPPED,
    IMAGE_TOKEN,
    PATCH_SIZE,
    TILED,
    TOKENS_PER_TILE,
    image_tokenizer,
    picture,
    save_processor,
)
from transformers import (
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from vllm_mp import LLM, AsyncLLM, EngineArgs, SamplingParams

pytestmark = pytest.mark.extended
IMAGES = [picture(50, 40), picture(33, 64, 1), picture(1, 1, 2)]
PROMPTS = [
    ("The quick", []),
    (f"{IMAGE_TOKEN}What is this?", [0]),
    (f"A {IMAGE_TOKEN} and {IMAGE_TOKEN}, then {IMAGE_TOKEN}?", [0, 1, 2]),
    (f"Same {IMAGE_TOKEN}{IMAGE_TOKEN}", [1, 1]),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make_model(folder, family):
    """Save a small random model of `family`, and return the model of transformers."""
    torch.manual_seed(0)
    save_processor(folder, family)
    tokenizer = image_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (IMAGE_TOKEN,)}
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
    )
    if family == "llava":
        vision = CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=30,
            patch_size=PATCH_SIZE,
            projection_dim=16,
        )
        config = LlavaConfig(
            vision_config=vision, text_config=text, image_token_id=ids[IMAGE_TOKEN], image_seq_length=9
        )
        model = LlavaForConditionalGeneration(config)
    else:
        tower = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
        }
        kinds = {
            "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
            "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
        }
        config_class, model_class = kinds[family]
        config = config_class(
            vision_config=tower, text_config=text, image_token_id=ids[IMAGE_TOKEN], scale_factor=2, pad_token_id=0
        )
        model = model_class(config)
    model = model.float().eval()
    model.save_pretrained(folder)
    return model


def reference(model, family, text, images):
    """Return the greedy tokens of transformers after a prompt with images."""
    tokenizer = image_tokenizer()
    if family == "llava":
        processor = transformers.LlavaProcessor(
            transformers.CLIPImageProcessorPil(**CROPPED),
            tokenizer,
            patch_size=PATCH_SIZE,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )
    else:
        processor = transformers.Idefics3Processor(
            transformers.Idefics3ImageProcessorPil(**TILED), tokenizer, image_seq_len=TOKENS_PER_TILE
        )
    inputs = processor(images=images or None, text=text, return_tensors="pt")
    inputs = {k: v for k, v in inputs.items() if k != "token_type_ids"}
    out = model.generate(**inputs, do_sample=False, max_new_tokens=12, min_new_tokens=12, eos_token_id=None)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


def given(text, indices):
    return {"prompt": text, "multi_modal_data": {"image": [IMAGES[index] for index in indices]}} if indices else text


@pytest.fixture(scope="module", params=["smolvlm", "idefics3", "llava"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder, request.param)
    expected = [reference(model, request.param, text, [IMAGES[i] for i in indices]) for text, indices in PROMPTS]
    return folder, expected


def options(folder, **more):
    return {"model": str(folder), "dtype": "float32", "device": "cpu", "max_model_len": 512, **more}


def test_answers_equal_those_of_transformers(pair):
    folder, expected = pair
    with LLM(**options(folder, max_num_batched_tokens=16, enable_chunked_prefill=True)) as llm:
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.generate([given(*prompt) for prompt in PROMPTS], GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        assert outputs[2].num_cached_tokens > 0
        llm.reset_mm_cache()
        [output] = llm.generate(given(*PROMPTS[1]), GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected[1]
        messages = [{"role": "user", "content": [{"type": "image_pil", "image_pil": IMAGES[0]}]}]
        [output] = llm.chat(messages, GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 12


def test_killed_core_costs_no_request_with_images(pair):
    folder, expected = pair

    async def run():
        llm = AsyncLLM.from_engine_args(EngineArgs(**options(folder)))
        try:

            async def answer(prompt):
                async for output in llm.generate(given(*prompt), GREEDY):
                    last = output
                return last.outputs[0].token_ids

            tasks = [asyncio.create_task(answer(prompt)) for prompt in PROMPTS * 2]
            stream = llm.generate(given(*PROMPTS[1]), GREEDY)
            first = await anext(stream)
            assert first.outputs[0].token_ids
            os.kill((await llm.core_status())["pid"], signal.SIGKILL)
            async for output in stream:
                last = output
            assert last.outputs[0].token_ids == expected[1]
            assert await asyncio.gather(*tasks) == expected * 2
            assert (await llm.core_status())["restarts"] == 1
        finally:
            llm.shutdown()

    asyncio.run(run())
