"""Reading `config.json`: both generations of its format, and refusals that name the field."""

from typing import Any

import msgspec
import pytest

from vllm_mp.model_config.architecture import Architecture, NativeArchitecture
from vllm_mp.model_config.families.registry import (
    NATIVE_ARCHITECTURES,
    architecture_name,
    decoder_without_head,
    read_architecture,
)
from vllm_mp.model_config.rope import Rope

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 100, "n_embd": 64, "n_layer": 3, "n_head": 4}


def read(base: dict[str, Any] = LLAMA, /, **changes: Any) -> Any:
    return read_architecture({**base, **changes})


def as_class(name: str, **changes: Any) -> Any:
    return read(architectures=[name], **changes)


def test_missing_fields_take_the_defaults_of_llama() -> None:
    arch = read()
    assert (arch.num_kv_heads, arch.head_dim, arch.max_position) == (4, 16, 2048)
    assert (arch.norm_eps, arch.activation, arch.tie_word_embeddings) == (1e-6, "silu", False)
    assert arch.rope == Rope(theta=10_000.0)
    assert arch.sliding_window == (None, None, None)
    assert arch.attention_scale == (0.25, 0.25, 0.25)
    assert arch.dtype is None


def test_both_generations_of_the_format_give_the_same_result() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }
    old = read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling}, torch_dtype="bfloat16")
    older = read(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}, torch_dtype="bfloat16")
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, dtype="bfloat16")
    assert old == older == new
    assert new.rope is not None
    assert new.rope.theta == 5e5
    assert new.dtype == "bfloat16"


def test_rope_scaling_null_means_no_scaling() -> None:
    assert read(rope_scaling=None, rope_theta=1e6).rope == Rope(theta=1e6)


def test_yarn_resolves_its_attention_factor_and_length() -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    arch = read(max_position_embeddings=100, rope_scaling=rope)
    assert arch.max_position == 400
    assert arch.rope is not None
    assert arch.rope.attention_factor == pytest.approx(1.1386294)
    deepseek = read(rope_scaling={**rope, "mscale": 0.7, "mscale_all_dim": 1.0}).rope
    assert deepseek is not None
    assert deepseek.attention_factor == pytest.approx((0.07 * 1.3862944 + 1) / (0.1 * 1.3862944 + 1))


def test_linear_rope_stretches_the_context_except_that_of_gemma_3() -> None:
    scaling = {"type": "linear", "factor": 2.5}
    assert read(max_position_embeddings=100, rope_scaling=scaling).max_position == 250
    other = {**OTHER, "vocab_size": 100, "hidden_size": 64, "max_position_embeddings": 100}
    assert read(other, rope_scaling=scaling).max_position == 250
    assert read(other, rope_scaling=scaling, model_type="gemma3_text").max_position == 100
    gemma = {**GEMMA, "max_position_embeddings": 100}
    assert (
        as_class("Gemma3ForCausalLM", **gemma, rope_scaling={"rope_type": "linear", "factor": 8.0}).max_position == 100
    )


def test_context_of_dynamic_rope_ends_where_stretching_would_begin() -> None:
    arch = read(max_position_embeddings=512, rope_scaling={"type": "dynamic", "factor": 4.0})
    assert arch.max_position == 512
    assert arch.rope == Rope(theta=10_000.0, type="dynamic")


def test_llama_bias_covers_output_and_qwen2_bias_does_not() -> None:
    llama = read(attention_bias=True)
    assert (llama.attention_bias, llama.attention_output_bias, llama.mlp_bias) == (True, True, False)
    qwen = as_class("Qwen2ForCausalLM", num_key_value_heads=2)
    assert (qwen.attention_bias, qwen.attention_output_bias) == (True, False)


@pytest.mark.parametrize(
    ("changes", "window"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 7}, 7)]
)
def test_mistral_has_the_window_of_its_field_or_4096(changes: dict[str, Any], window: int | None) -> None:
    arch = as_class("MistralForCausalLM", num_key_value_heads=2, **changes)
    assert arch.sliding_window == (window,) * 3


def test_ministral_has_windows_in_the_layers_that_its_file_names() -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    arch = as_class("MistralForCausalLM", num_key_value_heads=2, sliding_window=7, layer_types=types)
    assert arch.sliding_window == (None, 7, 7)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel"])
def test_decoder_whose_tokens_see_the_whole_text_is_refused_by_name(name: str) -> None:
    as_class(name, num_key_value_heads=2, n_embd=64, n_layer=2, n_head=4, is_causal=True)
    for changes in ({"is_causal": False}, {"text_config": {"is_causal": False}}, {"is_causal": None}):
        with pytest.raises(ValueError, match=r"^config field 'is_causal' is .*false; only causal attention"):
            as_class(name, num_key_value_heads=2, n_embd=64, n_layer=2, n_head=4, **changes)


