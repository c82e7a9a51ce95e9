"""Ranks that share a model answer like one process that has the whole model, up to near-ties."""

import json

import pytest
import torch
from support.adapters import adapter_tensors, save_adapter
from support.answers import PROMPTS, SCARCE, Poison, answers, answers_with_slot, assert_near
from support.local_engine import LocalEngine
from support.rank_threads import local_group

from vllm_mp.core.lora.adapter import read_adapter
from vllm_mp.model_config.registry import read_architecture
from vllm_mp.testing.random_models import CONFIGS, NATIVE, save_random_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

FEW_BLOCKS = 26
"""Fewer blocks of 4 tokens than the prompts need together."""


def blocks_bytes(folder, size):
    """Return the bytes of `FEW_BLOCKS` on each of `size` ranks."""
    arch = read_architecture(json.loads((folder / "config.json").read_text()))
    kv_heads = max(1, arch.num_kv_heads // size)
    return FEW_BLOCKS * 4 * arch.kv_bytes_per_token(4) * kv_heads // arch.num_kv_heads


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Returns the folder of a random model with heads for four ranks, which share two heads of keys and values."""
    folders = {}

    def make(name, **sizes):
        key = (name, *sizes.items())
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(name)
            config = CONFIGS[name]
            if name != "gpt2":
                sizes = {"num_attention_heads": 4, **sizes}
            elif not sizes:
                sizes = {"n_head": 4}
            save_random_model(type(config)(**{**config.to_dict(), **sizes}), folders[key])
        return folders[key]

    return make


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", NATIVE)
def test_ranks_answer_like_one_process_with_chunks_and_preemption(name, size, model_of):
    folder = model_of(name)
    whole = LocalEngine(folder, **SCARCE, kv_cache_memory_bytes=blocks_bytes(folder, 1))
    expected = answers(whole)
    with local_group(folder, size, **SCARCE, kv_cache_memory_bytes=blocks_bytes(folder, size)) as group:
        assert group.engine.pool.num_blocks == whole.pool.num_blocks
        assert_near(answers(group.engine), expected)
        assert group.engine.scheduler.num_preemptions > 0


def test_prompts_whose_prefix_is_cached_are_answered_like_before(model_of):
    folder = model_of("llama")
    expected = answers(LocalEngine(folder))
    with local_group(folder, 2, max_num_batched_tokens=16) as group:
        assert_near(answers(group.engine), expected)
        num_messages = group.processes.num_messages
        assert_near(answers(group.engine), expected)
        assert group.processes.num_messages < 2 * num_messages


@pytest.mark.parametrize("overlaps", [False, True])
def test_sampled_answers_are_those_of_one_process(overlaps, model_of):
    folder = model_of("llama")
    params = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2}
    expected = answers(LocalEngine(folder, async_scheduling=overlaps), **params)
    with local_group(folder, 2, async_scheduling=overlaps) as group:
        found = answers(group.engine, **params)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_greedy_decodes_take_one_message_a_step(model_of):
    with local_group(model_of("llama"), 2) as group:
        engine = group.engine
        engine.add(0, PROMPTS[1], 8, num_logprobs=-1)
        engine.step()
        before = group.processes.num_messages
        for _ in range(5):
            engine.step()
        assert group.processes.num_messages == before + 5
        engine.run()
    assert len(engine.tokens[0]) == 8


def test_steps_launched_ahead_read_the_tokens_that_rank_0_has_sampled(model_of):
    folder = model_of("qwen3")
    expected = answers(LocalEngine(folder))
    with local_group(folder, 2, async_scheduling=True) as group:
        assert_near(answers(group.engine), expected)


@pytest.mark.parametrize("refused", [None, 32])
def test_ranks_replay_the_same_graphs_even_if_one_of_them_cannot_capture_all(refused, model_of):
    """A graph sums padding too, so ranks with different graphs would sum hidden states of different sizes."""

    def capture(rank):
        def run_first(compute):
            if len(compute()) == refused and rank == 1:
                raise RuntimeError("refused")
            return compute

        return lambda device: run_first

    folder = model_of("llama")
    expected = answers(LocalEngine(folder))
    captures = [capture(0), capture(1)]
    with local_group(folder, 2, async_scheduling=True, make_captures=captures) as group:
        runners = [group.engine.runner, group.followers[1]._runner]
        own, others = (set(runner.memory.graphs._replays) for runner in runners)
        assert own == others
        assert {shape.only_decodes for shape in own} == ({True} if refused else {True, False})
        assert_near(answers(group.engine), expected)


def test_prompts_as_embeddings_reach_all_ranks(model_of):
    folder = model_of("llama")
    embeds = torch.randn(9, 48, generator=torch.Generator().manual_seed(0))

    def tokens(engine):
        engine.add(0, None, 6, embeds=embeds)
        engine.run()
        return engine.tokens[0]

    expected = tokens(LocalEngine(folder, enable_prompt_embeds=True))
    with local_group(folder, 2, enable_prompt_embeds=True) as group:
        assert tokens(group.engine) == expected


@pytest.mark.parametrize(("quantization", "near_tie"), [("int8", 0.3), ("int4", 0.3)])
@pytest.mark.parametrize("name", ["llama", "qwen2-moe", "gpt2"])
def test_quantized_weights_are_shared_out(name, quantization, near_tie, model_of):
    if name == "gpt2":
        sizes = {"n_embd": 128, "n_head": 4}
    else:
        sizes = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
        if name == "qwen2-moe":
            sizes |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts_per_tok": 6}
    folder = model_of(name, **sizes)
    expected = answers(LocalEngine(folder, quantization=quantization))
    with local_group(folder, 2, quantization=quantization) as group:
        found = answers(group.engine)
    assert_near(found, expected, near_tie)


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
@pytest.mark.parametrize("size", [2, 4])
def test_adapters_are_shared_out(name, size, model_of, tmp_path):
    folder = model_of(name)
    arch = read_architecture(json.loads((folder / "config.json").read_text()))
    adapter = read_adapter(
        save_adapter(tmp_path / "adapter", adapter_tensors(arch, 8)), arch, torch.float32, max_rank=8
    )
    options = {"enable_lora": True, "max_lora_rank": 8}

    def tokens(engine):
        engine.runner.load_adapter(0, adapter)
        with_adapter = answers_with_slot(engine, 0)
        return with_adapter, answers_with_slot(engine, -1)

    expected = tokens(LocalEngine(folder, **options))
    assert [tokens for tokens, _ in expected[0]] != [tokens for tokens, _ in expected[1]]
    with local_group(folder, size, **options) as group:
        found = tokens(group.engine)
    for own, wanted in zip(found, expected, strict=True):
        assert_near(own, wanted)


def test_all_ranks_sleep_and_wake_up_together(model_of):
    from vllm_mp.core.parallel.followers import GroupMemory

    folder = model_of("llama")
    expected = answers(LocalEngine(folder))
    with local_group(folder, 2) as group:
        memory = GroupMemory(group.engine.runner.memory, group.leader)
        follower = group.followers[1]._runner
        memory.drop_cache()
        memory.drop_weights()
        assert not follower.memory.kv_caches
        memory.restore_weights()
        memory.restore_cache()
        memory.prepare()
        assert follower.memory.kv_caches
        assert_near(answers(group.engine), expected)


def test_steps_whose_values_are_not_finite_are_repeated_by_all_ranks(model_of):
    folder = model_of("llama")
    expected = answers(LocalEngine(folder))
    with local_group(folder, 2) as group:
        group.engine.runner.memory.wrap_model(Poison)
        assert_near(answers(group.engine), expected)
