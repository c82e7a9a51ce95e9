"""The embedding and the head of a model, whose rows the ranks share out by tokens."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mp.core.collectives.group import RankGroup, RankModule
from vllm_mp.core.models.linear import Packable
from vllm_mp.core.weights.block_matrix import BlockMatrix, embedding
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import TokenMasks, pack_linear
from vllm_mp.model_config.architecture import Shard


def shared_embedding(
    ids: Tensor, weight: nn.Parameter | BlockMatrix, dtype: torch.dtype, shard: Shard | None, group: RankGroup
) -> Tensor:
    """Return the embeddings of `ids` int64 [n] in `dtype`; with a `shard`, `weight` holds the rank's rows only."""
    if shard is None:
        return embedding(ids, weight, dtype)
    first, last = shard.vocabulary
    is_own = (ids >= first) & (ids < last)
    rows = embedding((ids - first).clamp(0, last - first - 1), weight, dtype)
    return group.sum(torch.where(is_own.unsqueeze(1), rows, 0))


class VocabularyHead(Packable, RankModule):
    """The projection to logits; if it `is_tied`, `weight` [vocab_size, hidden_size] is the weight of the embedding.

    For a weight in block types, `dtype` is that of the hidden states. With a `shard`, the weight holds the rows of the
    rank's tokens; logits and choices are complete on rank 0 only, and the results of other ranks must not be used.
    """

    def __init__(
        self, weight: nn.Parameter | BlockMatrix, dtype: torch.dtype, shard: Shard | None = None, *, is_tied: bool
    ) -> None:
        super().__init__()
        self.weight = weight
        self._is_tied = is_tied
        self._dtype = dtype
        self._shard = shard
        self._packed: Any = None

    def pack(self, quantization: str | None) -> None:
        """Pack as `Linear.pack` does; an embedding keeps the weight that it shares."""
        if isinstance(self.weight, BlockMatrix):
            self._packed = ops.block_linear(self.weight.parts, None, self._dtype, is_kept=self._is_tied)
        else:
            self._packed = pack_linear(self.weight, None, quantization)
        if self._packed is not None:
            del self.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab_size] for `hidden` [n, hidden_size]: float32 if packed, else the model's dtype."""
        logits = self._own_logits(hidden)
        if self._shard is None:
            return logits
        width = self._shard.vocabulary_width
        parts = self.group.gather(F.pad(logits, (0, width - logits.shape[1])))
        return torch.cat(parts, 1)[:, : self._shard.whole.vocab_size] if parts else logits

    def argmax(self, hidden: Tensor, masks: TokenMasks | None = None) -> Tensor:
        """Return `ops.masked_argmax` of the logits of `hidden` [n, hidden_size]; packed weights fuse the two."""
        if self._shard is not None:
            assert masks is None, "the masks of rank 0 need its logits of all tokens"
            return self._argmax_over_ranks(hidden, self._shard)
        return ops.masked_argmax(self(hidden), masks) if self._packed is None else self._packed.argmax(hidden, masks)

    def prepare_argmax(self, hidden: Tensor, tokens: Tensor) -> Callable[[], None] | None:
        """Return a call that writes `argmax` of what is then in `hidden` to `tokens`, int64 [n], both contiguous.

        None if there is no such call: on a GPU, for example, or with a shard.
        """
        return self._packed.prepare_argmax(hidden, tokens) if self._is_prepared else None

    def prepare_logits(self, hidden: Tensor) -> tuple[Callable[[], None], Tensor] | None:
        """Return a call that computes `forward` of what is then in `hidden`, contiguous, and the tensor that gets it.

        None where `prepare_argmax` returns None.
        """
        if not self._is_prepared:
            return None
        logits = torch.empty(len(hidden), self._packed.interface.outputs)
        return self._packed.prepare(hidden, logits), logits

    @property
    def _is_prepared(self) -> bool:
        """Whether products with the weight can be prepared."""
        return self._shard is None and isinstance(self._packed, ops.Product)

    def _own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the tokens whose rows the weight holds."""
        if self._packed is None:
            assert isinstance(self.weight, Tensor)
            return ops.linear(hidden, self.weight)
        logits: Tensor = self._packed(hidden, torch.float32)
        return logits

    def _argmax_over_ranks(self, hidden: Tensor, shard: Shard) -> Tensor:
        """Return the choice among the best tokens of each rank; the ranks gather 16 bytes for each row."""
        logits = self._own_logits(hidden)
        indices = ops.argmax(logits)
        scores = logits.gather(1, indices.clamp(min=0).unsqueeze(1)).squeeze(1)
        tokens = torch.where(indices < 0, indices, indices + shard.vocabulary[0])
        parts = self.group.gather(torch.stack((scores.double(), tokens.double())))
        if not parts:
            return indices
        best, choices = torch.stack(parts, 1)  # [num_ranks, n] each
        # Of equal scores `max` may return any; the lowest token must win, as in `ops.argmax`.
        chosen = torch.where(best == best.amax(0), choices, torch.inf).amin(0)
        failed = (choices < 0).any(0)
        return torch.where(failed, ops.NO_PLACE, chosen).long()
