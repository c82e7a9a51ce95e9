"""Small models of every native architecture with random weights, made and saved by transformers."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM as HubModel
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.families.registry import read_architecture

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_DEFAULT_VOCABULARY = LlamaConfig(
    vocab_size=49152,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    bos_token_id=1,
    eos_token_id=2,
)
"""A model with the vocabulary of the default model, so that its tokenizer fits."""


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """Return the fields of a configuration that choose a rotary scaling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **parameters}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=2.0, original_max_position_embeddings=64)
LONGROPE = rope("longrope", short_factor=[1.0, 1.5, 2.0, 3.0], long_factor=[2.0, 3.0, 4.0, 6.0])
WINDOWED = {"use_sliding_window": True, "sliding_window": 9}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh"),
    "llama-linear": LlamaConfig(**SIZES, **rope("linear", factor=4.0)),
    "llama-dynamic": LlamaConfig(**SIZES, **rope("dynamic", factor=4.0)),
    "llama-llama3": LlamaConfig(**SIZES, **LLAMA3),
    "llama-yarn": LlamaConfig(**SIZES, **YARN),
    "llama-yarn-untruncated": LlamaConfig(
        **SIZES,
        **rope("yarn", factor=2.0, original_max_position_embeddings=64, truncate=False, attention_factor=0.8),
    ),
    "mistral-windowed": MistralConfig(**SIZES, sliding_window=9),
    "mistral-unwindowed": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-windowed": Qwen2Config(**SIZES, **WINDOWED, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3-windowed": Qwen3Config(**SIZES, **WINDOWED, layer_types=ALTERNATING),
    "gemma2": Gemma2Config(
        **SIZES,
        **TOKENS,
        sliding_window=9,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=12,
        layer_types=ALTERNATING,
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        **TOKENS,
        sliding_window=9,
        layer_types=ALTERNATING,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
        },
    ),
    "phi3": Phi3Config(**SIZES, **TOKENS, sliding_window=9),
    "phi3-partial": Phi3Config(**SIZES, **TOKENS, partial_rotary_factor=0.5, tie_word_embeddings=True),
    # For prompts longer than the original context, transformers uses the long factors too.
    "phi3-long": Phi3Config(**SIZES, **TOKENS, **LONGROPE, original_max_position_embeddings=20),
    "phi3-short": Phi3Config(**SIZES, **TOKENS, **LONGROPE, original_max_position_embeddings=128),
    "granite": GraniteConfig(
        **SIZES,
        **TOKENS,
        embedding_multiplier=3.0,
        attention_multiplier=0.5,
        residual_multiplier=0.7,
        logits_scaling=2.0,
    ),
    "olmo2": Olmo2Config(**SIZES, **TOKENS),
    "mixtral": MixtralConfig(**SIZES, **TOKENS, num_local_experts=4, sliding_window=9),
    "qwen2-moe": Qwen2MoeConfig(
        **SIZES,
        **TOKENS,
        **EXPERTS,
        shared_expert_intermediate_size=40,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=ALTERNATING,
    ),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **TOKENS, **EXPERTS),
    "qwen3-moe-normalized": Qwen3MoeConfig(**SIZES, **TOKENS, **EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
    "granite-moe": GraniteMoeConfig(
        **SIZES,
        **TOKENS,
        num_local_experts=6,
        embedding_multiplier=3.0,
        attention_multiplier=0.5,
        residual_multiplier=0.7,
        logits_scaling=2.0,
    ),
    "gpt2": GPT2Config(**GPT2_SIZES),
    "gpt2-scaled": GPT2Config(
        **GPT2_SIZES, n_inner=64, scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False
    ),
}
NATIVE = (
    "llama",
    "llama-llama3",
    "mistral-windowed",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "granite",
    "olmo2",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "granite-moe",
    "gpt2",
)
"""One configuration of each native architecture, and Llama with the rotary scaling of Llama 3.1."""

WHOLE_PROMPTS: dict[str, Any] = {
    "max_model_len": 128,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
}
"""Engine options under which every prompt is computed in one step, each time it is sent."""
PROMPT_LENGTHS = (40, 5, 33, 12, 1, 20, 27, 9, 100)
"""Lengths of prompts that do not fit together into a cache of `scarce_blocks`, even before any output token."""


def scarce_blocks(config: PreTrainedConfig, dtype_bytes: int = 4) -> dict[str, Any]:
    """Return engine options under which prompts are computed in small chunks and the cache runs out of blocks."""
    arch = read_architecture(config.to_dict())
    assert isinstance(arch, NativeArchitecture)
    return few_blocks(arch.kv_bytes_per_token(dtype_bytes))


def few_blocks(token_bytes: int) -> dict[str, Any]:
    """Return the options of `scarce_blocks` for a model whose KV cache takes `token_bytes` bytes per token."""
    block_size, num_blocks = 4, 44
    return {
        "max_model_len": 128,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
        "max_num_partial_prefills": 2,
        "block_size": block_size,
        "kv_cache_memory_bytes": (num_blocks + 1) * block_size * token_bytes,
    }


def save_random_model(config: PreTrainedConfig, folder: Path, **options: Any) -> PreTrainedModel:
    """Return a transformers model whose parameters are all random, norms and biases too; save it in `folder`."""
    torch.manual_seed(0)
    model = with_soft_cap(HubModel.from_config(config, dtype=torch.float32).eval())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    return model


def with_soft_cap(model: PreTrainedModel) -> PreTrainedModel:
    """Return `model`, with eager attention if its scores have a soft cap (Gemma 2).

    The default attention of some versions of transformers, among them 5.17, leaves out the cap.
    """
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    return model


def save_small_model(folder: Path, tokenizer_of: Path) -> PreTrainedModel:
    """Save a random model with the default model's vocabulary in `folder`, and the tokenizer from `tokenizer_of`.

    The output weights are scaled so that distributions are as peaked as a trained model's; the text is wild.
    """
    model = save_random_model(_DEFAULT_VOCABULARY, folder)
    with torch.no_grad():
        model.lm_head.weight *= 6
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, folder)
    return model


def save_config(config: PreTrainedConfig, folder: Path) -> Path:
    """Return `folder` with a configuration and no weights, for load_format="dummy"."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Return a prompt of random token ids for each of `lengths`, for the models above."""
    chance = random.Random(1)
    return [[chance.randrange(SIZES["vocab_size"]) for _ in range(length)] for length in lengths]
