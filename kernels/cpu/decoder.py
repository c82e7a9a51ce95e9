"""The layers of a decoder of the Llama family as one call of the C++ kernels."""

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_void_p
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from vllm_mp.kernels.attention_metadata import AttentionMetadata
from vllm_mp.kernels.block_weight import BlockWeight
from vllm_mp.kernels.cpu.adapter_stack import PackedAdapterStack
from vllm_mp.kernels.cpu.attention import c_metadata
from vllm_mp.kernels.cpu.block_linear import BlockLinear, can_read
from vllm_mp.kernels.cpu.experts import ExpertWeights, can_compute, from_blocks, pack
from vllm_mp.kernels.cpu.library import (
    GATE_ACTIVATIONS,
    CBlockDecoderLayer,
    CDecoder,
    CDecoderLayer,
    CHeads,
    CLayerAdapters,
    CRotaryTables,
    CRouter,
    Library,
    address,
)
from vllm_mp.kernels.cpu.packed import Arena, PackedLinear, can_pack

WORK_A_CALL = 2e9
"""The most multiplications in a call that computes several layers: a few milliseconds of work."""
_GATE_UP: Final = 2
"""The index of gate and up among a layer's projections."""
_LEAST_ROWS: Final = 16
"""Fewer tokens take as long as this many, because reading the weights takes longer than multiplying them."""


Projection = tuple[Tensor | Sequence[BlockWeight], Tensor | None]
"""A weight [out, in], or parts of it one below another, and a bias [out] or None."""


class LayerWeights(NamedTuple):
    """The weights and shapes of a decoder layer, all of whose projections have either tensors or block types.

    The weights of norms are None where there is no norm, and of one dtype; see `ops.rms_norm`. With `experts`,
    `gate_up_proj` and `down_proj` are those of the expert that all tokens share, or None.
    """

    input_norm: Tensor | None
    attention_output_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp_output_norm: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv_proj: Projection
    o_proj: Projection
    gate_up_proj: Projection | None
    down_proj: Projection | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None = None
    table: int = 0
    """The index of the layer's table of rotary angles."""
    has_fused_parts: bool = False
    """True: an adapter changes q, k and v as one part, and so gate and up."""
    experts: ExpertWeights | None = None


class DecoderOptions(NamedTuple):
    """The computation that all layers of a decoder share."""

    dtype: torch.dtype
    eps: float
    activation: str = "silu"
    """A key of `GATE_ACTIVATIONS`."""
    residual_multiplier: float = 1.0
    norms_all_heads: bool = False
    """True: the norms of queries and of keys run over all heads of a token, not over each."""
    rotates_pairs: bool = False
    """True: rotary embedding rotates neighbouring elements of a head instead of elements half a head apart."""
    has_norm: bool = True
    """False: the result is the residual stream after the layers, and the last norm is not used."""


