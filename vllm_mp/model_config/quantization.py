"""Weights in 8-bit floats: what the `quantization_config` of a checkpoint says of them."""

from typing import Final, Literal

from vllm_mp.model_config.config_json import Config, choice, integer, shorten

Fp8Scales = Literal["channel", "tensor", "block"]
"""What the weights of the projections, kept in float8_e4m3fn, have scales for.

"channel": each output; they are made so at load. In the checkpoint they are so already with "tensor": each matrix, or
"block": each 128 outputs and 128 inputs of a matrix.
"""
FP8_ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Those whose models may have such weights."""

_BLOCK: Final = [128, 128]
_PROJECTIONS: Final = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def read_fp8_scales(architecture: str, config: Config) -> Fp8Scales | None:
    """The scales of a checkpoint with the `config.json` in `config`; None where its weights are plain floats.

    Raises ValueError, naming the field, its value and what is allowed, for any other quantization.
    """
    stated = config.get("quantization_config")
    if not stated:
        return None
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if method != "fp8" or not isinstance(stated, dict):
        raise ValueError(
            f"config field 'quantization_config' (quant_method {shorten(method)}) describes a quantized checkpoint, "
            "of which only quant_method 'fp8' is supported; use the same model in float16, bfloat16 or float32"
        )
    if architecture not in FP8_ARCHITECTURES:
        raise ValueError(
            "config field 'quantization_config' (quant_method 'fp8') is supported for "
            f"{', '.join(FP8_ARCHITECTURES)}, and not for {architecture}; use the same model in float16, bfloat16 or "
            "float32"
        )
    choice(stated, "fmt", "e4m3", ("e4m3",))
    # Scales of activations that were fixed beforehand give way to those of the tokens themselves.
    choice(stated, "activation_scheme", "dynamic", ("dynamic", "static"))
    block = stated.get("weight_block_size")
    if block is not None and block != _BLOCK:
        raise ValueError(f"config field 'weight_block_size' is {shorten(block)}; supported are {_BLOCK} and null")
    for field in ("modules_to_not_convert", "ignored_layers"):
        _check_unconverted(field, stated.get(field) or [], integer(config, "num_hidden_layers"))
    return "tensor" if block is None else "block"


def _check_unconverted(field: str, names: object, num_layers: int) -> None:
    """The modules that are not quantized may be any but the projections of the layers."""
    if not isinstance(names, list):
        raise ValueError(f"config field '{field}' is {shorten(names)}; it must be a list of names of modules")
    for layer in range(num_layers):
        for projection in _PROJECTIONS:
            path = f".model.layers.{layer}.{projection}."
            for name in names:
                if f".{name}." in path:
                    raise ValueError(
                        f"config field '{field}' names {shorten(name)}, so that {path.strip('.')} would not be "
                        "quantized; supported are checkpoints with all projections quantized (the vocabulary head, "
                        "embeddings and norms never are)"
                    )
