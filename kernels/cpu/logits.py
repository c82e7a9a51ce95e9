"""Operations on stored logits by the C++ kernels."""

import torch
from torch import Tensor

from vllm_mp.kernels.cpu.library import DTYPES, Library


def can_read(logits: Tensor) -> bool:
    """Tell whether the kernels take these logits [n, vocab_size]: on the CPU, of a supported dtype, rows in order."""
    return logits.device.type == "cpu" and logits.dtype in DTYPES and logits.stride(-1) == 1


def apply_token_masks(library: Library, logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Compute `ops.apply_token_masks` for logits that `can_read` accepts."""
    library.function("apply_token_masks", logits.dtype)(
        logits.data_ptr(),
        logits.shape[1],
        masks.data_ptr(),
        masks.shape[1],
        rows.data_ptr(),
        len(rows),
        torch.get_num_threads(),
    )


def argmax(library: Library, scores: Tensor) -> Tensor:
    """Compute `ops.argmax` for scores that `can_read` accepts."""
    num_rows, size = scores.shape
    places = torch.empty(num_rows, dtype=torch.int64)
    library.function("argmax_rows", scores.dtype)(
        scores.data_ptr(), scores.stride(0), size, num_rows, places.data_ptr(), torch.get_num_threads()
    )
    return places
