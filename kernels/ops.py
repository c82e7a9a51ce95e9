"""The hot operations as models call them, and their contracts.

This module alone chooses the implementation, by the device and the dtypes of the tensors: Triton on a GPU if it is
installed, C++ kernels on a CPU where they exist, and otherwise plain torch (kernels/reference.py), which defines every
result. Paged attention is also chosen by configuration: `attention_backends.choose` selects a backend once, and
`core.models.attention.bind_attention` binds it to a model's layers instead of `paged_attention` here.

The C++ kernels are batch-invariant. All tensors of a call are on one device. Unless a contract says otherwise, results
are new tensors and inputs are left alone.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mp.kernels import reference, sampling
from vllm_mp.kernels.adapter_stack import AdapterStack, Factors
from vllm_mp.kernels.attention_metadata import AttentionMetadata
from vllm_mp.kernels.block_linear import TorchBlockExperts, TorchBlockLinear
from vllm_mp.kernels.block_weight import BLOCK_TYPES, BlockType, BlockWeight, quantize_blocks
from vllm_mp.kernels.cpu import attention as cpu_attention
from vllm_mp.kernels.cpu import block_linear as cpu_blocks
from vllm_mp.kernels.cpu import decoder as cpu_decoder
from vllm_mp.kernels.cpu import experts as cpu_experts
from vllm_mp.kernels.cpu import logits as cpu_logits
from vllm_mp.kernels.cpu.adapter_stack import PackedAdapterStack
from vllm_mp.kernels.cpu.block_linear import BlockLinear
from vllm_mp.kernels.cpu.decoder import DecoderOptions, FusedDecoder, LayerWeights
from vllm_mp.kernels.cpu.experts import ExpertBlocks, ExpertWeights, PackedExperts
from vllm_mp.kernels.cpu.library import DTYPES, library
from vllm_mp.kernels.cpu.packed import Arena, PackedLinear, can_pack
from vllm_mp.kernels.cpu.product import Product
from vllm_mp.kernels.reference import FLOAT8, FLOAT8_GROUP, QuantizedRows
from vllm_mp.kernels.sampling import NO_PLACE, SAMPLING_FILTERS, DrawParams, Logprobs, TokenMasks
from vllm_mp.kernels.step_columns import StepColumns
from vllm_mp.kernels.triton import available as triton

__all__ = [
    "ACTIVATIONS",
    "BLOCK_TYPES",
    "FLOAT8",
    "FLOAT8_GROUP",
    "NO_PLACE",
    "PRODUCT_SIZES",
    "SAMPLING_FILTERS",
    "SILU",
    "AdapterStack",
    "AnyAdapterStack",
    "AnyBlockExperts",
    "AnyBlockLinear",
    "AttentionMetadata",
    "BlockType",
    "BlockWeight",
    "DecoderOptions",
    "DrawParams",
    "ExpertBlocks",
    "ExpertWeights",
    "Factors",
    "FusedDecoder",
    "LayerWeights",
    "Logprobs",
    "PackedAdapterStack",
    "PackedExperts",
    "PackedLinear",
    "Product",
    "QuantizedRows",
    "StepColumns",
    "TokenMasks",
    "add_adapters",
    "add_rms_norm",
    "add_rms_norm_rows",
    "apply_token_masks",
    "argmax",
    "block_embedding",
    "block_experts",
    "block_linear",
    "can_fuse",
    "computes_blocks",
    "copy_step",
    "encoder_attention",
    "experts",
    "fill_awaited",
    "fuse_decoder",
    "gated_product",
    "gelu",
    "gelu_tanh",
    "layer_norm",
    "linear",
    "logprobs",
    "masked_argmax",
    "pack_experts",
    "pack_linear",
    "paged_attention",
    "prepare_embedding",
    "quantize_blocks",
    "quantize_rows",
    "rms_norm",
    "rotary",
    "rotary_write_kv",
    "sample",
    "set_batch_invariant",
    "silu_and_mul",
    "silu_and_mul_rows",
    "write_kv",
]


AnyAdapterStack = AdapterStack | PackedAdapterStack
"""Memory for the LoRA adapters of a projection, in the form that its product reads."""
AnyBlockLinear = BlockLinear | TorchBlockLinear
"""A product with weights in block types."""
AnyBlockExperts = PackedExperts | TorchBlockExperts
"""Experts with weights in block types."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square over the last dimension, times `weight` (Zhang & Sennrich 2019).

    `x` [..., dim], `weight` [dim] of the same dtype, or float32. The statistics are float32; the normalised value is
    rounded to `x.dtype` before the weight multiplies it, as transformers does, but a float32 weight multiplies it first
    (Gemma, OLMo 2).
    """
    normed: Tensor = _operations(x).rms_norm(x, weight, eps)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `(rms_norm(x + residual), x + residual)`, the sum rounded to `x.dtype`. Both inputs [..., dim]."""
    normed: tuple[Tensor, Tensor] = _operations(x).add_rms_norm(x, residual, weight, eps)
    return normed