def test_qwen_windows_follow_max_window_layers_and_layer_types() -> None:
    qwen: dict[str, Any] = {"num_key_value_heads": 2, "sliding_window": 8}
    assert as_class("Qwen2ForCausalLM", **qwen).sliding_window == (None, None, None)
    used = as_class("Qwen2ForCausalLM", use_sliding_window=True, max_window_layers=2, **qwen)
    assert used.sliding_window == (None, None, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    listed = as_class("Qwen3ForCausalLM", use_sliding_window=True, layer_types=types, **qwen)
    assert listed.sliding_window == (8, None, 8)


def test_qwen3_has_query_key_norms_and_a_head_size_of_128() -> None:
    arch = as_class("Qwen3ForCausalLM", num_key_value_heads=2)
    assert (arch.qk_norm, arch.head_dim, arch.attention_bias) == (True, 128, False)


def test_gpt2_reads_its_own_field_names() -> None:
    arch = read(GPT2, n_inner=None, scale_attn_by_inverse_layer_idx=True)
    assert (arch.hidden_size, arch.intermediate_size, arch.num_layers, arch.max_position) == (
        64,
        256,
        3,
        1024,
    )
    assert (arch.rope, arch.tie_word_embeddings, arch.activation) == (None, True, "gelu_new")
    assert arch.attention_scale == pytest.approx((1 / 4, 1 / 8, 1 / 12))
    assert [read(GPT2, **fields).norm_eps for fields in ({}, {"layer_norm_epsilon": 1e-3})] == [1e-5, 1e-3]


def test_kv_bytes_count_keys_and_values_of_all_layers() -> None:
    assert read(num_key_value_heads=2).kv_bytes_per_token(2) == 2 * 3 * 2 * 16 * 2


def test_architecture_is_derived_from_the_model_type() -> None:
    assert architecture_name({"model_type": "qwen3"}) == "Qwen3ForCausalLM"
    assert read(architectures=None) == read()


def test_configuration_without_an_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'model_type' 'mamba'.*config\.json"):
        read(architectures=[], model_type="mamba")
    with pytest.raises(ValueError, match=r"'model_type' \['llama'\]"):
        read(architectures="LlamaForCausalLM", model_type=["llama"])


OTHER = {"architectures": ["OtherForCausalLM"], "model_type": "other"}
SPELLINGS: list[dict[str, Any]] = [
    {"hidden_size": 64, "max_position_embeddings": 512},
    {"n_embd": 64, "n_positions": 512},
    {"d_model": 64, "max_seq_len": 512},
    {"hidden_size": 64, "seq_length": 512, "n_ctx": None},
    {"text_config": {"hidden_size": 64, "max_position_embeddings": 512, "vocab_size": 100}, "vocab_size": 7},
]


@pytest.mark.parametrize("fields", SPELLINGS)
def test_other_decoder_is_read_under_any_name_of_its_fields(
    fields: dict[str, Any],
) -> None:
    arch = read({**OTHER, "vocab_size": 100, "torch_dtype": "bfloat16"}, **fields)
    assert not isinstance(arch, NativeArchitecture)
    assert arch == Architecture(
        name="OtherForCausalLM", vocab_size=100, hidden_size=64, max_position=512, dtype="bfloat16"
    )


def test_yarn_stretches_the_context_of_any_architecture() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    sizes = {**OTHER, "vocab_size": 100, "hidden_size": 64, "max_position_embeddings": 100}
    assert read(sizes, rope_scaling=yarn).max_position == 400
    by_layer = {"sliding_attention": {"rope_type": "default"}, "full_attention": yarn}
    assert read(sizes, rope_parameters=by_layer).max_position == 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, r"'vocab_size' is None"),
        ({"hidden_size": None}, r"'hidden_size' is missing.*n_embd, d_model"),
        (
            {"max_position_embeddings": None},
            r"'max_position_embeddings' is missing.*n_positions.*; add it, the longest",
        ),
        ({"max_position_embeddings": "long"}, r"'max_position_embeddings' is 'long'"),
        ({"is_encoder_decoder": True}, r"'is_encoder_decoder' is true; only decoder-only"),
        ({"layer_types": ["full_attention", "linear_attention", "conv"]}, r"'layer_types' names .*conv.*linear_att"),
        ({"rope_scaling": {"type": "yarn"}}, r"'factor' is missing"),
    ],
)
def test_other_decoder_that_cannot_run_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    sizes = {**OTHER, "vocab_size": 100, "hidden_size": 64, "max_position_embeddings": 100}
    with pytest.raises(ValueError, match=f"'OtherForCausalLM' cannot run here: .*{message}") as caught:
        read(sizes, **changes)
    assert all(name in str(caught.value) for name in NATIVE_ARCHITECTURES)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "mpt", "attn_config": {"alibi": True}}, "ALiBi"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "falcon", "alibi": False}, "its attention in transformers is code of its own"),
        ({"model_type": "mamba", "state_size": 16}, "a state-space or recurrent model"),
    ],
)
def test_decoder_without_a_stated_context_is_refused_for_its_real_cause(fields: dict[str, Any], cause: str) -> None:
    with pytest.raises(ValueError, match=f"'OtherForCausalLM' cannot run here: .*{cause}") as caught:
        read({**OTHER, "vocab_size": 100, "hidden_size": 64, **fields})
    assert ("ALiBi" in str(caught.value)) == (cause == "ALiBi")


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"])
def test_missing_size_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=f"'{field}' is missing"):
        read_architecture({key: value for key, value in LLAMA.items() if key != field})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, r"'hidden_size' is '64'; it must be an integer"),
        ({"hidden_size": 66}, r"'hidden_size' is 66; .*num_attention_heads \(4\)"),
        ({"hidden_size": True}, r"'hidden_size' is True"),
        ({"num_hidden_layers": 0}, r"'num_hidden_layers' is 0; .*at least 1"),
        ({"num_key_value_heads": 3}, r"'num_key_value_heads' is 3; .*divide.*4"),
        ({"head_dim": 15}, r"'head_dim' is 15; .*even"),
        ({"rms_norm_eps": float("nan")}, r"'rms_norm_eps' is nan"),
        ({"attention_bias": "yes"}, r"'attention_bias' is 'yes'; it must be true or false"),
        (
            {"hidden_act": "xielu"},
            r"'hidden_act' is 'xielu'; native are silu.* transformers' module, .*'max_position_embeddings' is",
        ),
        ({"hidden_act": None}, r"'hidden_act' is None; supported are silu"),
        ({"torch_dtype": "float8_e4m3fn"}, r"'torch_dtype' is 'float8_e4m3fn'; supported are float32"),
        ({"rope_scaling": {"type": "mrope"}}, r"rope_scaling\.rope_type' is 'mrope'; native are default"),
        ({"rope_scaling": {"type": "longrope"}}, r"'rope_scaling\.short_factor' is None; it must list 8 numbers"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1, "x"] * 4}},
            r"'rope_scaling\.short_factor\[1\]' is 'x'; it must be a finite number above 0",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"'rope_scaling\.factor' is missing"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            r"'rope_scaling\.factor' is 0\.5; .*at least 1",
        ),
        ({"rope_scaling": [1]}, r"'rope_scaling' is \[1\]; it must be one flat object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, r"'rope_parameters'.*one flat object"),
        ({"partial_rotary_factor": 0.5}, r"'partial_rotary_factor' is 0\.5"),
    ],
)
def test_bad_field_is_refused_with_its_value_and_the_allowed_values(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "relu2"},
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "proportional"}},
    ],
)
def test_field_that_only_transformers_computes_leaves_the_model_to_its_module(changes: dict[str, Any]) -> None:
    arch = read(**changes, max_position_embeddings=128)
    assert not isinstance(arch, NativeArchitecture)
    assert (arch.name, arch.max_position) == ("LlamaForCausalLM", 128)
    assert arch.reason_not_native.startswith("config field '")
    quantized = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=r"config field '.*native"):
        read(**changes, max_position_embeddings=128, quantization_config=quantized)


