"""Stages that share out the layers of a model answer like one process that has the whole model."""

import pytest
from support.answers import PROMPTS, SCARCE, Poison, answers, assert_near
from support.local_engine import LocalEngine
from support.rank_threads import local_group
from transformers import GPTNeoXConfig, OlmoConfig, OPTConfig, Starcoder2Config

from vllm_mp.testing.random_models import SIZES, TOKENS, random_prompts

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TRANSFORMERS = {
    "olmo": OlmoConfig(**SIZES, **TOKENS),
    "starcoder2": Starcoder2Config(**SIZES, **TOKENS, sliding_window=9),
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


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers_are_divided(name, size, model_of):
    if size > 1 and name == "opt":
        pytest.skip("transformers has no plan to split it")
    folder = model_of(TRANSFORMERS[name])
    whole = LocalEngine(folder, **SCARCE)
    expected = answers(whole)
    with local_group(folder, size, num_stages=2, **SCARCE) as group:
        assert_near(answers(group.engine), expected)
        assert group.engine.runner.memory.num_parameters == whole.runner.memory.num_parameters
        assert group.engine.runner.memory.token_bytes() < whole.runner.memory.token_bytes()


def test_more_stages_than_layers_of_a_model_of_transformers_are_refused(model_of):
    refusal = "pipeline_parallel_size=4: OlmoForCausalLM has 3 layers, .* set it to at most 3"
    with pytest.raises(ValueError, match=refusal), local_group(model_of(TRANSFORMERS["olmo"]), num_stages=4):
        pass


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


@pytest.mark.parametrize("place", [0, 1])
def test_stage_whose_values_are_not_finite_repeats_its_share_of_the_step(place, model_of):
    folder = model_of("llama")
    expected = answers(LocalEngine(folder))
    with local_group(folder, num_stages=2) as group:
        runner = group.followers[1]._runner if place else group.engine.runner
        runner.memory.wrap_model(Poison)
        assert answers(group.engine) == expected
        assert not runner.memory.model.strikes