def add_rms_norm_rows(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, num_groups: int
) -> tuple[QuantizedRows, Tensor]:
    """Return what `add_rms_norm` returns for `x` [n, dim], the norm quantized by `quantize_rows`."""
    normed: tuple[QuantizedRows, Tensor] = _operations(x).add_rms_norm_rows(x, residual, weight, eps, num_groups)
    return normed


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise layers over the last dimension (Ba et al. 2016): `x` [..., dim], `weight` and `bias` [dim]."""
    normed: Tensor = _operations(x).layer_norm(x, weight, bias, eps)
    return normed


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate by positions in the half-split (NeoX) layout (Su et al. 2021): return the rotated `(q, k)`.

    `q` [num_tokens, num_heads, head_dim], `k` [num_tokens, num_kv_heads, head_dim], `positions` int64
    [num_tokens], `cos_sin_cache` [max_position, rotary_dim] in the dtype of `q`: the cosines of the rotary_dim / 2
    frequencies, then the sines. The elements of a head after the first rotary_dim stay as they are. An implementation
    may rotate in place: use the result, not the inputs.
    """
    rotated: tuple[Tensor, Tensor] = _operations(q).rotary(q, k, positions, cos_sin_cache)
    return rotated


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cell_mapping: Tensor) -> None:
    """Store the keys and values of the new tokens in their cells of the caches, in place.

    `k` [num_tokens, num_kv_heads, head_dim], `v` [num_tokens, num_kv_heads, value_dim]; caches [num_blocks,
    block_size, num_kv_heads, head_dim or value_dim], contiguous, of the same dtype, or `FLOAT8` (rounded by
    `reference.to_float8`), or on a CPU int8 with more elements in a cell (`int8_cache.to_cells`). `cell_mapping` int64
    [num_tokens], distinct and in range; on a GPU a negative cell, as padding has, is not written.
    """
    operations = reference if k_cache.dtype == torch.int8 else _operations(k)
    operations.write_kv(k, v, k_cache, v_cache, cell_mapping)


def rotary_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cell_mapping: Tensor,
) -> Tensor:
    """Compute `rotary`, store the rotated keys and the values as `write_kv` does, and return the rotated queries."""
    operations = reference if k_cache.dtype == torch.int8 else _operations(q)
    rotated: Tensor = operations.rotary_write_kv(q, k, v, positions, cos_sin_cache, k_cache, v_cache, cell_mapping)
    return rotated


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attend causally from each row's query tokens to its whole context (PagedAttention, Kwon et al. 2023).

    `q` [num_tokens, num_heads, head_dim]; caches as in `write_kv`, with 8 bits converted to the dtype of `q` when
    read. The new tokens of all rows must be in the caches already, as a row may read cells that another row of the
    step wrote. Query head h reads KV head h // (num_heads / num_kv_heads). The query at position p sees the keys in
    (p - sliding_window, p], or with `metadata.attention_ends` those from p - sliding_window + 1 to its end there. With
    `soft_cap` the scaled scores become soft_cap * tanh(score / soft_cap) before
    the softmax (Gemma 2). Returns [num_tokens, num_heads, value_dim]; value_dim may differ from head_dim (DeepSeek's
    latent attention).

    A row reads only the cells of its context, so values that another request left in the cache (a NaN included)
    never reach it. Within a row, a mask does not stop a NaN, as a weight of zero times NaN is NaN. With
    `metadata.isolates`, a later token that is not finite does not affect a query.
    """
    if cpu_attention.can_attend(q, k_cache, v_cache) and (kernels := library()):
        return cpu_attention.attend(kernels, q, k_cache, v_cache, metadata, scale, sliding_window, soft_cap)
    operations = reference if k_cache.dtype == torch.int8 else _operations(q)
    attended: Tensor = operations.paged_attention(q, k_cache, v_cache, metadata, scale, sliding_window, soft_cap)
    return attended


def encoder_attention(q: Tensor, k: Tensor, v: Tensor, row_lens: Sequence[int], scale: float) -> Tensor:
    """Attend in both directions, from each token to all tokens of its row (Vaswani et al. 2017).

    `q`, `k`, `v` [num_tokens, num_heads, head_dim]; the rows are laid out consecutively, row i with `row_lens[i]`
    tokens. Returns [num_tokens, num_heads, head_dim]. A row reads no other row's tokens, so a NaN stays in its row.
    """
    return reference.encoder_attention(q, k, v, row_lens, scale)


def silu_and_mul(x: Tensor) -> Tensor:
    """Return SwiGLU's product (Shazeer 2020), `silu(x[..., :dim]) * x[..., dim:]`, for `x` [..., 2 * dim]."""
    product: Tensor = _operations(x).silu_and_mul(x)
    return product


