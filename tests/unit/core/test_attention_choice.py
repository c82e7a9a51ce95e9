"""What computes attention is chosen at the start, used in every step, and replaced where it would have to isolate."""

import functools

import pytest
import torch
from support.local_engine import LocalEngine

from vllm_mp.kernels import attention_backends, flash, ops, reference
from vllm_mp.kernels.attention_backends import Backend
from vllm_mp.kernels.cpu.library import VARIABLE, library
from vllm_mp.testing.random_models import CONFIGS, random_prompts, save_random_model

BAD = 13
PROMPTS = [[token if token != BAD else BAD + 1 for token in one] for one in random_prompts((9, 30, 3, 17))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose token BAD is not finite."""
    folder = tmp_path_factory.mktemp("llama")
    model = save_random_model(CONFIGS["llama"], folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = torch.nan
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _definitions(monkeypatch):
    """No kernel that computes a whole layer."""
    monkeypatch.setenv(VARIABLE, "none")
    library.cache_clear()
    yield
    library.cache_clear()


@pytest.fixture
def attended(monkeypatch):
    """The numbers of tokens for which FlashAttention was called, for which the definition stands."""
    calls = []

    def attend(asked):
        calls.append(len(asked.q))
        lens = asked.query_start.diff().tolist()
        rows = torch.empty(0, dtype=torch.int64)
        host_lens = asked.seq_lens.tolist()
        metadata = ops.AttentionMetadata(
            asked.query_start, asked.seq_lens, asked.block_table, rows, lens, host_lens, 0, asked.max_seq_len
        )
        return reference.paged_attention(asked.q, asked.k_cache, asked.v_cache, metadata, asked.scale)

    chosen = Backend("flash_attn", functools.partial(flash.paged_attention, attend, ops.paged_attention))
    monkeypatch.setattr(attention_backends, "choose", lambda wanted, case: chosen)
    return calls


def answers(folder, prompts=PROMPTS, **options):
    engine = LocalEngine(folder, load_format="auto", **options)
    for slot, prompt in enumerate(prompts):
        engine.add(slot, prompt, max_tokens=6)
        engine.step()
    engine.run()
    return engine.tokens


def test_every_step_with_a_prefill_goes_through_what_was_chosen(folder, attended, monkeypatch):
    found = answers(folder)
    num_layers = CONFIGS["llama"].num_hidden_layers
    assert sum(attended) == num_layers * sum(map(len, PROMPTS))
    monkeypatch.undo()
    monkeypatch.setenv(VARIABLE, "none")
    assert found == answers(folder)


def test_a_step_in_which_something_is_not_finite_is_computed_again_by_what_isolates(folder, attended):
    good = PROMPTS[1]
    expected = answers(folder, [good])[0]
    assert answers(folder, [[*good, BAD, 5], good]) == {0: [], 1: expected}


def test_the_choice_is_written_to_the_configuration(folder):
    engine = LocalEngine(folder, load_format="auto", attention_backend="TORCH_SDPA")
    assert engine.runner._config.attention_config.backend == "torch"
    assert LocalEngine(folder, load_format="auto").runner._config.attention_config.backend == "torch"
    with pytest.raises(ValueError, match="attention_backend='flash_attn': it needs a CUDA device"):
        LocalEngine(folder, load_format="auto", attention_backend="flash_attn")


def test_the_definition_is_not_captured(folder, monkeypatch):
    monkeypatch.setattr(ops, "can_capture", lambda _: True)
    runner = LocalEngine(folder, load_format="auto").runner
    runner._device = torch.device("cuda")
    assert runner._usual_capture() is None
    runner._attention = Backend("triton")
    assert runner._usual_capture() is not None
