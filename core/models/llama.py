"""The Llama family: Llama, SmolLM, Mistral, Qwen2 and Qwen3 (Touvron et al. 2023 and descendants).

One decoder for all; its members differ by fields of `NativeArchitecture`: biases, query/key norms, windows, scaling.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mp.core.models.attention import AttentionLayer
from vllm_mp.core.models.checkpoint import FLOAT_DTYPES, CheckpointMismatchError, Destination, load_checkpoint
from vllm_mp.core.models.linear import Linear, VocabularyHead, make_adapter_stacks, pack_projections
from vllm_mp.core.models.rotary import cos_sin_cache
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import AttentionMetadata
from vllm_mp.model_config.architecture import NativeArchitecture


class Attention(AttentionLayer):
    """Grouped-query self-attention over the paged cache, with q, k and v in one projection."""

    def __init__(self, arch: NativeArchitecture, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
        self.head_dim = arch.head_dim
        self.eps = arch.norm_eps
        self.scale = arch.attention_scale[layer]
        self.window = arch.sliding_window[layer]
        self.kv_scales = [1.0, 1.0]
        """Scales of the keys and of the values; a cache of 8-bit floats holds each divided by its scale."""
        sizes = [heads * arch.head_dim for heads in self.heads]
        self.qkv_proj = Linear(arch.hidden_size, sizes, arch.attention_bias, dtype, device, arch.fp8)
        self.o_proj = Linear(sizes[0], arch.hidden_size, arch.attention_output_bias, dtype, device, arch.fp8)
        self.qk_norm = arch.qk_norm
        if arch.qk_norm:
            self.q_norm = nn.Parameter(torch.empty(arch.head_dim, dtype=dtype, device=device))
            self.k_norm = nn.Parameter(torch.empty(arch.head_dim, dtype=dtype, device=device))

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        slots = metadata.adapter_slots
        q, k, v = self.qkv_proj(x, slots).view(x.shape[0], -1, self.head_dim).split(self.heads, 1)
        if self.qk_norm:
            q = ops.rms_norm(q, self.q_norm, self.eps)
            k = ops.rms_norm(k, self.k_norm, self.eps)
        k_scale, v_scale = self.kv_scales if kv_cache[0].dtype == ops.FLOAT8 else (1.0, 1.0)
        # Rotating keys commutes with scaling them.
        k, v = (k if k_scale == 1.0 else k / k_scale), (v if v_scale == 1.0 else v / v_scale)
        q = ops.rotary_write_kv(q, k, v, positions, cos_sin, *kv_cache, metadata.cell_mapping)
        attended = self.attend(q, *kv_cache, metadata, self.scale * k_scale, self.window)
        if v_scale != 1.0:
            attended = attended * v_scale
        out: Tensor = self.o_proj(attended.reshape(x.shape[0], -1), slots)
        return out

    def kv_scale(self, part: int) -> Destination:
        """Return the destination of a checkpoint's optional scale of keys (`part` 0) or values (1)."""

        def keep(tensor: Tensor) -> None:
            scale = float(tensor)
            if not 0.0 < scale < math.inf:
                raise CheckpointMismatchError(
                    f"a layer's scale of keys or values is {scale}; it must be finite and above 0"
                )
            self.kv_scales[part] = scale

        return Destination([[], [1]], FLOAT_DTYPES, keep, is_required=False)


