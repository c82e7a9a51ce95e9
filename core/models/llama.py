"""The Llama family (Touvron et al. 2023 and descendants): Llama, SmolLM, Mistral, Qwen2, Qwen3, Gemma, Phi-3, Granite
and OLMo 2.

One decoder for all; its members differ by fields of `NativeArchitecture`: biases, norms, windows, scaling, soft caps.
"""

import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vllm_mp.core.collectives.group import RankModule
from vllm_mp.core.models import PreparedStep
from vllm_mp.core.models.attention_layer import AttentionLayer
from vllm_mp.core.models.experts import ExpertMLP, mixture_name, separate_experts
from vllm_mp.core.models.linear import Linear, make_adapter_stacks, pack_projections
from vllm_mp.core.models.mlp import MLP
from vllm_mp.core.models.rotary import cos_sin_cache, cos_sin_of_sections
from vllm_mp.core.models.text_part import is_of_images, name_in_text_part
from vllm_mp.core.models.vocabulary import VocabularyHead, shared_embedding
from vllm_mp.core.weights.block_matrix import destination_of, prepare_embedding, vocabulary_matrix
from vllm_mp.core.weights.checkpoint import FLOAT_DTYPES, CheckpointMismatchError, Destination, load_checkpoint
from vllm_mp.core.weights.cuts import cut_tensors
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import AttentionMetadata, TokenMasks
from vllm_mp.model_config.architecture import NativeArchitecture, Shard

logger = logging.getLogger(__name__)


