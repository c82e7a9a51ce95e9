"""What attention needs to know about one step, and the form of a function that computes it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class AttentionMetadata(NamedTuple):
    """Where the tokens of one step stand in the paged KV cache.

    Rows (one per sequence in the step) and their query tokens are laid out consecutively in row order: the
    first `num_decodes` rows have exactly one query token each, the rest are chunks of prefill. Rows may share
    blocks, also blocks that one of them fills in the same step: in each layer the keys and values of the whole
    step are written before attention reads any. The host fields repeat what the tensors hold, so that reading a
    length never waits for the device.
    """

    query_start: Tensor  # int32 [num_rows + 1], first query token of each row, then num_tokens
    seq_lens: Tensor  # int32 [num_rows], context length in tokens, the new ones included
    block_table: Tensor  # int32 [num_rows, max_blocks]; entries past a row's context are never read
    cell_mapping: Tensor  # int64 [num_tokens], the cell of each new token: block * block_size + offset
    query_lens: Sequence[int]  # [num_rows]
    host_seq_lens: Sequence[int]  # [num_rows]
    num_decodes: int
    max_seq_len: int
    isolates: bool = False
    """True: keys and values that are not finite must not affect the queries of earlier tokens of their prefill.

    Some backends always ensure that (`AttentionBackend.isolates`)."""
    decode_splits: int | None = None
    """The number of parts into which a GPU cuts the context of every decode; None lets the kernel choose.

    A graph keeps the number with which it was captured, while contexts grow.
    """
    token_types: Tensor | None = None
    """Int64 [num_tokens], 1 for tokens of the second text of a pair, else 0; None if all are 0. Encoders read it."""
    adapter_slots: Tensor | None = None
    """int32 [num_tokens], the adapter slot of each token (`ops.add_adapters`), -1 for the model without an adapter.

    None: no token of the step has an adapter. Attention does not read it; it travels here to the projections.
    """
    attention_ends: Tensor | None = None
    """int32 [num_tokens], the number of keys from the start of the row that each query sees; None: up to its own.

    The tokens of an image may see one another (Gemma 3): then this is the end of the image, for each of its tokens. The
    whole image is in the row's context. Within a row the numbers do not decrease, and for decodes they are `seq_lens`.
    No graph has them.
    """
    row_counts: Tensor | None = None
    """int32 [2], the number of decodes, which come first, and of rows that do not pad the step.

    Only a graph of steps with prefills has it, with `num_decodes` 0: only the device knows the rows.
    """


class PagedAttention(Protocol):
    """A function with the contract of `ops.paged_attention`."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        /,
    ) -> Tensor: ...