@pytest.mark.parametrize("name", ["LlamaModel", "MistralModel", "Qwen2Model", "Gemma3TextModel", "Qwen3MoeModel"])
def test_decoder_without_a_head_is_its_architecture_without_a_head(name: str) -> None:
    sizes = {"num_key_value_heads": 2, "head_dim": 16}
    arch = as_class(name, **sizes)
    with_head = as_class(arch.name, **sizes)
    assert (with_head.has_head, arch.has_head) == (True, False)
    assert msgspec.structs.replace(arch, has_head=True) == with_head
    assert decoder_without_head(arch.name) == name


@pytest.mark.parametrize(
    ("name", "has_head"),
    [("PhiForCausalLM", True), ("OpenAIGPTLMHeadModel", True), ("ReformerModelWithLMHead", True), ("PhiModel", False)],
)
def test_name_of_another_decoder_says_whether_it_has_a_head(name: str, has_head: bool) -> None:
    assert as_class(name, max_position_embeddings=100).has_head is has_head


def test_gpt2_that_is_left_to_transformers_keeps_its_head() -> None:
    other = read({**GPT2, "n_positions": 64, "activation_function": "tanh"})
    assert (other.name, other.has_head) == ("GPT2LMHeadModel", True)
    assert "'activation_function' is 'tanh'" in other.reason_not_native


