"""Token masks by the C++ kernels."""

import torch
from torch import Tensor

from vllm_mp.kernels.cpu.library import DTYPES, Library


def can_mask(logits: Tensor) -> bool:
    """Tell whether the kernels take these logits: on the CPU, of a supported dtype."""
    return logits.device.type == "cpu" and logits.dtype in DTYPES


def apply_token_masks(library: Library, logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Compute `ops.apply_token_masks` for logits that `can_mask` accepts."""
    library.function("apply_token_masks", logits.dtype)(
        logits.data_ptr(),
        logits.shape[1],
        masks.data_ptr(),
        masks.shape[1],
        rows.data_ptr(),
        len(rows),
        torch.get_num_threads(),
    )
