"""The native models, and what the engine asks of one."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from vllm_mp.architecture import Architecture
from vllm_mp.core.models.bert import BertModel
from vllm_mp.core.models.gpt2 import GPT2LMHeadModel
from vllm_mp.core.models.llama import LlamaForCausalLM
from vllm_mp.kernels.ops import AttentionMetadata

__all__ = ["CausalLM", "Encoder", "build_model"]


class CausalLM(Protocol):
    """A decoder over the paged KV cache. Every native decoder is an `nn.Module` of this form."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Final hidden states, normalised: [num_tokens, hidden_size].

        `input_ids` and `positions` int64 [num_tokens]; `kv_caches` holds each layer's pair of
        [num_blocks, block_size, num_kv_heads, head_dim], into which the new tokens are written.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary: [n, hidden_size] to [n, vocab_size] in the model's dtype."""
        ...

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill the parameters from Hugging Face checkpoint tensors.

        Raises CheckpointMismatchError (a ValueError) that lists what is missing, unexpected or misshapen.
        """
        ...


class Encoder(Protocol):
    """A model without cache or vocabulary head, whose tokens see their whole row; an `nn.Module` of this form."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """As a `CausalLM`'s, where every row of the step is a whole prompt and `kv_caches` is empty."""
        ...

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """As a `CausalLM`'s."""
        ...


_MODELS = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "GPT2LMHeadModel": GPT2LMHeadModel,
    "BertModel": BertModel,
    "BertForMaskedLM": BertModel,
    "BertForPreTraining": BertModel,
    "RobertaModel": BertModel,
    "RobertaForMaskedLM": BertModel,
    "XLMRobertaModel": BertModel,
    "XLMRobertaForMaskedLM": BertModel,
    "DistilBertModel": BertModel,
    "DistilBertForMaskedLM": BertModel,
}


def build_model(arch: Architecture, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """A model (see `CausalLM` and `Encoder`) on `device` with its parameters allocated but not initialised.

    `vllm_mp.core.weights.load_weights` gives them values. Raises ValueError for an architecture without a
    module.
    """
    if arch.name not in _MODELS:
        raise ValueError(f"architecture {arch.name!r} has no native model; there are {', '.join(_MODELS)}")
    return _MODELS[arch.name](arch, dtype, torch.device(device)).requires_grad_(False)
