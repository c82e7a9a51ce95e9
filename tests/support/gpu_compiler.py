"""Compile every Triton kernel for GPUs that need not be installed; run as a program.

Prints a JSON list of [major, minor, kernel, bytes of shared memory] for some compute capabilities. The launches are
those that the operations make for a step of a model; they are compiled instead of run, so the interpreter must be
off.
"""

import functools
import json
from collections.abc import Callable

import torch

from support.paged_batch import MIXED, PagedBatch
from vllm_mp.kernels.reference import FLOAT8
from vllm_mp.kernels.step_columns import StepColumns
from vllm_mp.kernels.triton import operations
from vllm_mp.testing.compiled_kernels import compiling
from vllm_mp.testing.sampling_cases import draw_params

ATTENTION: dict[tuple[int, int], list[tuple[torch.dtype, int, int, int | None, float | None]]] = {
    (9, 0): [
        (torch.bfloat16, 64, 64, None, None),
        (torch.bfloat16, 128, 128, 512, 30.0),
        (torch.bfloat16, 256, 256, None, None),
    ],
    (8, 6): [
        (torch.float16, 192, 128, None, None),
        (torch.bfloat16, 256, 256, None, None),
        (torch.float32, 128, 128, None, None),
    ],
}
"""By compute capability: dtype, sizes of keys and of values, window and soft cap. These kernels take the longest to
compile, so all but the largest are compiled for one GPU only."""
FLOAT8_CAPABILITIES = [(9, 0), (8, 9)]
"""The compute capabilities of GPUs that have 8-bit floats."""


def call_all(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """Call each operation except attention, in the shapes of a model."""
    hidden = heads * head_dim
    x, weight = torch.ones(8, hidden, dtype=dtype), torch.ones(hidden, dtype=dtype)
    operations.rms_norm(x, weight, 1e-5)
    operations.add_rms_norm(x, x, weight, 1e-5)
    operations.layer_norm(x, weight, weight, 1e-5)
    for activation in (operations.silu_and_mul, operations.gelu, operations.gelu_tanh):
        activation(x)
    q, k, v = torch.ones(8, heads + 2 * kv_heads, head_dim, dtype=dtype).split((heads, kv_heads, kv_heads), 1)
    caches = torch.empty(2, 4, 16, kv_heads, head_dim, dtype=dtype).unbind()
    positions, table = torch.zeros(8, dtype=torch.int64), torch.ones(64, head_dim, dtype=dtype)
    operations.rms_norm(q, table[0], 1e-5)
    operations.rotary(q, k, positions, table)
    operations.write_kv(k, v, *caches, positions)
    operations.rotary_write_kv(q, k, v, positions, table, *caches, positions)
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    for tokens, max_rank in ((8, 16), (100, 128)):
        a, b = torch.ones(2, 3, max_rank, hidden, dtype=dtype), torch.ones(2, max_rank, sum(sizes), dtype=dtype)
        rows, slots = torch.ones(tokens, hidden, dtype=dtype), torch.zeros(tokens, dtype=torch.int32)
        operations.add_adapters(torch.ones(tokens, sum(sizes), dtype=dtype), rows, slots, a, b, sizes)
    for outputs, inputs in ((6144, 4096), (1024, 14_336), (200, 296)):
        x, weight, bias = (torch.ones(size, dtype=dtype) for size in ((16, inputs), (outputs, inputs), (outputs,)))
        operations.linear(x, weight, bias)
    copy_step()
    logits = torch.ones(4, 128_256, dtype=dtype)
    operations.apply_token_masks(logits, torch.ones(4, 4008, dtype=torch.int32), torch.arange(4))
    operations.sample(logits, draw_params([{"top_k": 50}] * len(logits), torch.zeros(4, dtype=torch.float64)))


def copy_step() -> None:
    """Copy the columns of a step, with and without adapters and awaited tokens."""
    tokens, rows = torch.zeros(8, dtype=torch.int64), torch.zeros(9, dtype=torch.int32)
    columns = StepColumns(tokens, tokens, tokens, rows, rows[:8], rows[:8, None], rows[:8], rows[:8])
    operations.fill_awaited(tokens, tokens)
    operations.copy_step(columns, columns, 3, tokens)
    operations.copy_step(columns, columns._replace(adapter_slots=None), 3)


def call_float8(dtype: torch.dtype) -> None:
    """Call the operations with 8-bit floats, in the shapes of a model, and with sizes that fill no tile."""
    for outputs, inputs, groups, counts in ((4096, 4096, 32, (1, 40, 2048)), (200, 300, 1, (1, 2048))):
        weight, bias = torch.empty(outputs, inputs, dtype=FLOAT8), torch.ones(outputs, dtype=dtype)
        scale = torch.ones(outputs if groups == 1 else outputs // 128, groups)
        for rows in counts:
            operations.linear(torch.ones(rows, inputs, dtype=dtype), weight, bias, scale)
    for groups in (1, 32):
        x = torch.ones(8, 8192, dtype=dtype)
        operations.add_rms_norm_rows(x[:, :4096], x[:, 4096:], x[0, :4096], 1e-5, groups)
        operations.silu_and_mul_rows(x, groups)
    q, k, v = torch.ones(8, 48, 128, dtype=dtype).split((32, 8, 8), 1)
    caches = torch.empty(2, 4, 16, 8, 128, dtype=FLOAT8).unbind()
    positions, table = torch.zeros(8, dtype=torch.int64), torch.ones(64, 128, dtype=dtype)
    operations.write_kv(k, v, *caches, positions)
    operations.rotary_write_kv(q, k, v, positions, table, *caches, positions)
    attend(dtype, 128, 128, None, None, FLOAT8)


def attend(
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int,
    window: int | None,
    soft_cap: float | None,
    cache_dtype: torch.dtype | None = None,
) -> None:
    """Call paged attention for a step of decodes and prefills, with decodes in one part and in several."""
    batch = PagedBatch(MIXED, 8, 2, key_dim, 16, value_dim)
    q, k_cache, v_cache = batch.q.to(dtype), *(x.to(cache_dtype or dtype) for x in (batch.k_cache, batch.v_cache))
    for splits in (1, 8):
        metadata = batch.metadata._replace(decode_splits=splits)
        operations.paged_attention(q, k_cache, v_cache, metadata, 0.1, window, soft_cap)
        in_graph = metadata._replace(num_decodes=0, row_counts=metadata.query_start[:2])
        operations.paged_attention(q, k_cache, v_cache, in_graph, 0.1, window, soft_cap)


def main() -> None:
    found = []

    def compile_for(capability: tuple[int, int], call: Callable[[], None]) -> None:
        with compiling(capability) as compiler:
            call()
        found.extend([*capability, key[0], kernel.metadata.shared] for key, kernel in compiler.kernels.items())

    for capability, cases in ATTENTION.items():
        compile_for(capability, lambda: call_all(torch.bfloat16, 32, 8, 128))
        for case in cases:
            compile_for(capability, functools.partial(attend, *case))
    for capability in FLOAT8_CAPABILITIES:
        compile_for(capability, lambda: call_float8(torch.bfloat16))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
