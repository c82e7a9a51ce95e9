"""Architectures without a native module run as modules of transformers with attention over the paged cache."""

import json
import os
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.paged_steps import run_in_chunks
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    BertConfig,
    BioGptConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    DogeConfig,
    FalconConfig,
    Gemma3nTextConfig,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    NemotronConfig,
    OlmoeConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedConfig,
    RobertaConfig,
    RwkvConfig,
    StableLmConfig,
    Starcoder2Config,
    T5Config,
    T5ForConditionalGeneration,
)

from vllm_mp import AsyncEngineArgs
from vllm_mp.core.models.loader import load_model
from vllm_mp.core.models.transformers.backend import TransformersForCausalLM
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.errors import EngineStartError
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.testing.engines import running_engine
from vllm_mp.testing.greedy_parity import assert_engine_is_greedy, num_preemptions
from vllm_mp.testing.random_models import (
    ALTERNATING,
    LONGROPE,
    PROMPT_LENGTHS,
    SIZES,
    TOKENS,
    few_blocks,
    random_prompts,
    save_config,
    save_random_model,
)

pytestmark = pytest.mark.usefixtures("forked_cores")

NUM_TOKENS = 24
PROMPTS = random_prompts(PROMPT_LENGTHS)
MOE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
MLA: dict[str, Any] = {
    **{key: value for key, value in SIZES.items() if key != "head_dim"},
    "num_key_value_heads": 6,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
LONG = Starcoder2Config(
    **SIZES, **TOKENS, rope_parameters={**LONGROPE["rope_parameters"], "original_max_position_embeddings": 64}
)

CONFIGS: dict[str, PreTrainedConfig] = {
    "biogpt": BioGptConfig(**SIZES, **TOKENS),
    "cohere": CohereConfig(**SIZES, **TOKENS, logit_scale=3.0, use_qk_norm=True),
    "cohere2": Cohere2Config(**SIZES, **TOKENS, sliding_window=9, layer_types=ALTERNATING),
    "deepseek-v3": DeepseekV3Config(
        **MLA, **MOE, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=1
    ),
    "gemma3n-shared-kv": Gemma3nTextConfig(
        **SIZES,
        **TOKENS,
        sliding_window=9,
        layer_types=["full_attention", *ALTERNATING[:2]],
        num_kv_shared_layers=1,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=97,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0, 0.5, 0.0],
    ),
    "gpt-bigcode": GPTBigCodeConfig(vocab_size=97, n_embd=48, n_layer=3, n_head=6, n_positions=128, **TOKENS),
    "gpt-neox": GPTNeoXConfig(**{**SIZES, "num_attention_heads": 4}, **TOKENS, rotary_pct=0.5),
    # A family with a native module, which does not compute these fields.
    "llama-relu2": LlamaConfig(**SIZES, hidden_act="relu2"),
    "llama-partial": LlamaConfig(**SIZES, partial_rotary_factor=0.5),
    "llama4": Llama4TextConfig(
        **SIZES,
        **TOKENS,
        num_local_experts=4,
        intermediate_size_mlp=80,
        attention_chunk_size=128,
        no_rope_layers=[1, 1, 0],
    ),
    "nemotron": NemotronConfig(**SIZES, **TOKENS),
    "olmoe": OlmoeConfig(**SIZES, **TOKENS, num_experts=4, num_experts_per_tok=2),
    "opt": OPTConfig(**SIZES, **TOKENS, ffn_dim=80, word_embed_proj_dim=48),
    "phi": PhiConfig(**SIZES, **TOKENS, partial_rotary_factor=0.5),
    "stablelm": StableLmConfig(**SIZES, **TOKENS, use_qkv_bias=True, use_parallel_residual=True),
    "starcoder2": Starcoder2Config(**SIZES, **TOKENS, sliding_window=9),
}
THROUGH_A_CORE = [
    "deepseek-v3",
    "cohere2",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3n-shared-kv", "olmoe", "opt", "phi")),
]


