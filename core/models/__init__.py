"""The interface between the engine and a model, and the construction of native models."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vllm_mp.kernels.ops import AnyAdapterStack, AttentionMetadata, TokenMasks
from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.families.registry import NATIVE_MODELS, NativeEntry

__all__ = ["CausalLM", "NativeModel", "PreparedStep", "build_model", "import_native_models"]


class CausalLM(Protocol):
    """A decoder over the paged KV cache. Every model is an `nn.Module` of this form.

    An encoder has no cache, no `compute_logits`, no `argmax`, no `embed_input_ids`, and takes no `inputs_embeds`. Each
    token sees its row, which is a whole prompt. The methods that give logits need an architecture with `has_head`.
    """

    kv_shapes: list[tuple[tuple[int, int], tuple[int, int]]]
    """Shapes of one cell of each layer's cache: (heads, dim) of the keys, and of the values."""
    num_parameters: int
    """Number of parameters, set when they are loaded; those that are used twice count once."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states, normalised: [num_tokens, hidden_size].

        `input_ids` and `positions` int64 [num_tokens] (with `Rope.sections`, `positions` may be [3, num_tokens]);
        `kv_caches` holds each layer's pair of
        [num_blocks, block_size, heads, dim] (see `kv_shapes`), into which the new tokens are written. `inputs_embeds`
        [num_tokens, hidden_size] replaces `embed_input_ids(input_ids)`, and may be overwritten. In a
        pipeline, later stages get the result of the stage before in `inputs_embeds`, all but the last return hidden
        states that are not normalised, and only the first has the methods below.
        """
        ...

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings of tokens, before anything is added for their positions: [num_tokens, hidden_size]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab_size], in the model's dtype or float32, for `hidden` [n, hidden_size]."""
        ...

    def argmax(self, hidden: Tensor, masks: TokenMasks | None = None) -> Tensor:
        """Return `ops.argmax` of the logits of `hidden` [n, hidden_size], of the tokens that `masks` allow."""
        ...


class PreparedStep(NamedTuple):
    """A step of the host that can be computed again and again, from what then lies in the tensors of its inputs.

    A model that can do this has `prepare_step(input_ids, positions, kv_caches, metadata)`, with the arguments of
    `forward`, where `metadata` may have the lengths of an earlier step. It returns None for steps that it cannot
    prepare. So a step needs few calls beside the kernels: after a step of a large model nothing of the
    interpreter is left in the processor's caches, so that every call costs several times what it usually does.
    """

    forward: Sequence[Callable[[], object]]
    """Calls, one after another, that compute `hidden`."""
    hidden: Tensor
    """[num_tokens, hidden_size] what `CausalLM.forward` returns; overwritten each time."""
    argmax: Callable[[], object]
    """Computes `tokens` from `hidden`."""
    tokens: npt.NDArray[np.int64]
    """[num_tokens] what `CausalLM.argmax` returns for `hidden`; overwritten each time."""
    prepare_logits: Callable[[], tuple[Callable[[], object], Tensor] | None]
    """Returns a call that computes `CausalLM.compute_logits` of `hidden`, and the float32 tensor that gets these.

    Returns None if there is no such call."""


class NativeModel(CausalLM, Protocol):
    """A model written for this engine, which reads its own checkpoints."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Fill the parameters from Hugging Face checkpoint tensors.

        Raises CheckpointMismatchError (a ValueError) that lists what is missing, unexpected or misshapen.
        """
        ...

    def pack(self, quantization: str | None, cache_dtype: torch.dtype) -> None:
        """Convert the loaded weights to the form in which the device computes fastest, and keep no other copy.

        `quantization="int8"` makes them 8-bit integers; raises ValueError if the device has no kernels for that.
        `cache_dtype` is the dtype of the KV caches that the model will be given.
        """
        ...

    def make_adapter_stacks(self, num_slots: int, max_rank: int) -> list[AnyAdapterStack]:
        """Allocate memory for `num_slots` LoRA adapters of up to `max_rank`, after `pack`; they change nothing yet.

        Return the stack of each projection, in the order of `core.lora.targets.projections`. Without this call,
        `AttentionMetadata.adapter_slots` must be None. An encoder does not have it.
        """
        ...


def build_model(arch: NativeArchitecture, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """Return the native model of `arch` on `device`, with its parameters allocated but not initialised.

    `vllm_mp.core.models.loader.load_weights` gives them values.
    """
    model: nn.Module = _model_class(NATIVE_MODELS[arch.name])(arch, dtype, torch.device(device))
    return model.requires_grad_(False)


def import_native_models() -> None:
    """Import the modules of all native models, so that building one later imports nothing."""
    for entry in NATIVE_MODELS.values():
        _model_class(entry)


def _model_class(entry: NativeEntry) -> Any:
    module, _, name = entry.model.partition(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
