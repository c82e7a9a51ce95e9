"""Ranks that share the layers of a model, stages that share them out, and both, answer like one process."""

import json

import numpy as np
import pytest
import torch
from support.answers import NUM_TOKENS, PROMPTS, SCARCE, answers, answers_with_slot
from support.covering import by_turns
from support.drafts import draft_known_answers
from support.layouts import LAYOUTS, Layout, answers_of_one_process, assert_like, largest_layouts, with_layouts
from support.local_engine import LocalEngine
from support.rank_threads import local_group
from transformers import AutoModel

from vllm_mp.core.lora.adapter import read_adapter
from vllm_mp.core.parallel.followers import GroupMemory
from vllm_mp.model_config.families.registry import NATIVE_MODELS, read_architecture
from vllm_mp.model_config.families.with_images import read_qwen_vl, read_with_images
from vllm_mp.model_config.pipeline_parallel import stage_of
from vllm_mp.model_config.tensor_parallel import shard_of
from vllm_mp.testing.adapters import adapter_tensors, save_adapter
from vllm_mp.testing.random_models import CONFIGS, random_prompts

pytestmark = pytest.mark.usefixtures("one_torch_thread")

READERS = {
    entry.read: entry.model_type
    for entry in NATIVE_MODELS.values()
    if not entry.model.startswith("bert:") and entry.read not in (read_qwen_vl, read_with_images)
}
"""A `model_type` of each family of decoders, by the function that reads its configuration; a model of texts and images
is split as its text part."""
OTHER_LAYOUTS = by_turns([*READERS.values()], [name for name in LAYOUTS if name != "tensor-2-pipeline-2"])
"""Pairs of a family and a layout with either several ranks or several stages."""
FEW_BLOCKS = 26
"""Fewer blocks of 4 tokens than the prompts need together."""


def config_of(family):
    """Return the name of the first configuration in `CONFIGS` of a family that the registry has."""
    read = next(read for read, name in READERS.items() if name == family)
    types = {entry.model_type for entry in NATIVE_MODELS.values() if entry.read == read}
    names = [name for name, config in CONFIGS.items() if config.model_type in types]
    assert names, f"vllm_mp.testing.random_models has no configuration of {family}; add one to CONFIGS"
    return names[0]


def architecture(folder):
    return read_architecture(json.loads((folder / "config.json").read_text()))


def few_blocks_bytes(folder, layout):
    """Return the bytes of `FEW_BLOCKS` on the rank with most of the cache."""
    arch = architecture(folder)
    shares = [shard_of(stage_of(arch, stage, layout.num_stages), 0, layout.size) for stage in range(layout.num_stages)]
    return FEW_BLOCKS * 4 * max(share.kv_bytes_per_token(4) for share in shares)


@with_layouts(
    "family",
    *((family, "tensor-2-pipeline-2") for family in READERS.values()),
    extended=OTHER_LAYOUTS,
)
def test_every_family_is_answered_with_chunks_and_preemption(family, layout, model_of):
    folder = model_of(config_of(family))
    expected = answers_of_one_process(folder, **SCARCE, kv_cache_memory_bytes=few_blocks_bytes(folder, Layout()))
    memory = few_blocks_bytes(folder, layout)
    with local_group(folder, **layout._asdict(), **SCARCE, kv_cache_memory_bytes=memory) as group:
        assert_like(layout, answers(group.engine), expected)
        assert group.engine.scheduler.num_preemptions > 0


@largest_layouts
def test_prompts_whose_prefix_is_cached_are_answered_like_before(layout, model_of):
    folder = model_of("llama")
    expected = answers_of_one_process(folder)
    with local_group(folder, **layout._asdict(), max_num_batched_tokens=16) as group:
        assert_like(layout, answers(group.engine), expected)
        num_launched = group.engine.num_launched
        assert_like(layout, answers(group.engine), expected)
        assert group.engine.num_launched < 2 * num_launched


