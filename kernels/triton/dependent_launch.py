"""Programmatic dependent launch: a product of few rows starts while the kernel before it still runs.

The kernel before it, one that `start_dependents`, lets the product's programs start. They move the first of their
weights into the L2 cache, which takes no values to registers and stays coherent with later writes, so it is allowed at
any time. Then they wait until the kernel before has ended and its results are visible, and only then read or write
anything. A kernel that is launched with the attribute must wait in every program, before any access: else its successor
would overtake the kernels before it. All other kernels are launched without, so they wait for the end of the product.

Compute capability 9.0 and later have it. The entry `dependent_launch` of the launch table switches it.
"""

import torch
import triton
import triton.language as tl

from vllm_mp.kernels.triton.interpreter import interpreted
from vllm_mp.kernels.triton.launch import options

_INTERPRETED = interpreted()
LINE_BYTES = tl.constexpr(128)
"""What one prefetch moves."""


def prefetched_bytes(device: torch.device) -> int:
    """Return the bytes of weights that a program prefetches; 0 if kernels are not launched before others end.

    The interpreter runs kernels one after another, and knows none of these instructions.
    """
    return 0 if _INTERPRETED else options("dependent_launch", device)["PREFETCH"]


@triton.jit
def start_dependents(DEPENDENTS: tl.constexpr):
    """Let the programs of the next kernel start, if DEPENDENTS and if it is launched as a dependent."""
    if DEPENDENTS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_and_wait(
    weights,
    num_outputs,
    first_input,
    INPUTS: tl.constexpr,
    OUTPUT_TILE: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """Move weights of OUTPUT_TILE outputs at `weights`, from `first_input` on, to the L2 cache, then wait.

    Rows have INPUTS weights, and `num_outputs` of them exist. PREFETCH is the number of bytes to move.
    """
    ITEMS: tl.constexpr = LINE_BYTES * 8 // weights.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = PREFETCH // LINE_BYTES // OUTPUT_TILE
    output = tl.minimum(tl.arange(0, OUTPUT_TILE), num_outputs - 1)
    column = tl.minimum(first_input + tl.arange(0, LINES) * ITEMS, INPUTS - 1)
    lines = weights + output[:, None] * INPUTS + column[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.extra.cuda.gdc_wait()
