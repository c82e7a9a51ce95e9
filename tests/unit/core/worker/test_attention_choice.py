"""The attention backend is chosen once, bound to the model, and used in every step."""

import functools

import pytest
import torch
from support.local_engine import LocalEngine

from vllm_mp.core.models.attention_layer import AttentionLayer
from vllm_mp.kernels import attention_backends, flash, ops, reference
from vllm_mp.kernels.attention_backends import AttentionBackend
from vllm_mp.kernels.cpu.library import library
from vllm_mp.machine.cpu_info import KERNELS_VARIABLE
from vllm_mp.testing.random_models import CONFIGS, random_prompts, save_random_model

BAD = 13
PROMPTS = [[token if token != BAD else BAD + 1 for token in prompt] for prompt in random_prompts((9, 30, 3, 17))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in which the embedding of token BAD is NaN."""
    folder = tmp_path_factory.mktemp("llama")
    model = save_random_model(CONFIGS["llama"], folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = torch.nan
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _without_cpp_kernels(monkeypatch):
    """No kernel computes a whole layer."""
    monkeypatch.setenv(KERNELS_VARIABLE, "none")
    library.cache_clear()
    yield
    library.cache_clear()


@pytest.fixture
def attended(monkeypatch):
    """The numbers of tokens with which FlashAttention was called; the reference computes in its place."""
    calls = []

    def prefill(asked):
        calls.append(len(asked.q))
        lens = asked.query_start.diff().tolist()
        rows = torch.empty(0, dtype=torch.int64)
        host_lens = asked.seq_lens.tolist()
        metadata = ops.AttentionMetadata(
            asked.query_start, asked.seq_lens, asked.block_table, rows, lens, host_lens, 0, asked.max_seq_len
        )
        return reference.paged_attention(asked.q, asked.k_cache, asked.v_cache, metadata, asked.scale)

    chosen = AttentionBackend("flash_attn", functools.partial(flash.paged_attention, prefill, ops.paged_attention))
    monkeypatch.setattr(attention_backends, "choose", lambda wanted, case: chosen)
    return calls


def answers(folder, prompts=PROMPTS, **options):
    engine = LocalEngine(folder, load_format="auto", **options)
    for slot, prompt in enumerate(prompts):
        engine.add(slot, prompt, max_tokens=6)
        engine.step()
    engine.run()
    return engine.tokens


def test_chosen_backend_computes_every_prefill(folder, attended, monkeypatch):
    found = answers(folder)
    num_layers = CONFIGS["llama"].num_hidden_layers
    assert sum(attended) == num_layers * sum(map(len, PROMPTS))
    monkeypatch.undo()
    monkeypatch.setenv(KERNELS_VARIABLE, "none")
    assert found == answers(folder)


def test_step_with_a_nan_is_computed_again_by_attention_that_isolates(folder, attended):
    good = PROMPTS[1]
    expected = answers(folder, [good])[0]
    assert answers(folder, [[*good, BAD, 5], good]) == {0: [], 1: expected}


def test_choice_is_written_to_the_configuration_and_bound_to_every_layer(folder):
    engine = LocalEngine(folder, load_format="auto", attention_backend="TORCH_SDPA")
    assert engine.runner._config.attention_config.backend == "torch"
    runner = LocalEngine(folder, load_format="auto").runner
    assert runner._config.attention_config.backend == "torch"
    layers = [module for module in runner.memory.model.modules() if isinstance(module, AttentionLayer)]
    assert len(layers) == CONFIGS["llama"].num_hidden_layers
    assert all(layer.attend is reference.paged_attention for layer in layers)
    with pytest.raises(ValueError, match="attention_backend='flash_attn': it needs a CUDA device"):
        LocalEngine(folder, load_format="auto", attention_backend="flash_attn")


def test_attention_is_bound_again_when_dropped_weights_are_loaded(folder):
    runner = LocalEngine(folder, load_format="auto").runner
    runner.memory.drop_weights()
    runner.memory.restore_weights()
    layers = [module for module in runner.memory.model.modules() if isinstance(module, AttentionLayer)]
    assert layers
    assert all(layer.attend is reference.paged_attention for layer in layers)


def test_reference_attention_is_not_captured(folder):
    memory = LocalEngine(folder, load_format="auto").runner.memory
    memory._device = torch.device("cuda")
    assert memory._default_capture() is None
    memory.attention = memory.attention._replace(captures=True)
    assert memory._default_capture() is not None