def test_windowed_layers_without_a_window_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'layer_types'.*'use_sliding_window'"):
        as_class("Qwen2ForCausalLM", num_key_value_heads=2, layer_types=["sliding_attention"] * 3)
    with pytest.raises(ValueError, match=r"'layer_types'.*3 entries"):
        as_class("Qwen2ForCausalLM", num_key_value_heads=2, layer_types=["full_attention"])


GEMMA: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}


def test_gemma_2_alternates_windows_and_caps_scores() -> None:
    arch = as_class("Gemma2ForCausalLM", **GEMMA, sliding_window=8, query_pre_attn_scalar=64)
    assert arch.sliding_window == (8, None, 8)
    assert (arch.attention_soft_cap, arch.logits_soft_cap) == (50.0, 30.0)
    assert arch.attention_scale == (0.125,) * 3
    assert (arch.norm_place, arch.norm_offset, arch.embedding_scale) == ("around", 1.0, 8.0)
    uncapped = as_class("Gemma2ForCausalLM", **GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (uncapped.attention_soft_cap, uncapped.logits_soft_cap) == (None, None)


def test_older_scaling_of_gemma_3_completes_its_rotary_parameters_as_in_transformers() -> None:
    given = {"full_attention": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}}
    arch = as_class("Gemma3ForCausalLM", **GEMMA, rope_parameters=given, rope_scaling={"factor": 8.0})
    assert arch.rope == Rope(type="linear", theta=7.0, factor=8.0)
    alone = as_class("Gemma3ForCausalLM", **GEMMA, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert alone.rope == Rope(type="linear", theta=1e6, factor=8.0)
    unnamed = as_class("Gemma3ForCausalLM", **GEMMA, rope_scaling={"type": "linear", "factor": 8.0})
    assert unnamed.rope == Rope(theta=1e6)


def test_gemma_3_ignores_the_cap_of_scores_of_gemma_2_as_transformers_does() -> None:
    arch = as_class("Gemma3ForCausalLM", **GEMMA, attn_logit_softcapping=50.0, final_logit_softcapping=20.0)
    assert (arch.attention_soft_cap, arch.logits_soft_cap) == (None, 20.0)


def test_both_generations_of_the_format_of_gemma_3_give_the_same_result() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = as_class(
        "Gemma3ForCausalLM",
        **GEMMA,
        sliding_window_pattern=2,
        rope_theta=5e5,
        rope_local_base_freq=1e3,
        rope_scaling=scaling,
    )
    new = as_class(
        "Gemma3ForCausalLM",
        **GEMMA,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {**scaling, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    )
    assert old == new
    assert (new.rope, new.local_rope) == (Rope(theta=5e5, type="linear", factor=8.0), Rope(theta=1e3))
    assert new.sliding_window == (4096, None, 4096)


def test_phi_3_reads_longrope_under_its_first_names_and_derives_its_attention_factor() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    phi = {"max_position_embeddings": 4096 * 32, "partial_rotary_factor": 0.5, "sliding_window": 2047}
    su, longrope = (
        as_class("Phi3ForCausalLM", **phi, rope_scaling={"type": kind, **factors}) for kind in ("su", "longrope")
    )
    assert su == longrope
    assert su.has_fused_projections
    assert su.sliding_window == (2047,) * 3
    assert su.rope is not None
    assert (su.rope.original_max_position, su.rope.rotary_dim(16)) == (4096, 8)
    assert su.rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": -1.0}, r"'attn_logit_softcapping' is -1\.0; .*above 0"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, r"'query_pre_attn_scalar' is 0; .*above 0"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, r"'layer_types' .*3 entries"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, r"'use_bidirectional_attention' is true"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, r"'sliding_window_pattern' is 0; .*at least 1"),
        ("Gemma3ForCausalLM", {"rope_parameters": [1]}, r"'rope_parameters' is \[1\]; .*each type of layer"),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
            r"'rope_parameters\.full_attention\.factor' is missing",
        ),
        ("Gemma3ForConditionalGeneration", {"text_config": [1]}, r"'text_config' is \[1\]; it must be an object"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.2}, r"partial_rotary_factor' is 0\.2; .*even number of the 16"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": "half"}, r"partial_rotary_factor' is 'half'; .*number above 0"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, r"'logits_scaling' is 0; it must be a finite number above 0"),
        ("Olmo2ForCausalLM", {"hidden_act": "xielu"}, r"'hidden_act' is 'xielu'; native are silu"),
    ],
)
def test_bad_field_of_a_family_is_refused_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    gemma = GEMMA if name.startswith("Gemma") else {}
    with pytest.raises(ValueError, match=message):
        as_class(name, **gemma, **changes)
