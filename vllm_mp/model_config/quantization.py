"""Read the `quantization_config` of a checkpoint whose weights are 8-bit floats, or have 4 bits (AWQ, GPTQ)."""

import re
from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from vllm_mp.model_config.config_json import Config, choice, flag, shorten

Fp8Scales = Literal["channel", "tensor", "block"]
"""The weights of a projection, in float8_e4m3fn, that share a scale.

"channel": the weights of each output, quantized at load. "tensor": each matrix; "block": each tile of 128 outputs and
128 inputs of a matrix; both are quantized in the checkpoint.
"""
BlockSource = Literal["int4", "awq", "gptq", "gguf"]
"""What makes the weights of a model block types.

"int4": projections are rounded to 4 bits at load, embeddings and head to more. "awq", "gptq": projections have 4 bits
in the checkpoint, and those that it leaves in 16 bits are rounded to 8. "gguf": the file has block types.
"""
_BLOCK: Final = [128, 128]
_TEXT_PART: Final = re.compile(r"^(model\.)?language_model\.(model\.)?")
"""What the names of modules begin with in the text part of a model of texts and images."""
# The projections of a layer; all must be quantized.
_PROJECTIONS: Final = (
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


class FourBits(msgspec.Struct, frozen=True):
    """The layout of a checkpoint with 4 bits per weight."""

    method: Literal["awq", "gptq"]
    group_size: int
    """Inputs that share a scale; 0: all inputs of a matrix."""
    is_reordered: bool = False
    """True: a group may consist of any inputs (GPTQ's desc_act)."""
    zero_offset: int = 0
    """What is added to the stored zeros."""


def stated_quantization(config: Config) -> Any:
    """Return `quantization_config`, of the configuration or of its `text_config`; None or empty if there is none."""
    text = config.get("text_config")
    return config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)


def read_four_bits(architecture: str, config: Config, architectures: Sequence[str]) -> FourBits | None:
    """Return the layout of an AWQ or GPTQ checkpoint with these contents of `config.json`; None for another.

    `architectures` are those that may have such weights. Raises ValueError, naming the field, its value and what is
    allowed, for a layout that is not supported.
    """
    stated = stated_quantization(config)
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    if not isinstance(stated, dict) or method not in ("awq", "gptq"):
        return None
    if architecture not in architectures:
        raise ValueError(
            f"config field 'quantization_config' (quant_method {method!r}) is not supported for {architecture}; use "
            "the same model in float16, bfloat16 or float32"
        )
    if stated.get("is_marlin_format"):
        raise ValueError("config field 'is_marlin_format' is true; only GPTQ's own format is supported (false)")
    if stated.get("bits") != 4:
        raise ValueError(f"config field 'bits' is {shorten(stated.get('bits'))}; {method} is supported with 4")
    size = stated.get("group_size", 128)
    if size != -1 and (not isinstance(size, int) or size <= 0 or size % 32):
        raise ValueError(f"config field 'group_size' is {shorten(size)}; supported are multiples of 32, and -1")
    group_size = max(size, 0)
    if method == "awq":
        choice(stated, "version", "gemm", ("gemm", "GEMM"))
        return FourBits("awq", group_size)
    version = choice(stated, "checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    return FourBits("gptq", group_size, flag(stated, "desc_act", False), 1 if version == "gptq" else 0)


def read_fp8_scales(
    architecture: str, config: Config, fp8_architectures: Sequence[str], num_layers: int
) -> Fp8Scales | None:
    """Return the kind of scales of a checkpoint with these contents of `config.json`; None for plain floats.

    `fp8_architectures` are the architectures that may have 8-bit weights; the model has `num_layers`. Raises
    ValueError, naming the field, its value and what is allowed, for any other quantization.
    """
    stated = stated_quantization(config)
    if not stated:
        return None
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if method in ("awq", "gptq"):
        return None
    if method != "fp8" or not isinstance(stated, dict):
        raise ValueError(
            f"config field 'quantization_config' (quant_method {shorten(method)}) describes a quantized checkpoint; "
            "only quant_method 'fp8', 'awq' and 'gptq' are supported; use the same model in float16, bfloat16 or "
            "float32"
        )
    if architecture not in fp8_architectures:
        raise ValueError(
            "config field 'quantization_config' (quant_method 'fp8') is supported for "
            f"{', '.join(fp8_architectures)}, and not for {architecture}; use the same model in float16, bfloat16 or "
            "float32"
        )
    choice(stated, "fmt", "e4m3", ("e4m3",))
    # Static scales of activations are ignored: each token gets a scale of its own.
    choice(stated, "activation_scheme", "dynamic", ("dynamic", "static"))
    block = stated.get("weight_block_size")
    if block is not None and block != _BLOCK:
        raise ValueError(f"config field 'weight_block_size' is {shorten(block)}; supported are {_BLOCK} and null")
    for field in ("modules_to_not_convert", "ignored_layers"):
        _check_unconverted(field, stated.get(field) or [], num_layers)
    return "tensor" if block is None else "block"


def _check_unconverted(field: str, names: object, num_layers: int) -> None:
    """Raise ValueError for a list `names` of unquantized modules that names a projection of a layer."""
    if not isinstance(names, list):
        raise ValueError(f"config field '{field}' is {shorten(names)}; it must be a list of module names")
    for layer in range(num_layers):
        for projection in _PROJECTIONS:
            path = f".model.layers.{layer}.{projection}."
            for name in names:
                if f".{_TEXT_PART.sub('model.', str(name))}." in path:
                    raise ValueError(
                        f"config field '{field}' names {shorten(name)}, so that {path.strip('.')} would not be "
                        "quantized; all projections must be quantized (the vocabulary head, the embeddings and the "
                        "norms never are)"
                    )