@largest_layouts
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_vectors_of_a_decoder_without_a_head_are_those_of_one_process(layout, quantization, model_of, tmp_path):
    AutoModel.from_pretrained(model_of("qwen2"), dtype=torch.float32).save_pretrained(tmp_path)
    options = {**SCARCE, "quantization": quantization}

    def vectors(engine):
        prompts = random_prompts((40, 5, 1, 33))
        for slot, prompt in enumerate(prompts):
            engine.encode(slot, prompt, pooling_type="mean")
        engine.run()
        return [engine.vectors[slot] for slot in range(len(prompts))]

    expected = vectors(LocalEngine(tmp_path, **options))
    with local_group(tmp_path, **layout._asdict(), **options) as group:
        found = vectors(group.engine)
    tolerance = 1e-4 if quantization is None else 0.05
    for vector, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(vector, wanted, atol=tolerance * np.abs(wanted).max())


@largest_layouts
def test_seeds_give_the_samples_of_one_process(layout, model_of):
    folder, params = model_of("llama"), {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2}
    expected = answers(LocalEngine(folder), **params)
    with local_group(folder, **layout._asdict()) as group:
        found = answers(group.engine, **params)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


@largest_layouts
def test_prompts_as_embeddings_reach_all_ranks(layout, model_of):
    folder, options = model_of("llama"), {"enable_prompt_embeds": True}
    embeds = torch.randn(9, 48, generator=torch.Generator().manual_seed(0))

    def tokens(engine):
        engine.add(0, None, 6, embeds=embeds)
        engine.run()
        return engine.tokens[0]

    expected = tokens(LocalEngine(folder, **options))
    with local_group(folder, **layout._asdict(), **options) as group:
        assert tokens(group.engine) == expected


@with_layouts(
    "name",
    *(("llama", "tensor-4"), ("llama", "pipeline-3")),
    *(("phi3", "tensor-2-pipeline-2"), ("phi3", "pipeline-2")),
    *(("gpt2", "tensor-2-pipeline-2"), ("gpt2", "tensor-2")),
)
def test_adapters_are_shared_out(name, layout, model_of, tmp_path):
    folder = model_of(name)
    arch = architecture(folder)
    adapter = read_adapter(save_adapter(tmp_path, adapter_tensors(arch, 8)), arch, torch.float32, max_rank=8)
    options = {"enable_lora": True, "max_lora_rank": 8}

    def answers_with_and_without(engine):
        engine.runner.load_adapter(0, adapter)
        return answers_with_slot(engine, 0), answers_with_slot(engine, -1)

    expected = answers_with_and_without(LocalEngine(folder, **options))
    assert [tokens for tokens, _ in expected[0]] != [tokens for tokens, _ in expected[1]]
    with local_group(folder, **layout._asdict(), **options) as group:
        found = answers_with_and_without(group.engine)
    for own, wanted in zip(found, expected, strict=True):
        assert_like(layout, own, wanted)


def test_all_ranks_sleep_and_wake_up_together(model_of):
    folder, layout = model_of("llama"), Layout(2, 2)
    expected = answers_of_one_process(folder)
    with local_group(folder, **layout._asdict()) as group:
        memory = GroupMemory(group.engine.runner.memory, group.others)
        others = [follower._runner.memory for follower in group.followers[1:]]
        memory.drop_cache()
        memory.drop_weights()
        assert not any(other.kv_caches for other in others)
        memory.restore_weights()
        memory.restore_cache()
        memory.prepare()
        assert all(other.kv_caches for other in others)
        assert_like(layout, answers(group.engine), expected)


@largest_layouts
def test_ranks_and_stages_verify_drafts(layout, model_of):
    folder = model_of("llama")
    expected = answers_of_one_process(folder)
    with local_group(folder, **layout._asdict(), speculative_config={"num_speculative_tokens": 4}) as group:
        known = zip(PROMPTS, (tokens for tokens, _ in expected), strict=True)
        draft_known_answers(group.engine.scheduler, known, wrong_every=4)
        assert_like(layout, answers(group.engine), expected)
        counters = group.engine.scheduler.drafting.counters
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
        assert counters.num_accepted_tokens < len(PROMPTS) * NUM_TOKENS