def silu_and_mul_rows(x: Tensor, num_groups: int) -> QuantizedRows:
    """Return `silu_and_mul` of `x` [n, 2 * dim], quantized by `quantize_rows`."""
    product: QuantizedRows = _operations(x).silu_and_mul_rows(x, num_groups)
    return product


def gelu(x: Tensor) -> Tensor:
    """Return the Gaussian error linear unit by the exact error function (Hendrycks & Gimpel 2016), elementwise."""
    activated: Tensor = _operations(x).gelu(x)
    return activated


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU, with which GPT-2 was trained, elementwise."""
    activated: Tensor = _operations(x).gelu_tanh(x)
    return activated


def gated_product(x: Tensor, activation: str) -> Tensor:
    """Return `f(x[..., :dim]) * x[..., dim:]` for `x` [..., 2 * dim] and the function f = `ACTIVATIONS[activation]`."""
    if activation in SILU:
        return silu_and_mul(x)
    gate, up = x.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def experts(
    x: Tensor, expert_ids: Tensor, router_weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """Return, for each token, the weighted sum of the outputs of its experts (Shazeer et al. 2017).

    `x` [num_tokens, hidden]; `expert_ids` int64 [num_tokens, num_chosen], distinct for each token; `router_weights`
    float32 of the same shape; `gate_up` [num_experts, 2 * inner, hidden] and `down` [num_experts, hidden, inner]:
    expert e computes `gated_product(x @ gate_up[e].T, activation) @ down[e].T`. The sum is float32, and is rounded
    once.
    """
    activate = functools.partial(gated_product, activation=activation)
    total: Tensor = _operations(x).experts(x, expert_ids, router_weights, gate_up, down, activate)
    return total


PRODUCT_SIZES = (16, 64)
"""Numbers of rows up to each of which a GPU may multiply with other kernels."""
SILU = ("silu", "swish")
"""The names that a Hugging Face configuration gives the sigmoid linear unit."""
# Keyed by the name that a Hugging Face configuration gives the function.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
}


def apply_token_masks(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Set the logits of the tokens that a row's mask forbids to -inf, in place.

    `logits` float32, float16 or bfloat16 [n, vocab_size], contiguous; `masks` int32 [m, num_words], contiguous, with
    num_words >= ceil(vocab_size / 32): bit t % 32 of word t // 32 is set if token t is allowed. `rows` int64 [m],
    distinct and in range: mask i applies to row `rows[i]` of the logits. All other logits keep their bits.
    """
    if cpu_logits.can_read(logits) and (kernels := library()):
        cpu_logits.apply_token_masks(kernels, logits, masks, rows)
    else:
        _operations(logits).apply_token_masks(logits, masks, rows)


def argmax(scores: Tensor) -> Tensor:
    """See `kernels.sampling.argmax`."""
    if cpu_logits.can_read(scores) and (kernels := library()):
        return cpu_logits.argmax(kernels, scores)
    indices: Tensor = _operations(scores).argmax(scores)
    return indices


def masked_argmax(logits: Tensor, masks: TokenMasks | None) -> Tensor:
    """Return `argmax` of `logits` [n, vocab_size], of the tokens that `masks` allow; may overwrite `logits`."""
    if masks is not None:
        logits = logits.contiguous()
        apply_token_masks(logits, *masks)
    return argmax(logits)


def sample(logits: Tensor, params: DrawParams) -> Tensor:
    """See `kernels.sampling.sample`."""
    if cpu_logits.can_read(logits) and (kernels := library()):
        return cpu_logits.sample(kernels, logits, params)
    tokens: Tensor = _operations(logits).sample(logits, params)
    return tokens


