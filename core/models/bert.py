"""BERT (Devlin et al. 2019) and the encoders that differ from it in names and tables: RoBERTa, XLM-R, DistilBERT.

Learned positions, attention in both directions, layer norms after the residual sums. A head for classes is read if the
architecture has classes; the other heads of a checkpoint (a pooler, the masked-word head) are not needed for hidden
states and are skipped.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mp.core.collectives.group import RankModule
from vllm_mp.core.models.gpt2 import LayerNorm
from vllm_mp.core.models.linear import Linear, pack_projections
from vllm_mp.core.models.vocabulary import shared_embedding
from vllm_mp.core.weights.checkpoint import Destination, load_checkpoint
from vllm_mp.core.weights.cuts import cut_tensors
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import AttentionMetadata
from vllm_mp.model_config.architecture import NativeArchitecture

BERT_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "o_proj": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up_proj": "intermediate.dense",
    "down_proj": "output.dense",
    "output_norm": "output.LayerNorm",
}
DISTILBERT_LAYER = {
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "o_proj": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "up_proj": "ffn.lin1",
    "down_proj": "ffn.lin2",
    "output_norm": "output_layer_norm",
}
HEADS = ("pooler.", "cls.", "lm_head.", "vocab_")
"""Beginnings of the names of heads, which are skipped."""


class EncoderLayer(RankModule):
    """Attention and MLP, each added to the residual stream and normalised after it."""

    def __init__(self, arch: NativeArchitecture, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_heads = arch.num_heads
        self.scale = arch.attention_scale[layer]
        self.activation = ops.ACTIVATIONS[arch.activation]
        hidden, inner, attended = arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim
        form: Any = {"bias": True, "dtype": dtype, "device": device, "blocks": arch.blocks}
        self.qkv_proj = Linear(hidden, [attended] * 3, **form)
        self.o_proj = Linear(attended, hidden, **form)
        self.attention_norm = LayerNorm(hidden, arch.norm_eps, dtype, device)
        self.up_proj = Linear(hidden, inner, **form)
        self.down_proj = Linear(inner, hidden, **form)
        self.output_norm = LayerNorm(hidden, arch.norm_eps, dtype, device)

    def forward(self, x: Tensor, row_lens: list[int]) -> Tensor:
        q, k, v = self.qkv_proj(x).view(x.shape[0], 3, self.num_heads, -1).unbind(1)
        attended = ops.encoder_attention(q, k, v, row_lens, self.scale)
        x = self.attention_norm(x + self.group.sum(self.o_proj(attended.flatten(1))))
        normed: Tensor = self.output_norm(x + self.group.sum(self.down_proj(self.activation(self.up_proj(x)))))
        return normed


class ClassHead(nn.Module):
    """From the state of the first token to an output for each class, in float32."""

    def __init__(self, hidden_size: int, num_classes: int, activation: Any, device: torch.device) -> None:
        super().__init__()
        self.activation = activation
        self.dense = Linear(hidden_size, hidden_size, True, torch.float32, device)
        self.out_proj = Linear(hidden_size, num_classes, True, torch.float32, device)

    def forward(self, states: Tensor) -> Tensor:
        outputs: Tensor = self.out_proj(self.activation(self.dense(states.float())))
        return outputs


class BertModel(RankModule):
    """The embeddings and the layers; `vllm_mp.core.models.NativeModel` is the contract."""

    prefix: ClassVar = "bert."
    """Begins the names of a checkpoint's tensors, except in checkpoints without heads."""
    layers_name: ClassVar = "encoder.layer"
    layer_names: ClassVar = BERT_LAYER
    head_names: ClassVar = ("pooler.dense", "classifier")
    """Names of the two projections of the head for classes."""
    head_activation: ClassVar[Any] = staticmethod(torch.tanh)

    def __init__(self, arch: NativeArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.arch = arch
        self._dtype = dtype
        self.kv_shapes = arch.kv_shapes
        at: dict[str, Any] = {"dtype": dtype, "device": device}
        num_positions = arch.max_position + arch.position_offset
        self.word_embeddings = nn.Parameter(torch.empty(arch.vocab_size, arch.hidden_size, **at))
        self.position_embeddings = nn.Parameter(torch.empty(num_positions, arch.hidden_size, **at))
        self.token_type_embeddings = nn.Parameter(torch.empty(arch.num_token_types, arch.hidden_size, **at))
        self.norm = LayerNorm(arch.hidden_size, arch.norm_eps, dtype, device)
        self.layers = nn.ModuleList(EncoderLayer(arch, i, dtype, device) for i in range(arch.num_layers))
        self.head: ClassHead | None = None
        if arch.num_classes:
            self.head = ClassHead(arch.hidden_size, arch.num_classes, self.head_activation, device)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        x = shared_embedding(input_ids, self.word_embeddings, self._dtype, self.arch.shard, self.group)
        if self.arch.num_token_types:
            types = metadata.token_types
            x = x + (self.token_type_embeddings[0] if types is None else F.embedding(types, self.token_type_embeddings))
        x = x + F.embedding(positions + self.arch.position_offset, self.position_embeddings)
        x = ops.layer_norm(x, self.norm.weight, self.norm.bias, self.norm.eps)
        row_lens = list(metadata.query_lens)
        for layer in self.layers:
            x = layer(x, row_lens)
        return x

    def classify(self, states: Tensor) -> Tensor:
        """Return the output of the head for each class, float32 [n, num_classes], for states [n, hidden_size]."""
        assert self.head is not None, "only architectures with classes have a head"
        outputs: Tensor = self.head(states)
        return outputs

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        destinations = self._destinations()
        # Old files contain the position ids, which were a buffer.
        named = ((_current_name(name), tensor) for name, tensor in tensors if not name.endswith(".position_ids"))
        load_checkpoint(
            destinations,
            cut_tensors(named, self.arch.shard),
            prefix=self.prefix,
            ignored=lambda name: name not in destinations and name.startswith(HEADS),
            tied=None,
        )

    def pack(self, quantization: str | None, cache_dtype: torch.dtype) -> None:
        pack_projections(self.layers, quantization)
        if self.head is not None:
            pack_projections(self.head, None)

    def _destinations(self) -> dict[str, Tensor | Destination]:
        """Map checkpoint names (without `prefix`) to the parameters, or rows of fused ones, that they fill."""
        destinations: dict[str, Tensor | Destination] = {
            "embeddings.word_embeddings.weight": self.word_embeddings,
            "embeddings.position_embeddings.weight": self.position_embeddings,
            "embeddings.LayerNorm.weight": self.norm.weight,
            "embeddings.LayerNorm.bias": self.norm.bias,
        }
        if self.arch.num_token_types:
            destinations["embeddings.token_type_embeddings.weight"] = self.token_type_embeddings
        if self.head is not None:
            for name, projection in zip(self.head_names, (self.head.dense, self.head.out_proj), strict=True):
                destinations |= {f"{name}.{kind}": tensor for kind, tensor in projection.named_parameters()}
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, EncoderLayer)
            at = f"{self.layers_name}.{i}."
            parts = [at + self.layer_names[part] for part in ("query", "key", "value")]
            destinations |= layer.qkv_proj.destinations(parts)
            for part in ("o_proj", "up_proj", "down_proj"):
                destinations |= getattr(layer, part).destinations([at + self.layer_names[part]])
            for part in ("attention_norm", "output_norm"):
                for kind, tensor in getattr(layer, part).named_parameters():
                    destinations[f"{at}{self.layer_names[part]}.{kind}"] = tensor
        return destinations


class RobertaModel(BertModel):
    """RoBERTa and XLM-R."""

    prefix: ClassVar = "roberta."
    head_names: ClassVar = ("classifier.dense", "classifier.out_proj")


class DistilBertModel(BertModel):
    """DistilBERT."""

    prefix: ClassVar = "distilbert."
    layers_name: ClassVar = "transformer.layer"
    layer_names: ClassVar = DISTILBERT_LAYER
    head_names: ClassVar = ("pre_classifier", "classifier")
    head_activation: ClassVar[Any] = staticmethod(torch.relu)


def _current_name(name: str) -> str:
    """Return the present name of a tensor; old checkpoints (bert-base-uncased) use TensorFlow's names."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
