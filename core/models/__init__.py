"""The models, and what the engine asks of one."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

from vllm_mp.core.models.bert import BertModel
from vllm_mp.core.models.gpt2 import GPT2LMHeadModel
from vllm_mp.core.models.llama import LlamaForCausalLM
from vllm_mp.kernels.ops import AttentionMetadata
from vllm_mp.model_config.architecture import NativeArchitecture

__all__ = ["CausalLM", "NativeModel", "build_model"]


class CausalLM(Protocol):
    """A decoder over the paged KV cache. Every model is an `nn.Module` of this form.

    An encoder has no cache and no `compute_logits`; its tokens see their whole row, which is a whole prompt.
    """

    kv_shapes: list[tuple[tuple[int, int], tuple[int, int]]]
    """What one token leaves in each layer's cache: (heads, dim) of its keys, and of its values."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Final hidden states, normalised: [num_tokens, hidden_size].

        `input_ids` and `positions` int64 [num_tokens]; `kv_caches` holds each layer's pair of
        [num_blocks, block_size, heads, dim] (see `kv_shapes`), into which the new tokens are written.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary: [n, hidden_size] to [n, vocab_size], in the model's dtype or float32."""
        ...

    def argmax(self, hidden: Tensor) -> Tensor:
        """What `ops.argmax` finds in the scores of `hidden` [n, hidden_size]."""
        ...


class NativeModel(CausalLM, Protocol):
    """A model written for this engine, which reads its own checkpoints."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill the parameters from Hugging Face checkpoint tensors.

        Raises CheckpointMismatchError (a ValueError) that lists what is missing, unexpected or misshapen.
        """
        ...

    def pack(self, quantization: str | None, cache_dtype: torch.dtype) -> None:
        """Put the weights, which are there, into the form in which the device computes best, and keep no other.

        `quantization` "int8" makes them of 8 bits, and raises ValueError where the device has no kernels for that.
        The caches that the model will be given are of `cache_dtype`.
        """
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


def build_model(arch: NativeArchitecture, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """A native model on `device` with its parameters allocated but not initialised.

    `vllm_mp.core.weights.loader.load_weights` gives them values.
    """
    return _MODELS[arch.name](arch, dtype, torch.device(device)).requires_grad_(False)
