"""Compile launches with various options, and compare their shared memory with what launch.py computes; a program.

Prints a JSON list of [capability, kind, options, computed bytes, compiled bytes].
"""

import json
from collections.abc import Callable, Iterator

import torch

from vllm_mp.kernels.reference import FLOAT8, FLOAT8_GROUP, QuantizedRows
from vllm_mp.kernels.triton import launch, operations
from vllm_mp.testing.attention_steps import scattered_step
from vllm_mp.testing.compiled_kernels import compiling

Capability = tuple[int, int]
OUTPUTS, INPUTS = 256, 4096


def multiply(rows: int, weights: str) -> None:
    """Multiply `rows` rows with weights of the kind `weights`: "16", "8" or "blocks"."""
    if weights == "16":
        operations.linear(torch.empty(rows, INPUTS).bfloat16(), torch.empty(OUTPUTS, INPUTS).bfloat16())
        return
    groups = INPUTS // FLOAT8_GROUP if weights == "blocks" else 1
    x = QuantizedRows(torch.empty(rows, INPUTS, dtype=FLOAT8), torch.empty(rows, groups), torch.bfloat16)
    scale = torch.empty(OUTPUTS // FLOAT8_GROUP if groups > 1 else OUTPUTS, groups)
    operations.linear(x, torch.empty(OUTPUTS, INPUTS, dtype=FLOAT8), None, scale)


def attend(queries: int, head_dim: int, cache_dtype: torch.dtype) -> None:
    metadata, num_blocks = scattered_step([(queries, 300)], 16, "cpu")
    q = torch.empty(queries, 8, head_dim, dtype=torch.bfloat16)
    caches = torch.empty(2, num_blocks, 16, 2, head_dim, dtype=cache_dtype).unbind()
    operations.paged_attention(q, *caches, metadata._replace(decode_splits=1), 0.1)


def adapt(tokens: int) -> None:
    x, out = torch.empty(tokens, INPUTS).bfloat16(), torch.empty(tokens, OUTPUTS).bfloat16()
    a, b = torch.empty(2, 1, 16, INPUTS).bfloat16(), torch.empty(2, 16, OUTPUTS).bfloat16()
    operations.add_adapters(out, x, torch.zeros(tokens, dtype=torch.int32), a, b, [OUTPUTS])


def cases(capability: Capability) -> Iterator[tuple[str, launch.Options, str, Callable[[], None]]]:
    """Yield entries of the table, their options, kernels and calls."""
    table = launch.reasoned(capability)
    has_float8 = capability >= (8, 9)
    for weights in ("16", "8", "blocks") if has_float8 else ("16",):
        key = launch.linear_key(OUTPUTS, INPUTS, weights)
        for tile, stages in ((16, 1), (16, 4), (32, 2), (64, 1), (64, 4)):
            options = {**table[f"linear/{weights}"], "OUTPUT_TILE": tile, "PARTS": 1, "num_stages": stages}
            yield key, options, "_few_rows_kernel", lambda weights=weights: multiply(1, weights)
    for stages in (2, 3):
        for bits, dtype in (("16", torch.bfloat16), ("8", FLOAT8)) if has_float8 else (("16", torch.bfloat16),):
            key = f"decode/{bits}/128"
            options = {**table[key], "num_stages": stages}
            yield key, options, "_decode_kernel", lambda dtype=dtype: attend(1, 128, dtype)
        key = "prefill/16/128"
        yield key, {**table[key], "num_stages": stages}, "_prefill_kernel", lambda: attend(300, 128, torch.bfloat16)
        if has_float8:
            yield "fp8/64", {**table["fp8/64"], "num_stages": stages}, "_product_kernel", lambda: multiply(40, "8")
        key = "lora_shrink/64"
        yield key, {**table[key], "num_stages": stages}, "_shrink_kernel", lambda: adapt(40)


def main() -> None:
    found = []
    for capability in ((9, 0), (8, 9), (8, 6)):
        for key, options, kernel, call in cases(capability):
            with compiling(capability, {**launch.reasoned(capability), key: options}) as compiler:
                call()
            compiled = max(code.metadata.shared for name, code in compiler.kernels.items() if name[0] == kernel)
            found.append(
                [capability, key.split("/")[0], dict(options), launch.least_shared_bytes(key, options), compiled]
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
