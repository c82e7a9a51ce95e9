"""GPT-2 (Radford et al. 2019), DialoGPT included: learned positions, layer norms, biases everywhere."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mp.core.collectives.group import RankModule
from vllm_mp.core.models.attention_layer import AttentionLayer
from vllm_mp.core.models.linear import Linear, make_adapter_stacks, pack_projections
from vllm_mp.core.models.vocabulary import VocabularyHead, shared_embedding
from vllm_mp.core.weights.block_matrix import destination_of, vocabulary_matrix
from vllm_mp.core.weights.checkpoint import Destination, load_checkpoint
from vllm_mp.core.weights.cuts import cut_tensors
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import AttentionMetadata, TokenMasks
from vllm_mp.model_config.architecture import NativeArchitecture


class LayerNorm(nn.Module):
    """Layer normalisation through `ops.layer_norm`."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class Block(AttentionLayer, RankModule):
    """Attention and MLP, each after a layer norm and added to the residual stream."""

    def __init__(self, arch: NativeArchitecture, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_heads = arch.num_heads
        self.scale = arch.attention_scale[layer]
        self.activation = ops.ACTIVATIONS[arch.activation]
        hidden, inner, of_heads = arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim
        self.ln_1 = LayerNorm(hidden, arch.norm_eps, dtype, device)
        self.qkv_proj = Linear(hidden, 3 * of_heads, True, dtype, device, blocks=arch.blocks)
        self.o_proj = Linear(of_heads, hidden, True, dtype, device, blocks=arch.blocks)
        self.ln_2 = LayerNorm(hidden, arch.norm_eps, dtype, device)
        self.up_proj = Linear(hidden, inner, True, dtype, device, blocks=arch.blocks)
        self.down_proj = Linear(inner, hidden, True, dtype, device, blocks=arch.blocks)

    def forward(self, x: Tensor, kv_cache: tuple[Tensor, Tensor], metadata: AttentionMetadata) -> Tensor:
        tokens = len(x)
        slots = metadata.adapter_slots
        q, k, v = self.qkv_proj(self.ln_1(x), slots).view(tokens, 3, self.num_heads, -1).unbind(1)
        ops.write_kv(k, v, *kv_cache, metadata.cell_mapping)
        attended = self.attend(q, *kv_cache, metadata, self.scale)
        x = x + self.group.sum(self.o_proj(attended.reshape(tokens, -1), slots))
        return x + self.group.sum(self.down_proj(self.activation(self.up_proj(self.ln_2(x), slots)), slots))

    def projections(self) -> list[Linear]:
        """Return the projections in the order of `core.lora.targets.projections`."""
        return [self.qkv_proj, self.o_proj, self.up_proj, self.down_proj]


class GPT2LMHeadModel(RankModule):
    """The decoder and its vocabulary head; `vllm_mp.core.models.CausalLM` is the contract.

    Of the stages of a pipeline, only the first has embeddings and head, and only the last has the last norm.
    """

    def __init__(self, arch: NativeArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.arch = arch
        self.kv_shapes = arch.kv_shapes
        at: dict[str, Any] = {"dtype": dtype, "device": device}
        self._dtype = dtype
        self.h = nn.ModuleList(Block(arch, i, dtype, device) for i in range(arch.num_layers))
        self.is_first = arch.stage is None or arch.stage.is_first
        if self.is_first:
            self.wte = vocabulary_matrix(arch, dtype, device)
            self.wpe = nn.Parameter(torch.empty(arch.max_position, arch.hidden_size, **at))
        if self.is_first and arch.has_head:
            head = self.wte if arch.tie_word_embeddings else vocabulary_matrix(arch, dtype, device)
            self.lm_head = VocabularyHead(head, dtype, arch.shard, is_tied=arch.tie_word_embeddings)
        self.ln_f: LayerNorm | None = None
        if arch.stage is None or arch.stage.is_last:
            self.ln_f = LayerNorm(arch.hidden_size, arch.norm_eps, dtype, device)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        if self.is_first:
            x = x + F.embedding(positions, self.wpe)
        for block, kv_cache in zip(self.h, kv_caches, strict=True):
            x = block(x, kv_cache, metadata)
        return x if self.ln_f is None else self.ln_f(x)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return shared_embedding(input_ids, self.wte, self._dtype, self.arch.shard, self.group)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    def argmax(self, hidden: Tensor, masks: TokenMasks | None = None) -> Tensor:
        return self.lm_head.argmax(hidden, masks)

    def pack(self, quantization: str | None, cache_dtype: torch.dtype) -> None:
        pack_projections(self, quantization)

    def make_adapter_stacks(self, num_slots: int, max_rank: int) -> list[ops.AnyAdapterStack]:
        blocks = [block for block in self.h if isinstance(block, Block)]
        return make_adapter_stacks((part for block in blocks for part in block.projections()), num_slots, max_rank)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        is_tied = self.arch.tie_word_embeddings and self.arch.has_head
        load_checkpoint(
            self._destinations(),
            cut_tensors(tensors, self.arch.shard),
            prefix="transformer.",
            ignored=self._ignores,
            tied=("lm_head.weight", "wte.weight") if is_tied else None,
        )

    def _ignores(self, name: str) -> bool:
        """Tell whether a tensor is skipped: a causal mask, which old files contain, or an unused head."""
        is_mask = name.endswith((".attn.bias", ".attn.masked_bias"))
        return is_mask or (name == "lm_head.weight" and not self.arch.has_head)

    def _destinations(self) -> dict[str, Tensor | Destination]:
        """Map checkpoint names (without `transformer.`) to the parameters that they fill."""
        destinations: dict[str, Tensor | Destination] = {}
        if self.is_first:
            destinations |= {"wte.weight": destination_of(self.wte), "wpe.weight": self.wpe}
            if self.arch.has_head and not self.arch.tie_word_embeddings:
                destinations["lm_head.weight"] = destination_of(self.lm_head.weight)
        named: dict[str, LayerNorm | Linear] = {} if self.ln_f is None else {"ln_f": self.ln_f}
        for i, block in enumerate(self.h, self.arch.first_layer):
            assert isinstance(block, Block)
            named |= {
                f"h.{i}.ln_1": block.ln_1,
                f"h.{i}.attn.c_attn": block.qkv_proj,
                f"h.{i}.attn.c_proj": block.o_proj,
                f"h.{i}.ln_2": block.ln_2,
                f"h.{i}.mlp.c_fc": block.up_proj,
                f"h.{i}.mlp.c_proj": block.down_proj,
            }
        for name, module in named.items():
            # transformers' Conv1D keeps its weight [in, out], the transpose of a linear layer's.
            destinations[f"{name}.weight"] = (
                module.transposed_destination() if isinstance(module, Linear) else module.weight
            )
            if module.bias is not None:
                destinations[f"{name}.bias"] = module.bias
        return destinations
