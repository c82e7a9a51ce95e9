"""What differs when kernels run in Triton's interpreter, on CPU tensors, as in tests without a GPU."""

import torch
import triton
import triton.language as tl

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def interpreted() -> bool:
    """Tell whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def product_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the type of the factors of a matrix product; the interpreter multiplies bfloat16 as float32."""
    return tl.float32 if interpreted() and dtype == torch.bfloat16 else _DTYPES[dtype]