class FusedDecoder(nn.Module):
    """The layers and the last norm of a decoder, computed by the C++ kernels; has the interface of `llama.Decoder`."""

    def __init__(
        self,
        library: Library,
        layers: Iterable[LayerWeights],
        norm: Tensor,
        options: DecoderOptions,
        quantization: str | None,
    ) -> None:
        """Copy the weights, except parts in block types that stay; see `ops.fuse_decoder`."""
        super().__init__()
        self._kept: list[Any] = []
        """Owners of memory that `_interfaces` points to."""
        arena = Arena()
        self._projections: list[list[PackedLinear | BlockLinear]] = []
        """Those of each layer that adapters can change: qkv, o and, in layers without experts, gate and up, down."""
        self._part_sizes: list[list[Sequence[int]]] = []
        self._layer_weights = 0
        """The greatest number of weights with which a layer multiplies a token."""
        interfaces: list[Any] = [self._packed(library, layer, options, quantization, arena) for layer in layers]
        self._norm = _in_float32(norm if options.has_norm else torch.ones_like(norm))
        self._has_norm = options.has_norm
        self._interfaces = (type(interfaces[0]) * len(interfaces))(*interfaces)
        decoder = ctypes.byref(
            CDecoder(
                ctypes.addressof(self._interfaces),
                len(interfaces),
                self._norm.data_ptr(),
                options.eps,
                options.residual_multiplier,
                int(norm.dtype == options.dtype),
                int(options.norms_all_heads),
                GATE_ACTIVATIONS[options.activation],
                int(options.rotates_pairs),
            )
        )
        self._adapter_stacks: list[PackedAdapterStack] = []
        self._adapters: Any = None
        """The `CLayerAdapters` of each layer; None if no adapter can be loaded."""
        self._known_first: Callable[[], Tensor | None] = lambda: None
        self._known_last: Callable[[], Tensor | None] = lambda: None
        self._addresses: tuple[Any, Any] = (None, None)
        """See `_addresses_of`. The caches themselves are not kept: a sleep releases their memory."""
        self._rotary: tuple[Tensor, Any] | None = None
        """The tables of rotary angles, and the reference to them for the kernels."""
        has_blocks = isinstance(interfaces[0], CBlockDecoderLayer)
        run = library.function("block_decoder" if has_blocks else "decoder", options.dtype)
        self.layers = nn.ModuleList(_LayersFrom(run, decoder, first) for first in range(len(interfaces)))
        self._layers_from = list(self.layers)  # is read faster

    def _packed(
        self, library: Library, layer: LayerWeights, options: DecoderOptions, quantization: str | None, arena: Arena
    ) -> CDecoderLayer | CBlockDecoderLayer:
        projections = [
            _product(
                library,
                projection,
                options.dtype,
                quantization,
                arena,
                is_pair=i == _GATE_UP,
                is_of_experts=i >= _GATE_UP and layer.experts is not None,
            )
            for i, projection in enumerate(_projections(layer))
        ]
        norms = [None if norm is None else _in_float32(norm) for norm in layer[:6]]
        part_sizes = _part_sizes(layer)
        self._projections.append(projections[: len(part_sizes)])
        self._part_sizes.append(part_sizes)
        self._kept += [*norms, *projections]
        experts = None
        if layer.experts is not None:
            experts = _RoutedExperts(library, layer.experts, options, quantization, arena)
            self._kept.append(experts)
        products = [part.interface for part in projections]
        num_weights = sum(product.inputs * product.outputs for product in products)
        self._layer_weights = max(self._layer_weights, num_weights + (experts.num_weights if experts else 0))
        inner = 0
        if layer.down_proj is None:
            products += [type(products[0])() for _ in range(2)]
        else:
            inner = products[-1].inputs
        heads = CHeads(
            queries=layer.num_heads,
            keys=layer.num_kv_heads,
            key_dim=layer.head_dim,
            value_dim=layer.head_dim,
            window=layer.window or 0,
            scale=layer.scale,
            soft_cap=layer.soft_cap or 0.0,
        )
        kind = CBlockDecoderLayer if isinstance(projections[0], BlockLinear) else CDecoderLayer
        return kind(
            *(None if norm is None else norm.data_ptr() for norm in norms),
            *products,
            heads,
            inner,
            layer.table,
            *(experts.addresses if experts else (None, None)),
        )

    def make_adapter_stacks(self, num_slots: int, max_rank: int) -> list[PackedAdapterStack]:
        """Return memory for the adapters of every projection of `_projections`, layer by layer."""
        layers = [
            [
                projection.adapter_stack(sizes, num_slots, max_rank)
                for projection, sizes in zip(projections, part_sizes, strict=True)
            ]
            for projections, part_sizes in zip(self._projections, self._part_sizes, strict=True)
        ]
        pointers = (CLayerAdapters(*(stack.pointer for stack in stacks)) for stacks in layers)
        self._adapters = (CLayerAdapters * len(layers))(*pointers)
        self._adapter_stacks = [stack for stacks in layers for stack in stacks]
        return self._adapter_stacks

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Overwrite the embeddings `x` [num_tokens, hidden_size] with the normed hidden states, and return it.

        Without the last norm, `x` becomes the residual stream after the layers.

        `cos_sin` is [num_tables, max_position, rotary_dim], contiguous.
        """
        normed = x if self._has_norm else torch.empty_like(x)
        for call in self.prepare(x, normed, positions, cos_sin, kv_caches, metadata):
            call()
        return x

    def prepare(
        self,
        x: Tensor,
        normed: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> list[Callable[[], None]]:
        """Return calls that do what `forward` does with what is then in these tensors, which must outlive them.

        The normed hidden states are written to `normed`, which may be `x`.
        """
        rotary = self._rotary
        if rotary is None or rotary[0] is not cos_sin:
            tables = ctypes.byref(CRotaryTables(cos_sin.data_ptr(), cos_sin.stride(0), cos_sin.shape[2]))
            rotary = self._rotary = cos_sin, tables
        num_layers = len(self._interfaces)
        arguments = (
            ctypes.byref(c_metadata(metadata, kv_caches[0][0])),
            x.data_ptr(),
            positions.data_ptr(),
            rotary[1],
            *self._addresses_of(kv_caches),
            normed.data_ptr(),
            torch.get_num_threads(),
            None if metadata.adapter_slots is None else self._adapters,
            address(metadata.adapter_slots),
        )
        # Each call chooses its number of threads again, so a long step is cut into several calls.
        layers_per_call = max(1, int(WORK_A_CALL / (self._layer_weights * max(_LEAST_ROWS, len(positions)))))
        return [
            functools.partial(self._layers_from[first], min(num_layers, first + layers_per_call), *arguments)
            for first in range(0, num_layers, layers_per_call)
        ]

    def _addresses_of(self, kv_caches: Sequence[tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
        """Return the addresses of the keys and of the values; asked for once, as the caches are allocated together."""
        first, last = kv_caches[0][0], kv_caches[-1][1]
        if self._known_first() is not first or self._known_last() is not last:
            addresses = c_void_p * len(kv_caches)
            self._addresses = (
                addresses(*[keys.data_ptr() for keys, _ in kv_caches]),
                addresses(*[values.data_ptr() for _, values in kv_caches]),
            )
            self._known_first, self._known_last = weakref.ref(first), weakref.ref(last)
        return self._addresses


def _projections(layer: LayerWeights) -> list[Projection]:
    """Return qkv, o and, if the layer has them, gate and up, down."""
    projections = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
    return [projection for projection in projections if projection is not None]


def _product(
    library: Library,
    projection: Projection,
    dtype: torch.dtype,
    quantization: str | None,
    arena: Arena,
    *,
    is_pair: bool,
    is_of_experts: bool,
) -> PackedLinear | BlockLinear:
    weight, bias = projection
    if isinstance(weight, Tensor):
        return PackedLinear(library, weight, bias, quantization, is_pair=is_pair, arena=arena)
    return BlockLinear(library, weight, bias, dtype, is_pair=is_pair, is_of_experts=is_of_experts, arena=arena)


class _RoutedExperts:
    """The experts of a layer and their router, whose product gives the gate of the shared expert too."""

    def __init__(
        self,
        library: Library,
        weights: ExpertWeights,
        options: DecoderOptions,
        quantization: str | None,
        arena: Arena,
    ) -> None:
        gate_up, down, activation = weights.gate_up, weights.down, options.activation
        if isinstance(gate_up, Tensor):
            assert isinstance(down, Tensor)
            self._experts = pack(library, gate_up, down, activation, quantization, arena)
        else:
            assert not isinstance(down, Tensor)
            self._experts = from_blocks(library, gate_up, down, activation, options.dtype, arena)
        scores = weights.router
        if weights.shared_gate is not None:
            scores = torch.cat([scores, weights.shared_gate])
        self._scores = PackedLinear(library, scores, None, arena=arena)
        self._router = CRouter(
            self._scores.interface, weights.num_chosen, int(weights.normalizes_weights), int(weights.rounds_weights)
        )
        self.addresses = (ctypes.addressof(self._experts.interface), ctypes.addressof(self._router))
        self.num_weights = weights.num_chosen * self._experts.num_weights
        """The number of weights of the experts with which a token is multiplied."""


def _part_sizes(layer: LayerWeights) -> list[Sequence[int]]:
    """Return the number of outputs of each part of the projections that adapters can change."""
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    parts: list[list[int]] = [[queries, keys, keys], [_outputs(layer.o_proj)]]
    if layer.experts is None:
        assert layer.gate_up_proj is not None
        assert layer.down_proj is not None
        parts += [[_outputs(layer.gate_up_proj) // 2] * 2, [_outputs(layer.down_proj)]]
    return [[sum(sizes)] if layer.has_fused_parts else sizes for sizes in parts]


def _in_float32(norm: Tensor) -> Tensor:
    """Return a copy of the weight of a norm."""
    return norm.detach().to(torch.float32, copy=True)


def _outputs(projection: Projection) -> int:
    weight = projection[0]
    return len(weight) if isinstance(weight, Tensor) else sum(part.outputs for part in weight)


class _LayersFrom(nn.Module):
    """Layer `first` of a decoder and the layers after it; a module, so that forward hooks see the layers begin."""

    def __init__(self, run: Any, decoder: Any, first: int) -> None:
        super().__init__()
        self._run = run
        self._decoder = decoder
        self._first = first

    def __call__(self, end: int, *arguments: Any) -> None:
        """Compute the layers from `first` up to but without `end`, after the hooks that precede `forward`.

        Between two calls of the kernels nothing is left in the processor's caches, so torch's own way to the hooks,
        which has many more branches, takes several times longer.
        """
        for hook in self._forward_pre_hooks.values():
            hook(self, ())
        self._run(self._decoder, self._first, end, *arguments)


def can_fuse(weights: LayerWeights, options: DecoderOptions) -> bool:
    """Tell whether the kernels can compute a layer with these weights and options."""
    experts = weights.experts
    return (
        options.activation in GATE_ACTIVATIONS
        and weights.head_dim % 2 == 0
        and all(
            can_pack(weight) if isinstance(weight, Tensor) else can_read(weight, options.dtype)
            for weight, _ in _projections(weights)
        )
        and (experts is None or can_compute(experts.gate_up, experts.down, options.activation, options.dtype))
    )
