"""Logits and token masks for the tests of every implementation of `apply_token_masks`."""

import torch
from torch import Tensor

VOCAB_SIZES = [(1, 1), (31, 1), (96, 3), (200, 9)]
"""Sizes of vocabularies, which are multiples of 32 or not, with words of a mask, as many as needed or more."""


def masked_case(vocab_size: int, num_words: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits with NaN and infinities, masks, and the rows of the masks, which are not all rows.

    The masks allow random tokens, no token, all tokens, and the tokens of every second word.
    """
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(7, vocab_size, generator=generator)
    logits[:, ::5], logits[:, 1::5] = torch.nan, torch.inf
    masks = torch.randint(-(2**31), 2**31, (4, num_words), generator=generator).int()
    masks[1], masks[2] = 0, -1
    masks[3, ::2], masks[3, 1::2] = -1, 0
    return logits.to(dtype), masks, torch.tensor([5, 0, 3, 6])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors of the same dtype are equal, NaN included."""
    return torch.equal(*(x.cpu().view(torch.uint8) for x in (a, b)))
