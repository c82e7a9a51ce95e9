"""Read the `config.json` of mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE and Granite-MoE.

A field that a configuration leaves out takes the default of the transformers class that would have read it.
"""

from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.config_json import Config, flag, integer, optional_integer, with_own_names
from vllm_mp.model_config.experts import read_experts
from vllm_mp.model_config.families.llama import has_windows, layer_types, llama_family, read_granite


def read_mixtral(name: str, config: Config) -> NativeArchitecture:
    config = with_own_names(config, {"num_experts": "num_local_experts"})
    layers = integer(config, "num_hidden_layers")
    window = optional_integer(config, "sliding_window", None)
    return llama_family(
        name,
        {"rope_theta": 1_000_000.0, **config},
        max_position=131_072,
        num_kv_heads=8,
        norm_eps=1e-5,
        sliding_window=(window,) * layers,
        experts=read_experts(
            config,
            "num_local_experts",
            8,
            2,
            intermediate_size=integer(config, "intermediate_size"),
            rounds_weights=False,
        ),
    )


def read_qwen2_moe(name: str, config: Config) -> NativeArchitecture:
    layers = integer(config, "num_hidden_layers")
    window = None
    if flag(config, "use_sliding_window", False):
        window = optional_integer(config, "sliding_window", 4096)
    types = layer_types(config, layers)
    if types is None:
        most = integer(config, "max_window_layers", 28, minimum=0)
        windowed = [layer % 2 == 0 and layer < most for layer in range(layers)]
    else:
        windowed = has_windows(types, window)
    return llama_family(
        name,
        config,
        max_position=32_768,
        num_kv_heads=16,
        attention_bias=flag(config, "qkv_bias", True),
        sliding_window=tuple(window if has_window else None for has_window in windowed),
        experts=read_experts(
            config,
            "num_experts",
            60,
            4,
            has_dense_layers=True,
            intermediate_size=integer(config, "moe_intermediate_size", 1408),
            shared_intermediate_size=integer(config, "shared_expert_intermediate_size", 5632),
            normalizes_weights=flag(config, "norm_topk_prob", False),
        ),
    )


def read_qwen3_moe(name: str, config: Config) -> NativeArchitecture:
    config = with_own_names(config, {"num_local_experts": "num_experts"})
    layers = integer(config, "num_hidden_layers")
    bias = flag(config, "attention_bias", False)
    window = None
    if flag(config, "use_sliding_window", False):
        window = optional_integer(config, "sliding_window", 4096)
    return llama_family(
        name,
        config,
        max_position=32_768,
        num_kv_heads=4,
        attention_bias=bias,
        attention_output_bias=bias,
        qk_norm=True,
        sliding_window=(window,) * layers,
        experts=read_experts(
            config,
            "num_experts",
            128,
            8,
            has_dense_layers=True,
            intermediate_size=integer(config, "moe_intermediate_size", 768),
            normalizes_weights=flag(config, "norm_topk_prob", False),
        ),
    )


def read_granite_moe(name: str, config: Config) -> NativeArchitecture:
    experts = read_experts(config, "num_local_experts", 8, 2, intermediate_size=integer(config, "intermediate_size"))
    return read_granite(name, config, experts=experts)
