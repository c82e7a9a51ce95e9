"""Stages that share out the layers of a model answer like one process that has the whole model."""

import json

import pytest
import torch
from support.adapters import adapter_tensors, save_adapter
from support.answers import PROMPTS, SCARCE, Poison, answers, answers_with_slot, assert_near
from support.local_engine import LocalEngine
from support.rank_threads import local_group
from transformers import GPTNeoXConfig, OlmoConfig, OPTConfig, Starcoder2Config

from vllm_mp.core.lora.adapter import read_adapter
from vllm_mp.core.parallel.followers import GroupMemory
from vllm_mp.model_config.registry import read_architecture
from vllm_mp.testing.random_models import CONFIGS, NATIVE, SIZES, TOKENS, random_prompts, save_random_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

FEW_BLOCKS = 26
"""Fewer blocks of 4 tokens than the prompts need together."""
TRANSFORMERS = {
    "olmo": OlmoConfig(**{**SIZES, "num_attention_heads": 4}, **TOKENS),
    "starcoder2": Starcoder2Config(**{**SIZES, "num_attention_heads": 4}, **TOKENS, sliding_window=9),
    "gpt-neox": GPTNeoXConfig(**SIZES, **TOKENS, rotary_pct=0.5),
    "opt": OPTConfig(
        **TOKENS,
        vocab_size=97,
        hidden_size=48,
        ffn_dim=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=128,
        word_embed_proj_dim=48,
    ),
}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Returns the folder of a random model with three layers."""
    folders = {}

    def make(name, **sizes):
        key = (name, *sizes.items())
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(name)
            config = TRANSFORMERS[name] if name in TRANSFORMERS else CONFIGS[name]
            save_random_model(type(config)(**{**config.to_dict(), **sizes}), folders[key])
        return folders[key]

    return make


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", NATIVE)
def test_stages_answer_like_one_process_with_chunks(name, num_stages, model_of):
    folder = model_of(name)
    expected = answers(LocalEngine(folder, **SCARCE))
    with local_group(folder, num_stages=num_stages, **SCARCE) as group:
        assert answers(group.engine) == expected


@pytest.mark.parametrize("name", NATIVE)
def test_stages_of_several_ranks_answer_like_one_process(name, model_of):
    folder = model_of(name)
    expected = answers(LocalEngine(folder, **SCARCE))
    with local_group(folder, 2, num_stages=2, **SCARCE) as group:
        assert_near(answers(group.engine), expected)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers_are_divided(name, size, model_of):
    if size > 1 and name == "opt":
        pytest.skip("transformers has no plan to split it")
    folder = model_of(name, num_attention_heads=4)
    whole = LocalEngine(folder, **SCARCE)
    expected = answers(whole)
    with local_group(folder, size, num_stages=2, **SCARCE) as group:
        assert_near(answers(group.engine), expected)
        assert group.engine.runner.memory.num_parameters == whole.runner.memory.num_parameters
        assert group.engine.runner.memory.token_bytes() < whole.runner.memory.token_bytes()


def test_more_stages_than_layers_of_a_model_of_transformers_are_refused(model_of):
    refusal = "pipeline_parallel_size=4: OlmoForCausalLM has 3 layers, .* set it to at most 3"
    with pytest.raises(ValueError, match=refusal), local_group(model_of("olmo"), num_stages=4):
        pass


@pytest.mark.parametrize("num_stages", [2, 3])
def test_requests_are_preempted_when_blocks_run_out(num_stages, model_of):
    folder = model_of("llama")
    arch = read_architecture(json.loads((folder / "config.json").read_text()))
    layer_bytes = arch.kv_bytes_per_token(4) // arch.num_layers
    expected = answers(LocalEngine(folder, **SCARCE))
    # The stage with most layers has the fewest blocks.
    most = 2 if num_stages == 2 else 1
    memory = FEW_BLOCKS * 4 * layer_bytes * most
    with local_group(folder, num_stages=num_stages, **SCARCE, kv_cache_memory_bytes=memory) as group:
        assert group.engine.pool.num_blocks == FEW_BLOCKS - 1, "one is padding"
        assert answers(group.engine) == expected
        assert group.engine.scheduler.num_preemptions > 0


def test_rows_are_shared_out_among_steps(model_of):
    prompts = random_prompts((3, 4, 5, 6, 3, 4))
    with local_group(model_of("llama"), num_stages=3) as group:
        engine = group.engine
        for slot, prompt in enumerate(prompts):
            engine.add(slot, prompt, 8)
        engine.step()
        assert engine.step() is None, "all rows wait for tokens of the step that is pending"
        steps = [engine.step() for _ in range(6)]
        engine.run()
    assert [len(step.rows) for step in steps] == [2] * 6
    together = [set(step.rows.tolist()) for step in steps]
    assert together[:3] == together[3:]
    assert len(set.union(*together[:3])) == 6


def test_next_chunk_of_a_prompt_does_not_wait(model_of):
    with local_group(model_of("llama"), num_stages=3, max_num_batched_tokens=12) as group:
        engine = group.engine
        engine.add(0, PROMPTS[0], 4)
        engine.step()
        engine.step()
        assert [pending.step.counts.tolist() for pending in engine.scheduler.pending_steps] == [[12], [12]]
        engine.run()
    assert len(engine.tokens[0]) == 4


@pytest.mark.parametrize("size", [1, 2])
def test_requests_that_leave_pending_steps_change_no_other(size, model_of):
    folder = model_of("llama")
    params = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2}
    expected = answers(LocalEngine(folder), **params)
    with local_group(folder, size, num_stages=3, **SCARCE) as group:
        engine = group.engine
        for slot, prompt in enumerate(PROMPTS[:4]):
            engine.add(slot, prompt, 10, num_logprobs=2, **params)
        for slot in range(10, 14):
            engine.add(slot, PROMPTS[1], 30, **params)
        num_aborted = 0
        while engine.scheduler.has_work or engine.scheduler.pending_steps:
            engine.step()
            due = [slot for slot in range(10, 14) if engine.tokens[slot] and engine.scheduler.is_live(0, slot)]
            if due and len(engine.scheduler.pending_steps) == 2:
                num_aborted += 1
                engine.scheduler.abort(0, due[0])
                if num_aborted == 1:  # they get rows that pending steps still have
                    for slot in (4, 5):
                        engine.add(slot, PROMPTS[slot], 10, num_logprobs=2, **params)
        found = [(engine.tokens[slot], engine.logprobs[slot]) for slot in range(len(PROMPTS))]
    assert num_aborted == 4
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize("size", [1, 2])
def test_prompts_whose_prefix_is_cached_are_answered_like_before(size, model_of):
    folder = model_of("llama")
    expected = answers(LocalEngine(folder))
    with local_group(folder, size, num_stages=2, max_num_batched_tokens=16) as group:
        assert_near(answers(group.engine), expected)
        num_launched = group.engine.num_launched
        assert_near(answers(group.engine), expected)
        assert group.engine.num_launched < 2 * num_launched


def test_prompts_as_embeddings_pass_all_stages(model_of):
    folder = model_of("llama")
    embeds = torch.randn(9, 48, generator=torch.Generator().manual_seed(0))

    def tokens(engine):
        engine.add(0, None, 6, embeds=embeds)
        engine.run()
        return engine.tokens[0]

    expected = tokens(LocalEngine(folder, enable_prompt_embeds=True))
    for size in (1, 2):
        with local_group(folder, size, num_stages=2, enable_prompt_embeds=True) as group:
            assert tokens(group.engine) == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen2-moe", "gpt2"])
def test_quantized_weights_are_shared_out(name, quantization, model_of):
    sizes = {"n_embd": 64, "n_head": 4} if name == "gpt2" else {"hidden_size": 64, "intermediate_size": 96}
    if name == "qwen2-moe":
        sizes |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    folder = model_of(name, **sizes, **({} if name == "gpt2" else {"num_attention_heads": 4, "head_dim": 16}))
    expected = answers(LocalEngine(folder, quantization=quantization))
    with local_group(folder, num_stages=2, quantization=quantization) as group:
        assert answers(group.engine) == expected


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_adapters_reach_all_stages(name, size, model_of, tmp_path):
    folder = model_of(name)
    arch = read_architecture(json.loads((folder / "config.json").read_text()))
    adapter = read_adapter(
        save_adapter(tmp_path / "adapter", adapter_tensors(arch, 8)), arch, torch.float32, max_rank=8
    )
    options = {"enable_lora": True, "max_lora_rank": 8}

    def tokens(engine):
        engine.runner.load_adapter(0, adapter)
        return answers_with_slot(engine, 0) + answers_with_slot(engine, -1)

    expected = tokens(LocalEngine(folder, **options))
    with local_group(folder, size, num_stages=3, **options) as group:
        assert_near(tokens(group.engine), expected)


def test_all_stages_sleep_and_wake_up_together(model_of):
    folder = model_of("llama")
    expected = answers(LocalEngine(folder))
    with local_group(folder, num_stages=2) as group:
        memory = GroupMemory(group.engine.runner.memory, group.leader)
        follower = group.followers[1]._runner
        memory.drop_cache()
        memory.drop_weights()
        assert not follower.memory.kv_caches
        memory.restore_weights()
        memory.restore_cache()
        memory.prepare()
        assert follower.memory.kv_caches
        assert answers(group.engine) == expected


@pytest.mark.parametrize("place", [0, 1])
def test_stage_whose_values_are_not_finite_repeats_its_share_of_the_step(place, model_of):
    folder = model_of("llama")
    expected = answers(LocalEngine(folder))
    with local_group(folder, num_stages=2) as group:
        runner = group.followers[1]._runner if place else group.engine.runner
        runner.memory.wrap_model(Poison)
        assert answers(group.engine) == expected
        assert not runner.memory.model.strikes