def save_reference(config, folder) -> Any:
    """Save a random model in `folder`; return it with eager attention, which runs all of these models."""
    theirs: Any = save_random_model(config, folder)
    theirs.set_attn_implementation("eager")
    return theirs


def save_named_config(config, folder):
    """Save a folder for load_format="dummy" that names the architecture, as folders of the hub do."""
    generator = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), T5ForConditionalGeneration)
    config.architectures = [generator.__name__]
    return save_config(config, folder)


def load_ours(folder, dtype=torch.float32, progress=lambda fraction: None, **options) -> Any:
    """Load the model as the core does."""
    config = AsyncEngineArgs(model=str(folder), **options).create_engine_config().model_config
    return load_model(config, dtype, torch.device("cpu"), progress)


def random_model(config, **options) -> Any:
    """Return a transformers model that the backend can run."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="vllm_mp", **options
    ).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_from_chunks_over_a_paged_cache_equal_those_of_transformers(name, tmp_path):
    with one_thread():
        theirs = save_reference(CONFIGS[name], tmp_path)
        ours = load_ours(tmp_path)
        prompts = random_prompts((61, 1, 24, 100, 33))
        for prompt, got in zip(prompts, run_in_chunks(ours, prompts, block_size=4), strict=True):
            with torch.inference_mode():
                expected = theirs(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_log_says_why_a_model_of_a_native_family_runs_as_transformers_module(tmp_path, caplog):
    load_ours(save_named_config(CONFIGS["llama-relu2"], tmp_path), load_format="dummy")
    (line,) = [record.message for record in caplog.records if "runs as transformers' own" in record.message]
    assert line.startswith("LlamaForCausalLM has no native module for this configuration")
    assert "config field 'hidden_act' is 'relu2'; native are silu, swish, gelu, " in line


def test_error_of_transformers_names_the_field_that_the_native_module_does_not_compute(tmp_path):
    folder = save_named_config(CONFIGS["llama-relu2"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "strange"}))
    with pytest.raises(ValueError, match=r"'LlamaForCausalLM' cannot run here: .*'hidden_act' is 'strange'"):
        load_ours(folder, load_format="dummy")


@pytest.mark.parametrize("trust_remote_code", [True, False])
def test_model_with_code_of_its_own_is_refused_by_name(trust_remote_code, tmp_path):
    config = {"architectures": ["MineForCausalLM"], "model_type": "mine", **SIZES}
    auto_map = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    with pytest.raises(ValueError, match=r"'MineForCausalLM' cannot run here: .*'auto_map'.*which is never run"):
        load_ours(tmp_path, load_format="dummy", trust_remote_code=trust_remote_code)


@pytest.mark.parametrize("name", THROUGH_A_CORE)
def test_answers_with_chunks_and_preemption_equal_those_of_transformers(name, tmp_path):
    with one_thread():
        theirs = save_reference(CONFIGS[name], tmp_path)
        shapes = load_ours(tmp_path).kv_shapes
        token_bytes = 4 * sum(heads * dim for layer in shapes for heads, dim in layer)
        options = few_blocks(token_bytes)
        with running_engine(tmp_path, skip_tokenizer_init=True, device="cpu", num_threads=1, **options) as engine:
            assert_engine_is_greedy(engine, theirs, PROMPTS, NUM_TOKENS)
            assert num_preemptions(engine) > 0


def test_latent_attention_caches_keys_and_values_of_different_sizes(tmp_path):
    ours = load_ours(save_named_config(CONFIGS["deepseek-v3"], tmp_path), load_format="dummy")
    assert ours.kv_shapes == [((6, 16), (6, 12))] * 3


def test_dummy_weights_are_a_function_of_the_seed(tmp_path):
    folder = save_named_config(CONFIGS["olmoe"], tmp_path)
    first, again, other = (load_ours(folder, load_format="dummy", seed=seed).state_dict() for seed in (7, 7, 8))
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in first.items())


@pytest.mark.parametrize("name", ["deepseek-v3", "cohere2", "opt"])
def test_16_bit_weights_pass_the_checks_and_compute_in_16_bits(name, tmp_path):
    save_random_model(CONFIGS[name], tmp_path)
    ours = load_ours(tmp_path, torch.bfloat16)
    (logits,) = run_in_chunks(ours, random_prompts((12,)), block_size=4, dtype=torch.bfloat16)
    assert ours.causal.dtype == torch.bfloat16
    assert logits.isfinite().all()


REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "state-space": (MambaConfig(vocab_size=97, hidden_size=48, num_hidden_layers=2), "'MambaForCausalLM'.*state-space"),
    "recurrent": (RwkvConfig(vocab_size=97, hidden_size=48, context_length=64), "'RwkvForCausalLM'.*state-space"),
    "hybrid": (JambaConfig(**SIZES, **TOKENS), "'JambaForCausalLM'.*keeps a state"),
    "alibi": (
        BloomConfig(vocab_size=97, hidden_size=48, n_layer=2, n_head=6, seq_length=64),
        "'BloomForCausalLM'.*ALiBi",
    ),
    "own attention": (
        FalconConfig(vocab_size=97, hidden_size=48, num_attention_heads=6, max_position_embeddings=64),
        "'FalconForCausalLM' cannot run here: its attention in transformers is code of its own",
    ),
    "rotary": (
        GPTJConfig(vocab_size=97, n_embd=48, n_layer=2, n_head=6, n_positions=64, rotary_dim=4),
        "'GPTJForCausalLM' cannot run here: its attention in transformers is code of its own",
    ),
    "biases": (
        FalconConfig(vocab_size=97, hidden_size=48, num_attention_heads=6, max_position_embeddings=64, alibi=True),
        "'FalconForCausalLM'.*ALiBi",
    ),
    "encoder-decoder": (T5Config(vocab_size=97, d_model=48), "'T5ForConditionalGeneration'.*only decoder-only"),
    "sinks": (
        GptOssConfig(**SIZES, **TOKENS, num_local_experts=4, layer_types=ALTERNATING),
        "'GptOssForCausalLM'.*s_aux",
    ),
    "own mask": (DogeConfig(**SIZES, **TOKENS), "'DogeForCausalLM'.*makes its own mask"),
    "not causal": (BertConfig(**SIZES, **TOKENS), "'BertLMHeadModel'.*not causal"),
    "attention called twice": (DiffLlamaConfig(**SIZES, **TOKENS), "'DiffLlamaForCausalLM'.*used 6 times in 3 layers"),
    "own positions": (RobertaConfig(**SIZES, **TOKENS, is_decoder=True), "'RobertaForCausalLM'.*positions from 0"),
    "chunks": (
        Llama4TextConfig(**SIZES, **TOKENS, num_local_experts=4, intermediate_size_mlp=80, attention_chunk_size=32),
        "'Llama4ForCausalLM'.*mask of layer .* is not causal .* max_model_len=128",
    ),
    "longrope": (LONG, "longrope.*outgrows 64 .*max_model_len.*128"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_model_that_cannot_give_the_answers_of_transformers_is_refused_by_name(kind, tmp_path):
    config, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        load_ours(save_named_config(config, tmp_path), load_format="dummy")


def test_longrope_is_served_up_to_the_length_that_keeps_its_frequencies(tmp_path):
    with one_thread():
        theirs = save_reference(LONG, tmp_path)
        prompts = random_prompts((64, 7))
        for prompt, got in zip(prompts, run_in_chunks(load_ours(tmp_path, max_model_len=64), prompts, 4), strict=True):
            with torch.inference_mode():
                torch.testing.assert_close(got, theirs(torch.tensor([prompt])).logits[0], atol=1e-4, rtol=0)


class Shifted(nn.Module):
    """A module whose output depends on the previous token."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, hidden):
        return self.part(hidden + 0.1 * hidden.roll(1, dims=1))


