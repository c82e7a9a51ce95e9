"""What differs where kernels run in Triton's interpreter, on CPU tensors, as in tests without a GPU."""

import torch
import triton
import triton.language as tl

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def product_dtype(dtype: torch.dtype) -> tl.dtype:
    """The type of the factors of a matrix product of `dtype`: its own, but that the interpreter has no bfloat16."""
    return tl.float32 if interpreted() and dtype == torch.bfloat16 else _DTYPES[dtype]
