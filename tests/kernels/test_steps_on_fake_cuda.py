"""The start and the steps of every native model on a fake CUDA device: what a GPU would refuse or be slowed by."""

import pytest

pytest.importorskip("triton")

from support.covering import by_turns, extended
from support.drafts import EagerPace
from support.fake_cuda_engine import LORA, constrained, engine_on_fake_cuda, use_adapters
from support.random_encoders import CLASSIFIERS
from transformers import Gemma2Config, LlamaConfig, Phi3Config

from vllm_mp.core.worker.cuda_graphs import step_shapes
from vllm_mp.testing.image_models import save_image_model
from vllm_mp.testing.random_models import CONFIGS, SIZES, save_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")

NUMBERS = (
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"dtype": "float32"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
)
STEPS = (
    {},
    {"has_few_blocks": True, "max_num_batched_tokens": 16, "max_num_seqs": 8},
    LORA,
    {"max_cudagraph_capture_size": 8},
    {"enforce_eager": True},
    {"async_scheduling": False},
)


USUAL_SIZES = {
    "llama-8b": LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        max_position_embeddings=131_072,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "phi3-mini": Phi3Config(num_hidden_layers=1),
    "gemma2-9b": Gemma2Config(num_hidden_layers=2),
}
"""Published models with a layer of each kind: tensors without values take no memory."""
FLOAT8 = {"kv_cache_dtype": "fp8", "quantization": "fp8"}
ADAPTERS = {**LORA, "max_lora_rank": 64}
ENCODER = {"dtype": "float16", "max_model_len": 60, "max_num_batched_tokens": 60, "kv_cache_memory_bytes": None}
EAGER = {"enforce_eager": True}
DEFAULTS = {
    "max_num_seqs": None,
    "max_model_len": None,
    "max_num_batched_tokens": None,
    "block_size": 16,
    "kv_cache_memory_bytes": None,
}


def config_of(name):
    """Return the configuration of a random model with two layers: more have the same kernels."""
    fields = CONFIGS[name].to_dict()
    fields["n_layer" if name == "gpt2" else "num_hidden_layers"] = 2
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:2]
    return type(CONFIGS[name])(**fields)


def check(folder, patch, level, capability=(9, 0), **options):
    """Start an engine, use all that it has, let it sleep, and use it again."""
    with engine_on_fake_cuda(folder, capability, **{"max_num_seqs": 4, **options}) as (engine, device):
        if "enable_lora" in options:
            use_adapters(engine, folder, patch)
        waits = engine.config.model_config.architecture.experts is not None
        graphs = None if waits or "enforce_eager" in options else len(step_shapes(engine.config))
        for num_tokens in (8, 2):
            engine.play(num_tokens)
            assert engine.num_graphs == (graphs and graphs * (2 if "enable_lora" in options else 1))
            assert (device.num_replays > 0) == (graphs is not None)
            engine.encode_prompts()
            engine.sleep_and_wake_up(level)
        if "has_few_blocks" in options:
            assert engine.scheduler.num_preemptions > 0
    assert not device.faults, "\n".join(dict.fromkeys(device.faults))


@pytest.mark.parametrize("name", ["qwen3", *extended("gpt2")])
def test_steps_are_replayed_without_waits_and_compile_nothing(name, tmp_path):
    with engine_on_fake_cuda(save_config(config_of(name), tmp_path), max_num_seqs=4, dtype="bfloat16") as made:
        engine, device = made
        engine.play()
        assert device.num_replays > 0
    assert not device.faults, "\n".join(dict.fromkeys(device.faults))


def test_steps_with_drafts_are_replayed_and_compile_nothing(tmp_path):
    options = {"dtype": "bfloat16", "max_num_seqs": 4, "speculative_config": {"num_speculative_tokens": 3}}
    with engine_on_fake_cuda(save_config(config_of("qwen3"), tmp_path), **options) as (engine, device):
        assert not engine.config.scheduler_config.async_scheduling
        engine.scheduler.drafting._pace = EagerPace()
        engine.play()
        assert device.num_replays > 0
        counters = engine.scheduler.drafting.counters
        assert counters.num_accepted_tokens == counters.num_draft_tokens > 20, "the fake device chooses token 0"
    assert not device.faults, "\n".join(dict.fromkeys(device.faults))