def prepare_draws(logits: Tensor, params: DrawParams, tokens: Tensor) -> Callable[[Tensor], None] | None:
    """Return a call that writes `sample` of what is then in `logits` to `tokens`, int64 [n]; None without such a call.

    The call takes the random numbers, and does not read `params.uniform`. All tensors must outlive it.
    """
    if cpu_logits.can_read(logits) and (kernels := library()):
        return cpu_logits.prepare_draws(kernels, logits, params, tokens)
    return None


def logprobs(logits: Tensor, chosen: Tensor, count: int) -> Logprobs:
    """See `kernels.sampling.logprobs`. In the C++ kernels, the first of equally likely tokens come first."""
    if cpu_logits.can_read(logits) and (kernels := library()):
        return cpu_logits.logprobs(kernels, logits, chosen, count)
    return sampling.logprobs(logits, chosen, count)


def fill_awaited(input_ids: Tensor, latest: Tensor) -> None:
    """See `kernels.step_columns.fill_awaited`."""
    _operations(input_ids).fill_awaited(input_ids, latest)


def copy_step(step: StepColumns, buffers: StepColumns, num_decodes: int, latest: Tensor | None = None) -> None:
    """See `kernels.step_columns.copy_step`."""
    _operations(step.input_ids).copy_step(step, buffers, num_decodes, latest)


