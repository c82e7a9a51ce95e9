"""Steps that the host computes again and again give what steps give that are launched one by one."""

import itertools
from unittest.mock import patch

import pytest
from support.local_engine import LocalEngine
from transformers import LlamaConfig

from vllm_mp.core.scheduler.step import RepeatedStep
from vllm_mp.kernels import ops
from vllm_mp.testing.random_models import CONFIGS, SIZES, save_config

WIDE = LlamaConfig(**{**SIZES, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16})
"""Four bits need groups of 32 inputs."""
CASES = {
    "llama": (CONFIGS["llama"], {}),
    "gemma2": (CONFIGS["gemma2"], {"dtype": "bfloat16"}),
    "int8": (WIDE, {"dtype": "bfloat16", "quantization": "int8"}),
    "int4": (WIDE, {"dtype": "bfloat16", "quantization": "int4"}),
    "gpt2": (CONFIGS["gpt2"], {}),
}
PROMPTS = [[5, 17, 2, 60, 33], [8] * 6, [90, 1, 44]]


def play(folder, temperature, **options):
    """Return the tokens of requests that begin, end and are aborted at different steps, the steps, and the engine."""
    engine = LocalEngine(folder, load_format="dummy", **options)
    for slot, prompt in enumerate(PROMPTS):
        engine.add(slot, prompt, 58 - slot, num_logprobs=-1, temperature=temperature * (slot > 0))
    steps = []
    while engine.scheduler.has_work:
        if len(steps) == 6:
            engine.scheduler.abort(0, 1)
        steps.append(engine.step())
    return engine.tokens, steps, engine


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_repeated_steps_give_the_tokens_of_steps_that_are_launched_one_by_one(name, temperature, tmp_path):
    config, options = CASES[name]
    folder = save_config(config, tmp_path)
    with patch.object(RepeatedStep, "can_repeat", lambda *_: False):
        expected, _, _ = play(folder, temperature, **options)
    with patch.object(ops, "sample", wraps=ops.sample) as sample:
        tokens, steps, engine = play(folder, temperature, **options)
    assert tokens == expected
    # The model of random weights that is not prepared repeats itself without draws.
    assert len({*tokens[0]}) > 3 or name == "gpt2"
    assert sum(step is before for before, step in itertools.pairwise(steps)) > 30
    is_prepared = engine.runner.memory.prepared is not None
    assert is_prepared == (name != "gpt2" and ops.library() is not None)
    if temperature:
        # The logits of Gemma 2 are changed before a draw, so its draws are not prepared.
        assert (sample.call_count < 20) == (is_prepared and name != "gemma2")


def test_prepared_step_ends_with_the_memory_that_it_refers_to(tmp_path):
    folder = save_config(CONFIGS["llama"], tmp_path)
    *_, engine = play(folder, 0.0)
    for drop in (engine.runner.memory.drop_cache, engine.runner.memory.drop_weights):
        drop()
        assert engine.runner.memory.prepared is None


def test_wrapped_model_is_called_in_repeated_steps(tmp_path):
    engine = LocalEngine(save_config(CONFIGS["llama"], tmp_path), load_format="dummy")
    called = []

    class Counted:
        def __init__(self, model):
            self._model = model

        def __call__(self, *arguments):
            called.append(1)
            return self._model(*arguments)

        def __getattr__(self, name):
            return getattr(self._model, name)

    engine.runner.memory.wrap_model(Counted)
    engine.add(0, PROMPTS[0], 20, num_logprobs=-1)
    engine.run()
    assert len(called) == engine.num_launched == 20