@pytest.mark.extended
def test_steps_of_a_draft_model_compile_nothing(tmp_path):
    """The draft model has other sizes than the model, for which kernels are compiled too."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16}
    draft = save_config(LlamaConfig(**{**SIZES, **sizes}), tmp_path / "draft")
    options = {"dtype": "bfloat16", "max_num_seqs": 4, "speculative_config": {"model": str(draft)}}
    with engine_on_fake_cuda(save_config(config_of("qwen3"), tmp_path), **options) as (engine, device):
        engine.scheduler.drafting._pace = EagerPace()
        num_compiled = len(device.compilations)
        for num_tokens in (8, 2):
            engine.play(num_tokens)
            engine.sleep_and_wake_up(1)
        assert device.compilations[num_compiled:] == []
        counters = engine.scheduler.drafting.counters
        assert counters.num_accepted_tokens == counters.num_draft_tokens > 20, "the fake device chooses token 0"
    assert not device.faults, "\n".join(dict.fromkeys(device.faults))


UNLIKE = ("llama", "mistral-windowed", "gemma2", "gemma3", "phi3", "qwen2-moe", "granite-moe")
"""Models whose steps differ in their kernels; the others have the same, with other numbers."""
UNLIKE_CASES = [
    *by_turns(UNLIKE, NUMBERS, STEPS, [1, 2]),
    ("qwen3", {"dtype": "bfloat16", "quantization": "fp8"}, {}, 2),  # not for mixtures
]
"""All kinds of numbers and of steps occur."""


@pytest.mark.extended
@pytest.mark.parametrize(("name", "numbers", "steps", "level"), UNLIKE_CASES)
def test_unlike_models_start_serve_and_sleep(name, numbers, steps, level, tmp_path, monkeypatch):
    check(save_config(config_of(name), tmp_path), monkeypatch, level, **numbers, **steps)


@pytest.mark.extended
def test_steps_of_a_model_with_several_positions_of_a_token_compile_nothing(tmp_path):
    save_image_model("qwen2_vl", tmp_path, max_position_embeddings=1024)
    options = {"dtype": "bfloat16", "max_num_seqs": 4, "limit_mm_per_prompt": {"image": 0}}
    with engine_on_fake_cuda(tmp_path, **options) as (engine, device):
        num_compiled = len(device.compilations)
        engine.play()
        assert device.compilations[num_compiled:] == []
    assert not device.faults, "\n".join(dict.fromkeys(device.faults))


LOGITS = ["copy to the device", "_copy_step_kernel", "replay", "_few_rows_kernel"]
HIGHEST = ["_part_highest_kernel", "_highest_kernel"]
DRAW = ["copy to the device", *HIGHEST, "log", "_depth_kernel", "_list_kernel", "_sample_kernel"]


def test_step_of_decodes_takes_one_replay_and_one_copy_each_way(tmp_path):
    options = {"dtype": "bfloat16", "max_num_seqs": 4, "async_scheduling": True}
    with engine_on_fake_cuda(save_config(config_of("qwen3"), tmp_path), **options) as (engine, device):
        for params, sampling in (({}, HIGHEST), ({"temperature": 1.0, "top_p": 0.9}, DRAW)):
            for slot in range(4):
                engine.add(slot, [3, 4, 5], 10, num_logprobs=-1, **params)
            for _ in range(8):
                engine.step()
            device.work.clear()
            device.waits.clear()
            step = engine.step()
            assert len(step.awaits) == len(step.rows) == 4
            assert device.work == [*LOGITS, *sampling, "copy to the host"]
            (wait,) = device.waits
            assert wait.startswith("Event.synchronize at host_copies.py:"), "for the step before"
            engine.run()


@pytest.mark.parametrize("steps", [{}, *extended(EAGER)])
def test_decoder_without_a_head_starts_and_makes_vectors(steps, tmp_path):
    config = type(CONFIGS["qwen3"])(**{**CONFIGS["qwen3"].to_dict(), "architectures": ["Qwen3Model"]})
    with engine_on_fake_cuda(save_config(config, tmp_path), max_num_seqs=4, dtype="bfloat16", **steps) as made:
        engine, device = made
        engine.encode_prompts()
        assert (device.num_replays > 0) == (not steps)
    assert not device.faults, "\n".join(dict.fromkeys(device.faults))


@pytest.mark.extended
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_encoder_starts_and_encodes(name, tmp_path):
    _, config = CLASSIFIERS[name]
    folder = save_config(config, tmp_path)
    with engine_on_fake_cuda(folder, **ENCODER) as (engine, device):
        engine.encode_prompts()
    assert not device.faults, "\n".join(dict.fromkeys(device.faults))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *by_turns([*USUAL_SIZES], [{}, FLOAT8, ADAPTERS]),
        pytest.param("llama-8b", {**FLOAT8, **EAGER}, marks=pytest.mark.slow),
        pytest.param("llama-8b", {**ADAPTERS, **EAGER}, marks=pytest.mark.slow),
    ],
)
def test_models_of_usual_sizes_compile_nothing_after_a_start_with_default_options(name, options, tmp_path, monkeypatch):
    folder = save_config(USUAL_SIZES[name], tmp_path)
    with engine_on_fake_cuda(folder, **{**DEFAULTS, "dtype": "bfloat16", **options}) as (engine, device):
        if "enable_lora" in options:
            use_adapters(engine, folder, monkeypatch)
        for slot in range(60):
            drawn = {"temperature": 1.0, "top_p": 0.9} if slot % 2 else {}
            engine.add(slot, [3] * (1 + 97 * slot % 900), 3, constrained=constrained() if slot % 3 else None, **drawn)
            if slot % 8 == 0:
                engine.step()
        engine.run()
        if "enforce_eager" not in options:
            assert 0 < device.num_replays < engine.num_launched, "steps of more than 512 tokens run without a graph"
    assert not device.faults, "\n".join(dict.fromkeys(device.faults))