class Attention(AttentionLayer, RankModule):
    """Grouped-query self-attention over the paged cache, with q, k and v in one projection.

    Its output is the share of its heads, which `DecoderLayer` sums over the ranks.
    """

    def __init__(self, arch: NativeArchitecture, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads = (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)
        self.head_dim = arch.head_dim
        self.eps = arch.norm_eps
        self.scale = arch.attention_scale[layer]
        self.window = arch.sliding_window[layer]
        self.soft_cap = arch.attention_soft_cap
        self.kv_scales = [1.0, 1.0]
        """Scales of the keys and of the values; a cache of 8-bit floats holds each divided by its scale."""
        sizes = [heads * arch.head_dim for heads in self.heads]
        parts = [sum(sizes)] if arch.has_fused_projections else sizes
        form: Any = {"dtype": dtype, "device": device, "fp8": arch.fp8, "blocks": arch.blocks}
        self.qkv_proj = Linear(arch.hidden_size, parts, arch.attention_bias, **form)
        self.o_proj = Linear(sizes[0], arch.hidden_size, arch.attention_output_bias, **form)
        self.norms_all_heads = arch.norms_all_heads
        self.shard = arch.shard
        self.q_norm: nn.Parameter | None = None
        self.k_norm: nn.Parameter | None = None
        if arch.qk_norm:
            self.q_norm, self.k_norm = (
                norm_weight(arch, heads * arch.head_dim if arch.norms_all_heads else arch.head_dim, dtype, device)
                for heads in self.heads[:2]
            )

    def forward(
        self,
        x: Tensor | ops.QuantizedRows,
        positions: Tensor,
        cos_sin: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> Tensor:
        slots = metadata.adapter_slots
        q, k, v = self.qkv_proj(x, slots).view(positions.shape[0], -1, self.head_dim).split(self.heads, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(q, k, self.q_norm, self.k_norm)
        k_scale, v_scale = self.kv_scales if kv_cache[0].dtype == ops.FLOAT8 else (1.0, 1.0)
        # Rotating keys commutes with scaling them.
        k, v = (k if k_scale == 1.0 else k / k_scale), (v if v_scale == 1.0 else v / v_scale)
        q = ops.rotary_write_kv(q, k, v, positions, cos_sin, *kv_cache, metadata.cell_mapping)
        attended = self.attend(q, *kv_cache, metadata, self.scale * k_scale, self.window, self.soft_cap)
        if v_scale != 1.0:
            attended = attended * v_scale
        out: Tensor = self.o_proj(attended.flatten(1), slots)
        return out

    def _normed(self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norms of `q` and `k` [num_tokens, heads, head_dim], over each head or all heads of a token."""
        if not self.norms_all_heads:
            return ops.rms_norm(q, q_weight, self.eps), ops.rms_norm(k, k_weight, self.eps)
        if self.shard is not None:
            return self._normed_over_ranks(q, k, q_weight, k_weight, self.shard)
        normed_q, normed_k = (
            ops.rms_norm(heads.flatten(1), weight, self.eps).view(heads.shape)
            for heads, weight in ((q, q_weight), (k, k_weight))
        )
        return normed_q, normed_k

    def _normed_over_ranks(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, shard: Shard
    ) -> tuple[Tensor, Tensor]:
        """Return the norms over the heads of all ranks; this rank has the heads `q` and `k`."""
        counts = (shard.whole.num_heads * self.head_dim, shard.whole.num_kv_heads * self.head_dim * shard.kv_copies)
        squares = torch.stack([heads.float().square().sum((1, 2)) for heads in (q, k)])
        q_squares, k_squares = self.group.sum(squares).unbind()
        normed = []
        for heads, weight, total, count in ((q, q_weight, q_squares, counts[0]), (k, k_weight, k_squares, counts[1])):
            scaled = heads.float() * torch.rsqrt(total / count + self.eps)[:, None, None]
            # A weight in float32 multiplies before the value is rounded (`ops.rms_norm`).
            value = scaled if weight.dtype != heads.dtype else scaled.to(heads.dtype)
            normed.append((value * weight.view(1, *heads.shape[1:])).to(heads.dtype))
        return normed[0], normed[1]

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


class DecoderLayer(RankModule):
    """Attention and MLP, whose outputs are added to the residual stream, with norms before or after each, or both.

    Each output is first summed over the ranks, which have computed shares of it.
    """

    def __init__(self, arch: NativeArchitecture, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = arch.norm_eps
        self.multiplier = arch.residual_multiplier
        has_norms = (arch.norm_place != "after", arch.norm_place != "before")
        self.input_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm = (
            norm_weight(arch, arch.hidden_size, dtype, device) if has_norm else None for has_norm in has_norms * 2
        )
        self.attention = Attention(arch, layer, dtype, device)
        self.mlp: MLP | ExpertMLP
        if arch.experts is not None and arch.experts.layers[layer]:
            self.mlp = ExpertMLP(arch, arch.experts, dtype, device)
        else:
            self.mlp = MLP(arch, arch.intermediate_size, dtype, device)
        self.table = int(arch.local_rope is not None and arch.sliding_window[layer] is not None)
        """The index of the layer's table of rotary angles."""
        self.has_fused_projections = arch.has_fused_projections

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
        normed, residual = self._added(x, residual, self.input_norm, self.attention.qkv_proj)
        x = self.group.sum(self.attention(normed, positions, cos_sin, kv_cache, metadata))
        x = self._output(x, self.attention_output_norm)
        gate_up = self.mlp.gate_up_proj if isinstance(self.mlp, MLP) else None
        normed, residual = self._added(x, residual, self.mlp_norm, gate_up)
        x = self.group.sum(self.mlp(normed, metadata.adapter_slots))
        return self._output(x, self.mlp_output_norm), residual

    def _added(
        self, x: Tensor, residual: Tensor | None, norm: Tensor | None, projection: Linear | None
    ) -> tuple[Tensor | ops.QuantizedRows, Tensor]:
        """Return the sum of both, normed if there is a norm and in the form that `projection` takes, and the sum."""
        if norm is not None and residual is not None:
            groups = None if projection is None else projection.input_groups
            if groups is not None:
                return ops.add_rms_norm_rows(x, residual, norm, self.eps, groups)
            return ops.add_rms_norm(x, residual, norm, self.eps)
        total = x if residual is None else x + residual
        return (total if norm is None else ops.rms_norm(total, norm, self.eps)), total

    def _output(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """Return the output `x` of attention or MLP as it is added to the residual stream."""
        if norm is not None:
            x = ops.rms_norm(x, norm, self.eps)
        return x if self.multiplier == 1.0 else x * self.multiplier

    def norms_by_name(self, at: str) -> dict[str, Tensor | None]:
        """Return the weights of the norms by their names in checkpoints, which begin with `at`."""
        # Llama calls the norm before the MLP as others call the norm after attention.
        after_attention = self.mlp_norm if self.attention_output_norm is None else self.attention_output_norm
        before_mlp = None if self.attention_output_norm is None else self.mlp_norm
        return {
            f"{at}input_layernorm": self.input_norm,
            f"{at}post_attention_layernorm": after_attention,
            f"{at}pre_feedforward_layernorm": before_mlp,
            f"{at}post_feedforward_layernorm": self.mlp_output_norm,
            f"{at}self_attn.q_norm": self.attention.q_norm,
            f"{at}self_attn.k_norm": self.attention.k_norm,
        }

    def projections(self) -> list[Linear]:
        """Return the projections in the order of `core.lora.targets.projections`."""
        return [self.attention.qkv_proj, self.attention.o_proj, *self.mlp.adaptable_projections()]

    def weights(self) -> ops.LayerWeights:
        """Return the weights and shapes of this layer, for `ops.fuse_decoder`."""
        attention = self.attention
        mlp: MLP | None
        experts: ops.ExpertWeights | None = None
        if isinstance(self.mlp, ExpertMLP):
            mlp, experts = self.mlp.shared, self.mlp.weights()
        else:
            mlp = self.mlp
        return ops.LayerWeights(
            input_norm=self.input_norm,
            attention_output_norm=self.attention_output_norm,
            mlp_norm=self.mlp_norm,
            mlp_output_norm=self.mlp_output_norm,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            qkv_proj=attention.qkv_proj.parts,
            o_proj=attention.o_proj.parts,
            gate_up_proj=None if mlp is None else mlp.gate_up_proj.parts,
            down_proj=None if mlp is None else mlp.down_proj.parts,
            num_heads=attention.heads[0],
            num_kv_heads=attention.heads[1],
            head_dim=attention.head_dim,
            scale=attention.scale,
            window=attention.window,
            soft_cap=attention.soft_cap,
            table=self.table,
            has_fused_parts=self.has_fused_projections,
            experts=experts,
        )


class Decoder(nn.Module):
    """The layers and the last norm."""

    def __init__(self, arch: NativeArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.arch = arch
        self.dtype = dtype
        self.has_norm = arch.stage is None or arch.stage.is_last
        """False: the result is the residual stream, which other stages continue; `norm` is not used."""
        self.layers = nn.ModuleList(DecoderLayer(arch, i, dtype, device) for i in range(arch.num_layers))
        self.norm = norm_weight(arch, arch.hidden_size, dtype, device)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Return the normed hidden states of the embeddings `x`, both [num_tokens, hidden_size].

        In a pipeline, `x` may be the result of the stage before, and all but the last stage return the residual stream.
        `cos_sin` holds the tables of rotary angles: [num_tables, max_position, rotary_dim].
        """
        residual: Tensor | None = None
        tables = cos_sin.unbind()
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            assert isinstance(layer, DecoderLayer)
            x, residual = layer(x, residual, positions, tables[layer.table], kv_cache, metadata)
        assert residual is not None
        if not self.has_norm:
            return x + residual
        return ops.add_rms_norm(x, residual, self.norm, self.arch.norm_eps)[0]

    def packed(self, quantization: str | None, cache_dtype: torch.dtype) -> nn.Module:
        """Return this decoder, its weights loaded, in the form that is fastest here; see `NativeModel.pack`."""
        arch = self.arch
        # A fused decoder cannot stop for sums over ranks.
        if arch.shard is None and cache_dtype in (self.dtype, torch.int8):
            options = ops.DecoderOptions(
                self.dtype,
                arch.norm_eps,
                arch.activation,
                arch.residual_multiplier,
                arch.norms_all_heads,
                has_norm=self.has_norm,
            )
            if all(ops.can_fuse(layer.weights(), options) for layer in self._layers()):
                return ops.fuse_decoder(self._weights(), self.norm, options, quantization)
        pack_projections(self, quantization)
        return self

    def make_adapter_stacks(self, num_slots: int, max_rank: int) -> list[ops.AnyAdapterStack]:
        return make_adapter_stacks(self._projections(), num_slots, max_rank)

    def _layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def _projections(self) -> Iterator[Linear]:
        for layer in self._layers():
            yield from layer.projections()

    def _weights(self) -> Iterator[ops.LayerWeights]:
        """Yield the weights of each layer; a layer is freed when the next is asked for."""
        for i, layer in enumerate(self._layers()):
            yield layer.weights()
            self.layers[i] = nn.Module()


def norm_weight(arch: NativeArchitecture, size: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return the uninitialised weight [size] of a norm: float32 if the norm multiplies in float32."""
    of_norm = dtype if arch.norm_offset is None else torch.float32
    return nn.Parameter(torch.empty(size, dtype=of_norm, device=device))


class LlamaForCausalLM(RankModule):
    """The decoder and its vocabulary head; `vllm_mp.core.models.CausalLM` is the contract.

    Of the stages of a pipeline, only the first has embedding and head.
    """

    def __init__(self, arch: NativeArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert arch.rope is not None
        if arch.rope.type == "longrope" and arch.max_position > arch.rope.original_max_position:
            logger.warning(
                "max_model_len=%d is above the original context of the model, %d tokens, so that requests of any "
                "length are computed with LongRoPE's factors for long contexts; if no request is longer than the "
                "original context, set max_model_len to at most that",
                arch.max_position,
                arch.rope.original_max_position,
            )
        self.arch = arch
        self.kv_shapes = arch.kv_shapes
        self._dtype = dtype
        self.decoder: nn.Module = Decoder(arch, dtype, device)
        self.is_first = arch.stage is None or arch.stage.is_first
        if self.is_first:
            self.embed_tokens = vocabulary_matrix(arch, dtype, device)
        if self.is_first and arch.has_head:
            head = self.embed_tokens if arch.tie_word_embeddings else vocabulary_matrix(arch, dtype, device)
            self.lm_head = VocabularyHead(head, dtype, arch.shard, is_tied=arch.tie_word_embeddings)
        ropes = [arch.rope] if arch.local_rope is None else [arch.rope, arch.local_rope]
        tables = cos_sin_cache(ropes, arch.head_dim, arch.max_position, dtype, device)
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", tables, persistent=False)
        self.embedding_scale = float(torch.tensor(arch.embedding_scale, dtype=dtype))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        if self.is_first and self.arch.input_multiplier != 1.0:
            x = x * self.arch.input_multiplier
        cos_sin = self.cos_sin
        if positions.dim() > 1:
            assert self.arch.rope is not None
            cos_sin = cos_sin_of_sections(cos_sin, positions, self.arch.rope.sections)
            positions = torch.arange(positions.shape[1], device=positions.device)
        hidden: Tensor = self.decoder(x, positions, cos_sin, kv_caches, metadata)
        return hidden

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embeds = shared_embedding(input_ids, self.embed_tokens, self._dtype, self.arch.shard, self.group)
        return embeds if self.embedding_scale == 1.0 else embeds * self.embedding_scale

    def prepare_step(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[tuple[Tensor, Tensor]], metadata: AttentionMetadata
    ) -> PreparedStep | None:
        """See `PreparedStep`."""
        is_whole = self.arch.stage is None and self.arch.has_head
        if not (is_whole and positions.dim() == 1 and isinstance(self.decoder, ops.FusedDecoder)):
            return None
        hidden = torch.empty(len(input_ids), self.arch.hidden_size, dtype=self._dtype)
        tokens = np.zeros(len(input_ids), np.int64)
        embed = prepare_embedding(input_ids, self.embed_tokens, hidden)
        argmax = self.lm_head.prepare_argmax(hidden, torch.from_numpy(tokens))
        if embed is None or argmax is None:
            return None
        factors = [factor for factor in (self.embedding_scale, self.arch.input_multiplier) if factor != 1.0]
        scale = [functools.partial(hidden.mul_, factor) for factor in factors]
        layers = self.decoder.prepare(hidden, hidden, positions, self.cos_sin, kv_caches, metadata)
        prepare_logits = functools.partial(self._prepare_logits, hidden)
        return PreparedStep([embed, *scale, *layers], hidden, argmax, tokens, prepare_logits)

    def _prepare_logits(self, hidden: Tensor) -> tuple[Callable[[], None], Tensor] | None:
        """See `PreparedStep.prepare_logits`."""
        is_changed = self.arch.logits_divisor != 1.0 or self.arch.logits_soft_cap is not None
        return None if is_changed else self.lm_head.prepare_logits(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        if self.arch.logits_divisor != 1.0:
            logits = logits / self.arch.logits_divisor
        cap = self.arch.logits_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def argmax(self, hidden: Tensor, masks: TokenMasks | None = None) -> Tensor:
        # Dividing logits and capping them keeps their order.
        return self.lm_head.argmax(hidden, masks)

    def pack(self, quantization: str | None, cache_dtype: torch.dtype) -> None:
        assert isinstance(self.decoder, Decoder)
        self.decoder = self.decoder.packed(quantization, cache_dtype)
        if self.is_first and self.arch.has_head:
            self.lm_head.pack(quantization)

    def make_adapter_stacks(self, num_slots: int, max_rank: int) -> list[ops.AnyAdapterStack]:
        decoder: Any = self.decoder
        stacks: list[ops.AnyAdapterStack] = decoder.make_adapter_stacks(num_slots, max_rank)
        return stacks

    def load_weights(self, tensors: Iterable[tuple[str, Tensor | ops.BlockWeight]]) -> None:
        is_tied = self.arch.tie_word_embeddings and self.arch.has_head
        tied = ("lm_head.weight", "embed_tokens.weight") if is_tied else None
        load_checkpoint(
            self._destinations(),
            cut_tensors(separate_experts((self._name(name), tensor) for name, tensor in tensors), self.arch.shard),
            prefix="model.",
            ignored=self._ignores,
            tied=tied,
        )

    def _name(self, name: str) -> str:
        """Return the name of a tensor in `_destinations`; some checkpoints use another name."""
        if self.arch.fp8 == "tensor":
            name = re.sub(r"\.weight_scale_inv$", ".weight_scale", name)
        name = name_in_text_part(name)
        if self.arch.experts is not None:
            name = mixture_name(name)
        return re.sub(r"\.[kv]_proj\.([kv]_scale)$", r".\1", name)

    def _ignores(self, name: str) -> bool:
        """Tell whether a tensor is skipped: of images, rotary tables, static activation scales, an unused head."""
        is_input_scale = name.endswith((".input_scale", ".activation_scale"))
        return (
            is_of_images(name)
            or (name == "lm_head.weight" and not self.arch.has_head)
            or name.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"))
            or (self.arch.fp8 is not None and is_input_scale)
        )

    def _destinations(self) -> dict[str, Tensor | Destination]:
        """Map checkpoint names (without `model.`) to the parameters, or rows of fused ones, that they fill."""
        arch, decoder = self.arch, self.decoder
        assert isinstance(decoder, Decoder)
        fused = arch.has_fused_projections
        destinations: dict[str, Tensor | Destination] = {}
        if self.is_first:
            destinations["embed_tokens.weight"] = destination_of(self.embed_tokens)
            if arch.has_head and not arch.tie_word_embeddings:
                destinations["lm_head.weight"] = destination_of(self.lm_head.weight)
        norms: dict[str, Tensor | None] = {"norm": decoder.norm} if decoder.has_norm else {}
        for i, layer in enumerate(decoder.layers, arch.first_layer):
            assert isinstance(layer, DecoderLayer)
            at = f"layers.{i}."
            attention, mlp = layer.attention, layer.mlp
            norms |= layer.norms_by_name(at)
            qkv = ["qkv_proj"] if fused else ["q_proj", "k_proj", "v_proj"]
            destinations |= attention.qkv_proj.destinations([f"{at}self_attn.{name}" for name in qkv])
            destinations |= attention.o_proj.destinations([at + "self_attn.o_proj"])
            destinations |= mlp.destinations(at + "mlp.")
            for part, name in enumerate("kv"):
                destinations[f"{at}self_attn.{name}_scale"] = attention.kv_scale(part)
        return destinations | {
            f"{name}.weight": self._norm(weight) for name, weight in norms.items() if weight is not None
        }

    def _norm(self, weight: Tensor) -> Tensor | Destination:
        """Return the destination of the weight of a norm."""
        offset = self.arch.norm_offset
        if not offset:
            return weight

        def add(tensor: Tensor) -> None:
            weight.copy_(tensor).add_(offset)

        return Destination([weight.shape], FLOAT_DTYPES, add)