def quantize_rows(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Quantize the rows of `x` [n, inputs]: return `FLOAT8` [n, inputs], and the scales that restore them.

    The scales are float32 [n, num_groups]: one for each row or, for num_groups = ceil(inputs / 128), one for each
    group of 128 of its elements. They scale the highest magnitude of the group to 448. A row that is not finite gets a
    NaN.
    """
    quantized: tuple[Tensor, Tensor] = _operations(x).quantize_rows(x, num_groups)
    return quantized


def linear(
    x: Tensor | QuantizedRows, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """Return `x @ weight.T + bias` [..., outputs] in the dtype of `x` [..., inputs], with float32 sums.

    `weight` [outputs, inputs] of the same dtype; `bias` [outputs] or None. With `scale`, `weight` is `FLOAT8`,
    contiguous, and multiplied by it, and `x` is quantized by `quantize_rows`: `scale` float32 [outputs / r, groups]
    has a row for each r outputs, and a column for all inputs or, with groups = ceil(inputs / 128), for each 128; `x`
    gets as many scales per row. It can be captured in a CUDA graph.
    """
    product: Tensor = _operations(weight).linear(x, weight, bias, scale)
    return product


def add_adapters(
    out: Tensor, x: Tensor, adapter_slots: Tensor, a: Tensor, b: Tensor, part_sizes: Sequence[int]
) -> None:
    """Add to the product `out` of a projection, in place, what each token's LoRA adapter adds (Hu et al. 2021).

    `out` [num_tokens, outputs], contiguous; `x` [num_tokens, inputs], what the projection multiplied; `a` [num_slots,
    parts, max_rank, inputs] and `b` [num_slots, max_rank, outputs] as in `AdapterStack`; `part_sizes` the outputs of
    each part of the projection. A token whose int32 slot in `adapter_slots` [num_tokens] is s gets, in each part,
    `x @ a[s, part].T @ b[s]`; a token whose slot is -1 stays as it is. No token depends on another.

    The C++ kernels compute the same as a part of their products (`PackedLinear`, `fuse_decoder`).
    """
    _operations(out).add_adapters(out, x, adapter_slots, a, b, part_sizes)


def pack_linear(weight: Tensor, bias: Tensor | None, quantization: str | None = None) -> PackedLinear | None:
    """Copy `weight` [outputs, inputs] and `bias` into the form that the C++ product reads; None if torch computes it.

    With `quantization="int8"` the weights become 8-bit integers, and so do the rows of `x`, if their size allows.
    Raises ValueError if `quantization` is set and no kernel computes it.
    """
    kernels = library() if can_pack(weight) else None
    if kernels is None and quantization is not None:
        raise ValueError(
            f"quantization={quantization!r} needs the C++ kernels for CPUs, which are not built or do not take "
            f"a matrix {list(weight.shape)} of {weight.dtype} on {weight.device}; leave it out"
        )
    return None if kernels is None else PackedLinear(kernels, weight, bias, quantization)


def block_linear(
    parts: Sequence[BlockWeight], bias: Tensor | None, dtype: torch.dtype, *, is_kept: bool = False
) -> AnyBlockLinear:
    """Return the product with `parts`, one below another, and `bias` [outputs], for rows and results of `dtype`.

    The product keeps `parts` or a copy in another order; they must not change. `is_kept`: the caller keeps them too.
    """
    kernels = library() if cpu_blocks.can_read(parts, dtype) else None
    if kernels is None:
        return TorchBlockLinear(parts, bias, dtype)
    return BlockLinear(kernels, parts, bias, dtype, is_kept=is_kept)


def pack_experts(
    gate_up: Tensor, down: Tensor, activation: str, quantization: str | None = None
) -> PackedExperts | None:
    """Copy the weights of `experts` into the form that the C++ kernels read; None if torch computes them.

    With `quantization="int8"` weights and rows become 8-bit integers, as in `pack_linear`. Raises ValueError if
    `quantization` is set and no kernel computes these experts.
    """
    kernels = library() if cpu_experts.can_compute(gate_up, down, activation, gate_up.dtype) else None
    if kernels is None and quantization is not None:
        raise ValueError(
            f"quantization={quantization!r} needs the C++ kernels for CPUs, which are not built or do not take "
            f"experts {list(gate_up.shape)} of {gate_up.dtype} on {gate_up.device} with the activation "
            f"{activation!r}; leave it out"
        )
    return None if kernels is None else cpu_experts.pack(kernels, gate_up, down, activation, quantization, Arena())


def block_experts(gate_up: ExpertBlocks, down: ExpertBlocks, activation: str, dtype: torch.dtype) -> AnyBlockExperts:
    """Return `experts` for weights in block types, and for rows and results of `dtype`.

    The first half of the rows of `gate_up` is gate, the second half is up. The weights stay where they are, as in
    `block_linear`.
    """
    kernels = library() if cpu_experts.can_compute(gate_up, down, activation, dtype) else None
    if kernels is None:
        return TorchBlockExperts(gate_up, down, functools.partial(gated_product, activation=activation), dtype)
    return cpu_experts.from_blocks(kernels, gate_up, down, activation, dtype, Arena())


def computes_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether kernels compute with weights in block types where they lie, for rows of `dtype`."""
    return device.type == "cpu" and dtype in DTYPES and library() is not None


def set_batch_invariant(value: bool) -> None:
    """Say whether the products that a CPU makes from now on must give a row the same result in any number of rows."""
    if kernels := library():
        kernels.is_batch_invariant = value


def block_embedding(weight: BlockWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows `ids` of `weight`, dequantized, as `dtype` [*ids.shape, inputs]; `ids` int64, in range."""
    if cpu_blocks.can_read([weight], dtype) and (kernels := library()):
        return cpu_blocks.embedding(kernels, weight, ids, dtype)
    rows = BlockWeight(weight.data[ids.flatten()], weight.type, weight.inputs)
    return rows.dequantized().to(dtype).view(*ids.shape, -1)


def prepare_embedding(weight: Tensor | BlockWeight, ids: Tensor, out: Tensor) -> Callable[[], object] | None:
    """Return a call that writes the rows of `weight` that are then in `ids` to `out`; None if no kernel does that.

    `weight` is [n, inputs], `ids` int64 [rows], `out` [rows, inputs], contiguous. All must outlive the call.
    """
    if isinstance(weight, BlockWeight):
        kernels = library() if cpu_blocks.can_read([weight], out.dtype) else None
        return None if kernels is None else cpu_blocks.prepare_embedding(kernels, weight, ids, out)
    if weight.device.type != "cpu" or weight.dtype != out.dtype or not weight.is_contiguous():
        return None
    # A call of numpy is shorter than one of torch.
    bits = {2: torch.int16, 4: torch.int32}[out.itemsize]
    table, rows = weight.detach().view(bits).numpy(), out.view(bits).numpy()
    return functools.partial(table.take, ids.numpy(), 0, rows)


def can_fuse(layer: LayerWeights, options: DecoderOptions) -> bool:
    """Tell whether a kernel computes layers like `layer` in the decoder that `fuse_decoder` makes."""
    return library() is not None and cpu_decoder.can_fuse(layer, options)


def fuse_decoder(
    layers: Iterable[LayerWeights], norm: Tensor, options: DecoderOptions, quantization: str | None = None
) -> FusedDecoder:
    """Return a decoder that is computed by one call; `can_fuse` must allow all `layers`.

    Weights are copied, except those in block types, to which `quantization` does not apply. The shapes of the `layers`
    are the same, but layers with and without experts may follow each other. Each layer is taken from the iterator after
    the layer before it was copied. `norm` is the weight of the last norm.
    """
    kernels = library()
    assert kernels is not None
    return FusedDecoder(kernels, layers, norm, options, quantization)


def _operations(x: Tensor) -> Any:
    """Return the module whose functions compute operations on tensors like `x`."""
    return triton.operations(x.device.type) or reference