class MLP(nn.Module):
    """The gated feed-forward network, with gate and up in one projection."""

    def __init__(self, arch: NativeArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        inner, hidden = arch.intermediate_size, arch.hidden_size
        self.gate_up_proj = Linear(hidden, [inner, inner], arch.mlp_bias, dtype, device, arch.fp8)
        self.down_proj = Linear(inner, hidden, arch.mlp_bias, dtype, device, arch.fp8)
        self.activation = None if arch.activation in ("silu", "swish") else ops.ACTIVATIONS[arch.activation]

    def forward(self, x: Tensor, adapter_slots: Tensor | None = None) -> Tensor:
        gate_up = self.gate_up_proj(x, adapter_slots)
        if self.activation is None:
            product = ops.silu_and_mul(gate_up)
        else:
            gate, up = gate_up.chunk(2, -1)
            product = self.activation(gate) * up
        out: Tensor = self.down_proj(product, adapter_slots)
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, arch: NativeArchitecture, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = arch.norm_eps
        self.input_norm = nn.Parameter(torch.empty(arch.hidden_size, dtype=dtype, device=device))
        self.post_attention_norm = nn.Parameter(torch.empty(arch.hidden_size, dtype=dtype, device=device))
        self.attention = Attention(arch, layer, dtype, device)
        self.mlp = MLP(arch, dtype, device)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Return the next `(x, residual)`; `x` is the output of the layer before, not yet added to `residual`."""
        if residual is None:
            x, residual = ops.rms_norm(x, self.input_norm, self.eps), x
        else:
            x, residual = ops.add_rms_norm(x, residual, self.input_norm, self.eps)
        x = self.attention(x, positions, cos_sin, kv_cache, metadata)
        x, residual = ops.add_rms_norm(x, residual, self.post_attention_norm, self.eps)
        return self.mlp(x, metadata.adapter_slots), residual

    def projections(self) -> list[Linear]:
        """Return the projections in the order of `core.lora.targets.projections`."""
        return [self.attention.qkv_proj, self.attention.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj]

    def weights(self) -> ops.LayerWeights:
        """Return the weights and shapes of this layer, for `ops.fuse_decoder`."""
        attention, mlp = self.attention, self.mlp
        return ops.LayerWeights(
            input_norm=self.input_norm,
            post_attention_norm=self.post_attention_norm,
            q_norm=attention.q_norm if attention.qk_norm else None,
            k_norm=attention.k_norm if attention.qk_norm else None,
            qkv_proj=attention.qkv_proj.parts,
            o_proj=attention.o_proj.parts,
            gate_up_proj=mlp.gate_up_proj.parts,
            down_proj=mlp.down_proj.parts,
            num_heads=attention.heads[0],
            num_kv_heads=attention.heads[1],
            head_dim=attention.head_dim,
            scale=attention.scale,
            window=attention.window,
        )


class Decoder(nn.Module):
    """The layers and the last norm."""

    def __init__(self, arch: NativeArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = arch.norm_eps
        self.layers = nn.ModuleList(DecoderLayer(arch, i, dtype, device) for i in range(arch.num_layers))
        self.norm = nn.Parameter(torch.empty(arch.hidden_size, dtype=dtype, device=device))

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Return the normed hidden states of the embeddings `x`, both [num_tokens, hidden_size]."""
        residual: Tensor | None = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, positions, cos_sin, kv_cache, metadata)
        assert residual is not None
        return ops.add_rms_norm(x, residual, self.norm, self.eps)[0]

    def packed(self, quantization: str | None, cache_dtype: torch.dtype) -> nn.Module:
        """Return this decoder, its weights loaded, in the form that is fastest here; see `NativeModel.pack`."""
        first = self.layers[0]
        assert isinstance(first, DecoderLayer)
        if first.mlp.activation is None and cache_dtype == self.norm.dtype:
            fused = ops.fuse_decoder(self._weights(), self.norm, self.eps, quantization)
            if fused is not None:
                return fused
        pack_projections(self, quantization)
        return self

    def make_adapter_stacks(self, num_slots: int, max_rank: int) -> list[ops.AnyAdapterStack]:
        return make_adapter_stacks(self._projections(), num_slots, max_rank)

    def _projections(self) -> Iterator[Linear]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield from layer.projections()

    def _weights(self) -> Iterator[ops.LayerWeights]:
        """Yield the weights of each layer; a layer is freed when the next is asked for."""
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield layer.weights()
            self.layers[i] = nn.Module()


