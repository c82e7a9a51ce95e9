"""All operations that Triton computes, under their names in kernels/ops.py."""

from vllm_mp.kernels.reference import experts
from vllm_mp.kernels.triton.activations import gelu, gelu_tanh, silu_and_mul, silu_and_mul_rows
from vllm_mp.kernels.triton.attention.backend import paged_attention
from vllm_mp.kernels.triton.float8 import quantize_rows
from vllm_mp.kernels.triton.linear import linear
from vllm_mp.kernels.triton.lora import add_adapters
from vllm_mp.kernels.triton.norms import add_rms_norm, add_rms_norm_rows, layer_norm, rms_norm
from vllm_mp.kernels.triton.rotary import rotary, rotary_write_kv, write_kv
from vllm_mp.kernels.triton.sampling import argmax, sample
from vllm_mp.kernels.triton.step import copy_step, fill_awaited
from vllm_mp.kernels.triton.token_masks import apply_token_masks

__all__ = [
    "add_adapters",
    "add_rms_norm",
    "add_rms_norm_rows",
    "apply_token_masks",
    "argmax",
    "copy_step",
    "experts",
    "fill_awaited",
    "gelu",
    "gelu_tanh",
    "layer_norm",
    "linear",
    "paged_attention",
    "quantize_rows",
    "rms_norm",
    "rotary",
    "rotary_write_kv",
    "sample",
    "silu_and_mul",
    "silu_and_mul_rows",
    "write_kv",
]
