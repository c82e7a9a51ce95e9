"""Operations on stored logits by the C++ kernels."""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from vllm_mp.kernels.cpu.library import DRAW_COLUMNS, DTYPES, CDraws, CLogprobs, Library
from vllm_mp.kernels.sampling import DrawParams, Logprobs


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
    indices = torch.empty(num_rows, dtype=torch.int64)
    library.function("argmax_rows", scores.dtype)(
        scores.data_ptr(), scores.stride(0), size, num_rows, indices.data_ptr(), torch.get_num_threads()
    )
    return indices


def sample(library: Library, logits: Tensor, params: DrawParams) -> Tensor:
    """Compute `ops.sample` for logits that `can_read` accepts."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    prepare_draws(library, logits, params, tokens)(params.uniform)
    return tokens


def prepare_draws(library: Library, logits: Tensor, params: DrawParams, tokens: Tensor) -> Callable[[Tensor], None]:
    """Return a call that writes `sample` of what is then in `logits` to `tokens`, int64 [n].

    The call takes the random numbers, and does not read `params.uniform`. All tensors must outlive it.
    """
    is_on = {"temperature", *(cut.name for cut in params.filters)}
    draws = CDraws(**{name: getattr(params, name).data_ptr() for name in DRAW_COLUMNS if name in is_on})
    num_rows, size = logits.shape
    call = functools.partial(
        library.function("sample", logits.dtype),
        logits.data_ptr(),
        logits.stride(0),
        size,
        num_rows,
        ctypes.byref(draws),
        tokens.data_ptr(),
        torch.get_num_threads(),
    )

    def draw(uniform: Tensor) -> None:
        draws.uniform = uniform.data_ptr()
        call()

    return draw


def logprobs(library: Library, logits: Tensor, chosen: Tensor, count: int) -> Logprobs:
    """Compute `ops.logprobs` for logits that `can_read` accepts."""
    num_rows, size = logits.shape
    most = min(count, size)
    ids = torch.empty(num_rows, 1 + most, dtype=torch.int32)
    values = torch.empty(num_rows, 1 + most)
    ranks = torch.empty(num_rows, dtype=torch.int64)
    chosen = chosen.contiguous()
    library.function("logprobs", logits.dtype)(
        logits.data_ptr(),
        logits.stride(0),
        size,
        num_rows,
        chosen.data_ptr(),
        ctypes.byref(CLogprobs(most, ids.data_ptr(), values.data_ptr(), ranks.data_ptr())),
        torch.get_num_threads(),
    )
    return Logprobs(ids, values, ranks)