class LlamaForCausalLM(nn.Module):
    """The decoder and its vocabulary head; `vllm_mp.core.models.CausalLM` is the contract."""

    def __init__(self, arch: NativeArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert arch.rope is not None
        self.arch = arch
        self.kv_shapes = arch.kv_shapes
        at: dict[str, Any] = {"dtype": dtype, "device": device}
        self.embed_tokens = nn.Parameter(torch.empty(arch.vocab_size, arch.hidden_size, **at))
        self.decoder: nn.Module = Decoder(arch, dtype, device)
        head = self.embed_tokens
        if not arch.tie_word_embeddings:
            head = nn.Parameter(torch.empty(arch.vocab_size, arch.hidden_size, **at))
        self.lm_head = VocabularyHead(head)
        table = cos_sin_cache(arch.rope, arch.head_dim, arch.max_position, dtype, device)
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        hidden: Tensor = self.decoder(x, positions, self.cos_sin, kv_caches, metadata)
        return hidden

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.embed_tokens)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    def argmax(self, hidden: Tensor) -> Tensor:
        return self.lm_head.argmax(hidden)

    def pack(self, quantization: str | None, cache_dtype: torch.dtype) -> None:
        assert isinstance(self.decoder, Decoder)
        self.decoder = self.decoder.packed(quantization, cache_dtype)
        self.lm_head.pack(quantization)

    def make_adapter_stacks(self, num_slots: int, max_rank: int) -> list[ops.AnyAdapterStack]:
        decoder: Any = self.decoder
        stacks: list[ops.AnyAdapterStack] = decoder.make_adapter_stacks(num_slots, max_rank)
        return stacks

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        tied = ("lm_head.weight", "embed_tokens.weight") if self.arch.tie_word_embeddings else None
        load_checkpoint(
            self._destinations(),
            ((self._name(name), tensor) for name, tensor in tensors),
            prefix="model.",
            ignored=self._ignores,
            tied=tied,
        )

    def _name(self, name: str) -> str:
        """Return the name of a tensor in `_destinations`; some checkpoints use another name."""
        if self.arch.fp8 == "tensor":
            name = re.sub(r"\.weight_scale_inv$", ".weight_scale", name)
        return re.sub(r"\.[kv]_proj\.([kv]_scale)$", r".\1", name)

    def _ignores(self, name: str) -> bool:
        """Tell whether a tensor is skipped: rotary frequencies, which are computed, or static activation scales."""
        is_input_scale = name.endswith((".input_scale", ".activation_scale"))
        return name.endswith("rotary_emb.inv_freq") or (self.arch.fp8 is not None and is_input_scale)

    def _destinations(self) -> dict[str, Tensor | Destination]:
        """Map checkpoint names (without `model.`) to the parameters, or rows of fused ones, that they fill."""
        arch, decoder = self.arch, self.decoder
        assert isinstance(decoder, Decoder)
        places: dict[str, Tensor | Destination] = {
            "embed_tokens.weight": self.embed_tokens,
            "norm.weight": decoder.norm,
        }
        if not arch.tie_word_embeddings:
            places["lm_head.weight"] = self.lm_head.weight
        for i, layer in enumerate(decoder.layers):
            assert isinstance(layer, DecoderLayer)
            at = f"layers.{i}."
            attention, mlp = layer.attention, layer.mlp
            places[at + "input_layernorm.weight"] = layer.input_norm
            places[at + "post_attention_layernorm.weight"] = layer.post_attention_norm
            if arch.qk_norm:
                places[at + "self_attn.q_norm.weight"] = attention.q_norm
                places[at + "self_attn.k_norm.weight"] = attention.k_norm
            places |= attention.qkv_proj.destinations([f"{at}self_attn.{part}_proj" for part in "qkv"])
            places |= attention.o_proj.destinations([at + "self_attn.o_proj"])
            places |= mlp.gate_up_proj.destinations([f"{at}mlp.{part}_proj" for part in ("gate", "up")])
            places |= mlp.down_proj.destinations([at + "mlp.down_proj"])
            for part, name in enumerate("kv"):
                places[f"{at}self_attn.{name}_scale"] = attention.kv_scale(part)
        return places
