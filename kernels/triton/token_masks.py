"""Token masks: a program takes some tokens of one row, and writes -inf over the logits of those that are forbidden."""

import triton
import triton.language as tl
from torch import Tensor

from vllm_mp.kernels.reference import MASK_WORD
from vllm_mp.kernels.triton.launch import options

_MASK_WORD = tl.constexpr(MASK_WORD)


def apply_token_masks(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """See `ops.apply_token_masks`."""
    vocab_size = logits.shape[1]
    launch = options("elementwise", logits.device)
    if len(rows):
        _token_mask_kernel[(len(rows), triton.cdiv(vocab_size, launch["ELEMENTS"]))](
            logits, masks, rows, masks.shape[1], SIZE=vocab_size, **launch
        )


@triton.jit(do_not_specialize=["num_words"])
def _token_mask_kernel(
    logits,  # [n, SIZE]
    masks,  # int32 [masked rows, num_words]
    rows,  # int64 [masked rows]
    num_words,
    SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Apply one mask to ELEMENTS tokens."""
    masked = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    # Words of tokens beyond the vocabulary read as all allowed, so that nothing is written for them.
    word = tl.load(masks + masked * num_words + token // _MASK_WORD, mask=token < SIZE, other=-1)
    is_forbidden = ((word >> (token % _MASK_WORD)) & 1) == 0
    tl.store(logits + tl.load(rows + masked) * SIZE + token, float("-inf"), mask=is_forbidden)