class Pooled(Shifted):
    """A module whose output depends on the mean of all tokens, in any order."""

    def forward(self, hidden):
        return self.part(hidden + 0.1 * hidden.mean(1, keepdim=True))


@pytest.mark.parametrize("kind", [Shifted, Pooled], ids=["previous token", "mean of all tokens"])
def test_model_whose_tokens_interact_outside_attention_is_refused(kind):
    causal = random_model(CONFIGS["stablelm"])
    causal.model.layers[1].mlp = kind(causal.model.layers[1].mlp)
    with pytest.raises(ValueError, match=r"'StableLmForCausalLM'.*depends on the tokens beside it"):
        TransformersForCausalLM(causal, arch_of(causal), 128)


def test_rotary_frequencies_that_depend_on_the_longest_sequence_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    causal = random_model(LlamaConfig(**SIZES, rope_parameters=rope))
    TransformersForCausalLM(causal, arch_of(causal), 128)
    causal = random_model(LlamaConfig(**SIZES, rope_parameters=rope))
    with pytest.raises(ValueError, match=r"'LlamaForCausalLM'.*depends on the tokens beside it"):
        TransformersForCausalLM(causal, arch_of(causal), 256)


def arch_of(causal):
    return read_architecture({**causal.config.to_dict(), "architectures": [type(causal).__name__]})


def test_model_with_another_head_or_unknown_type_is_refused(tmp_path):
    folder = save_named_config(CONFIGS["stablelm"], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["StableLmForSequenceClassification"]}))
    with pytest.raises(ValueError, match=r"'StableLmForSequenceClassification' .*text is StableLmForCausalLM"):
        load_ours(folder, load_format="dummy")
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "stablelm3"}))
    with pytest.raises(ValueError, match=r"'StableLmForCausalLM' .*cannot read .*config\.json: .*stablelm3"):
        load_ours(folder, load_format="dummy")


def test_cause_of_a_refusal_by_the_core_reaches_the_caller(tmp_path):
    config, message = REFUSED["alibi"]
    folder = save_named_config(config, tmp_path)
    options = {"skip_tokenizer_init": True, "load_format": "dummy", "max_model_len": 64}
    with pytest.raises(EngineStartError, match=message), running_engine(folder, **options):
        pass


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(DOWN), f"missing {DOWN}"),
        (lambda tensors: tensors.update(stray=torch.ones(2)), "unexpected stray"),
        (lambda tensors: tensors.update({DOWN: torch.ones(3, 5)}), rf"{DOWN} has shape \[3, 5\], not \[48, 80\]"),
    ],
    ids=["missing", "unexpected", "wrong shape"],
)
def test_weights_of_another_model_are_refused_by_name(change, message, tmp_path):
    save_random_model(CONFIGS["stablelm"], tmp_path)
    change_weights(tmp_path, change)
    with pytest.raises(ValueError, match=f"{tmp_path}: .*{message}.*same model"):
        load_ours(tmp_path)


def test_damaged_weights_are_refused_by_name(tmp_path):
    save_random_model(CONFIGS["stablelm"], tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or incomplete"):
        load_ours(tmp_path)


def test_loaded_model_does_not_change_with_its_file(tmp_path):
    save_random_model(CONFIGS["stablelm"], tmp_path)
    ours = load_ours(tmp_path)
    before = [parameter.clone() for parameter in ours.parameters()]
    weights = tmp_path / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(bytes(1000))
    assert all(torch.equal(*pair) for pair in zip(before, ours.parameters(), strict=True))


def test_loading_reports_its_progress_and_can_be_stopped(tmp_path):
    save_random_model(CONFIGS["olmoe"], tmp_path)
    fractions: list[float] = []
    load_ours(tmp_path, progress=fractions.append)
    assert fractions == sorted(fractions)
    assert len(fractions) > 10
    assert fractions[-1] == 1.0

    class Stopped(Exception):
        pass

    def stop(fraction):
        if fraction > 0.3:
            raise Stopped

    with pytest.raises(Stopped):
        load_ours(tmp_path, progress=stop)
