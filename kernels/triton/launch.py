"""Launch options: how the kernels are cut into programs, for each generation of GPU.

The engine does not tune when it starts. The results of tools/gpu/tune_kernels.py on a GPU lie beside this file
(sm_90.json for compute capability 9.0) and take precedence, key by key, over the tables here. The values of the tables
are reasoned: a tile of queries fills the tensor cores, and tiles of keys with their prefetched successors fit into the
shared memory, 227 KiB per multiprocessor on Hopper and 99 KiB on the smallest supported GPU.
"""

import functools
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import triton

from vllm_mp.kernels.reference import FLOAT8_GROUP

Options = Mapping[str, int]
"""Keyword arguments of one launch: tile sizes (capitals), num_warps, num_stages and maxnreg."""

MAX_HEAD_DIM: Final = 256
"""The longest head that attention takes."""
MIN_HEAD_TILE: Final = 16
"""The least side of a tile in a matrix product."""
SHARED_BYTES: Final = {(9, 0): 232_448, (8, 9): 101_376, (8, 6): 101_376}
"""The bytes of shared memory that a program may have, by compute capability."""
MAX_PARTS: Final = 64
"""The most parts of a decode's context."""
_MAX_PARTS_OF_ROWS: Final = 16_384
"""The same for all rows of a step, which bounds the memory: with 32 heads of 128 elements, a part takes 16 KiB."""
_OUTPUT_TILES: Final = (32, 16)
"""The tiles of outputs that are considered for products of few rows."""
MAX_FEW_ROWS: Final = 16
"""The rows of a tile of the tensor cores, and the most that the kernel for few rows takes."""
_MAX_INPUT_PARTS: Final = 8
"""The most parts of the inputs of a product of few rows."""
_MAX_COPIES: Final = 6
"""The most steps of a product of few rows that a program copies ahead."""
_MERGE_BYTES: Final = 64 * 1024
"""What a multiprocessor reads in the time of the kernel that adds the parts of a product, about two microseconds."""
_SUM_BYTES: Final = 2 * 4 * MAX_FEW_ROWS
"""What the sum of one output in one part takes to write and to read, for `MAX_FEW_ROWS`."""
_TILE_OVERHEAD: Final = 2
"""What the rows of a product cost each tile, in outputs."""

_HOPPER: Final[dict[str, Options]] = {
    # ROWS are queries times heads; KEYS is the number of keys per step of the loop. A warp group of four warps
    # multiplies 64 rows.
    "prefill/16/64": {"ROWS": 128, "KEYS": 128, "num_warps": 8, "num_stages": 3},
    "prefill/16/128": {"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3},
    "prefill/16/256": {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2},
    "prefill/32/64": {"ROWS": 64, "KEYS": 32, "num_warps": 8, "num_stages": 2},
    "prefill/32/128": {"ROWS": 32, "KEYS": 32, "num_warps": 8, "num_stages": 2},
    "prefill/32/256": {"ROWS": 16, "KEYS": 32, "num_warps": 8, "num_stages": 2},
    # Decodes wait for memory, so many bytes must be in flight.
    "decode/16/64": {"KEYS": 128, "num_warps": 4, "num_stages": 3},
    "decode/16/128": {"KEYS": 64, "num_warps": 4, "num_stages": 3},
    "decode/16/256": {"KEYS": 32, "num_warps": 4, "num_stages": 3},
    "decode/8/64": {"KEYS": 128, "num_warps": 4, "num_stages": 4},
    # With more registers only two programs would fit on a multiprocessor.
    "decode/8/128": {"KEYS": 128, "num_warps": 4, "num_stages": 3, "maxnreg": 168},
    "decode/8/256": {"KEYS": 64, "num_warps": 4, "num_stages": 3},
    "decode/32/64": {"KEYS": 64, "num_warps": 4, "num_stages": 2},
    "decode/32/128": {"KEYS": 32, "num_warps": 4, "num_stages": 2},
    "decode/32/256": {"KEYS": 16, "num_warps": 4, "num_stages": 2},
    "merge": {"num_warps": 4},
    # A decode's context is cut until each multiprocessor has PROGRAMS programs, but no finer than TOKENS tokens:
    # merging smaller parts would cost more than they save. The rest of the batch would wait for a part of more than
    # MAX_TOKENS. Of ROWS rows, one program computes the further parts of the long ones.
    "splits": {"PROGRAMS": 2, "TOKENS": 64, "MAX_TOKENS": 2048, "ROWS": 128},
    # In a graph of steps with prefills only the device knows how much attention there is. So many programs for each
    # multiprocessor share it: more than run at a time, so that they even out, but few enough to start without work.
    # Merges of any large batch have as many as run at a time, because most rows have nothing to merge.
    "looping": {"PREFILL": 2, "DECODE": 8, "MERGE": 10},
    # Products of up to MAX_ROWS rows with weights in 16 bits, in 8 bits, and in 8 bits with scales for blocks. A step
    # has SLICES slices, divided among the warps. Two programs of a multiprocessor share SHARED bytes for what they copy
    # ahead. With fewer bytes in a slice, or more warps, Triton stores rows where warps read them from the same banks.
    "linear/16": {
        "MAX_ROWS": 16,
        "SLICES": 4,
        "SLICE_INPUTS": 128,
        "SHARED": 224 * 1024,
        "num_warps": 4,
        "maxnreg": 128,
    },
    "linear/8": {
        "MAX_ROWS": 16,
        "SLICES": 4,
        "SLICE_INPUTS": 256,
        "SHARED": 224 * 1024,
        "num_warps": 4,
        "maxnreg": 128,
    },
    "linear/blocks": {
        "MAX_ROWS": 16,
        "OUTPUT_TILE": 16,
        "SLICES": 4,
        "SLICE_INPUTS": 128,
        "SHARED": 128 * 1024,
        "num_warps": 2,
    },
    # Products of more rows with 8-bit floats: up to 64, and more.
    "fp8/64": {"ROWS": 64, "OUTPUT_TILE": 64, "num_warps": 4, "num_stages": 4},
    "fp8/128": {"ROWS": 128, "OUTPUT_TILE": 128, "num_warps": 8, "num_stages": 4},
    # The inputs are cut into parts until each multiprocessor has PROGRAMS programs, but a part keeps at least TILES
    # tiles.
    "fp8_parts": {"PROGRAMS": 1, "TILES": 4},
    # The bytes of weights that a program of a product of few rows prefetches before the kernel before it has ended; 0:
    # no program starts that early. A power of two.
    "dependent_launch": {"PREFETCH": 64 * 1024},
    # torch multiplies more rows than this if it can, and of fewer rows those beyond MAX_ROWS.
    "fp8_library": {"ROWS": 64},
    # LoRA adapters: up to 16 tokens, and more.
    "lora_shrink/16": {"ROWS": 16, "INPUT_TILE": 128, "num_warps": 4, "num_stages": 2},
    "lora_shrink/64": {"ROWS": 64, "INPUT_TILE": 64, "num_warps": 4, "num_stages": 2},
    "lora_expand/16": {"ROWS": 16, "OUTPUT_TILE": 128, "num_warps": 4, "num_stages": 2},
    "lora_expand/64": {"ROWS": 64, "OUTPUT_TILE": 128, "num_warps": 4, "num_stages": 2},
    # Rows of up to 1, 4 and 16 thousand elements.
    "norm/1024": {"ELEMENTS": 1024, "num_warps": 4},
    "norm/4096": {"ELEMENTS": 4096, "num_warps": 8},
    "norm/16384": {"ELEMENTS": 16384, "num_warps": 16},
    "elementwise": {"ELEMENTS": 1024, "num_warps": 4},
    "heads": {"ELEMENTS": 1024, "num_warps": 4},
    "argmax": {"ELEMENTS": 4096, "num_warps": 8},
    # A row in which more than LIST tokens may pass its first filter is searched as a whole.
    "sample": {"ELEMENTS": 1024, "LIST": 4096, "num_warps": 8},
}

_SMALL: Final[dict[str, Options]] = {
    **_HOPPER,
    "prefill/16/64": {"ROWS": 128, "KEYS": 64, "num_warps": 4, "num_stages": 2},
    "prefill/16/128": {"ROWS": 64, "KEYS": 64, "num_warps": 4, "num_stages": 2},
    "prefill/16/256": {"ROWS": 32, "KEYS": 32, "num_warps": 4, "num_stages": 2},
    "prefill/32/128": {"ROWS": 16, "KEYS": 32, "num_warps": 4, "num_stages": 2},
    "prefill/32/256": {"ROWS": 16, "KEYS": 16, "num_warps": 4, "num_stages": 2},
    "linear/16": {"MAX_ROWS": 16, "SLICES": 2, "SLICE_INPUTS": 64, "SHARED": 96 * 1024, "num_warps": 2},
    "linear/8": {"MAX_ROWS": 16, "SLICES": 2, "SLICE_INPUTS": 128, "SHARED": 96 * 1024, "num_warps": 2},
    "linear/blocks": {"MAX_ROWS": 16, "SLICES": 2, "SLICE_INPUTS": 128, "SHARED": 96 * 1024, "num_warps": 2},
    "fp8/128": {"ROWS": 128, "OUTPUT_TILE": 128, "num_warps": 8, "num_stages": 2},
    "dependent_launch": {"PREFETCH": 0},
}
"""The options for GPUs with less shared memory than Hopper."""

_INTERPRETED: Final[dict[str, Options]] = {
    **_HOPPER,
    **{
        f"{kernel}/{bits}/{dim}": {"ROWS": 32, "KEYS": 16} if kernel == "prefill" else {"KEYS": 16}
        for kernel, bits in itertools.product(("prefill", "decode"), (8, 16, 32))
        if f"{kernel}/{bits}/64" in _HOPPER
        for dim in (64, 128, 256)
    },
    "splits": {"PROGRAMS": 2, "TOKENS": 16, "MAX_TOKENS": 32, "ROWS": 2},
    "looping": {"PREFILL": 1, "DECODE": 1, "MERGE": 1},
    "linear/16": {"MAX_ROWS": 16, "SLICES": 2, "SLICE_INPUTS": 32, "SHARED": 0},
    "linear/8": {"MAX_ROWS": 16, "SLICES": 2, "SLICE_INPUTS": 64, "SHARED": 0},
    "linear/blocks": {"MAX_ROWS": 16, "SLICES": 2, "SLICE_INPUTS": 128, "SHARED": 0},
    **{f"fp8/{rows}": {"ROWS": 16, "OUTPUT_TILE": 32} for rows in (64, 128)},
    "fp8_parts": {"PROGRAMS": 2, "TILES": 1},
    **{f"lora_shrink/{rows}": {"ROWS": 16, "INPUT_TILE": 32} for rows in (16, 64)},
    **{f"lora_expand/{rows}": {"ROWS": 16, "OUTPUT_TILE": 32} for rows in (16, 64)},
    "elementwise": {"ELEMENTS": 64},
    "argmax": {"ELEMENTS": 64},
    "sample": {"ELEMENTS": 32, "LIST": 64},
}
"""The options for the interpreter: small tiles, so that even the small shapes that it has time for need several."""


def options(key: str, device: torch.device) -> Options:
    """Return the options of the launch called `key` on `device`."""
    return table(device)[key]


def table(device: torch.device) -> dict[str, Options]:
    """Return all options on `device`: the dictionary that the kernels read, so that a tuner can change it."""
    return _table(device.type, device.index)


def attention_options(kernel: str, dtype: torch.dtype, head_dim: int, device: torch.device) -> Options:
    """Return the options of the attention kernel "prefill" or "decode" for heads of up to `head_dim` elements.

    `dtype` is the dtype of the queries or, for decodes, of the cache.
    """
    size = next(size for size in (64, 128, MAX_HEAD_DIM) if head_dim <= size)
    return options(f"{kernel}/{8 * dtype.itemsize}/{size}", device)


def norm_options(dim: int, device: torch.device) -> Options:
    """Return the options of a normalisation of rows of `dim` elements."""
    size = next((size for size in (1024, 4096) if dim <= size), 16384)
    return options(f"norm/{size}", device)


def num_splits(num_programs: int, context: int, device: torch.device) -> int:
    """Return the number of parts of a decode's context of at most `context` tokens that keeps the device busy.

    Each part takes `num_programs` programs.
    """
    splits = options("splits", device)
    for_device = -(-splits["PROGRAMS"] * _num_processors(device.type, device.index) // num_programs)
    at_most = -(-context // splits["TOKENS"])
    return min(max(1, min(for_device, at_most)), MAX_PARTS)


def num_looping(kernel: str, num_programs: int, device: torch.device) -> int:
    """Return the number of programs of `kernel` that loop over their shares, where the device knows how much there is.

    `kernel` is "PREFILL", "DECODE" or "MERGE". `num_programs` is the most work that there can be.
    """
    return min(num_programs, options("looping", device)[kernel] * _num_processors(device.type, device.index))


def num_slots(num_rows: int, splits: int, context: int, device: torch.device) -> int:
    """Return the most parts into which a decode's context of at most `context` tokens is cut, `splits` or more."""
    for_context = -(-context // options("splits", device)["MAX_TOKENS"])
    return max(splits, min(for_context, MAX_PARTS, _MAX_PARTS_OF_ROWS // num_rows))


def linear_options(outputs: int, inputs: int, weights: str, device: torch.device) -> Options:
    """Return the options of a product of few rows, with the tile of outputs, the parts of the inputs and the stages.

    `weights` is the kind of weights: "16" or "8" bits, or 8 bits with scales for "blocks". Results do not depend on the
    number of rows up to MAX_ROWS, as these options do not. A tuner's entry for the shape takes precedence.
    """
    tuned = table(device).get(linear_key(outputs, inputs, weights))
    if tuned is not None:
        return tuned
    defaults = options(f"linear/{weights}", device)
    step = defaults["SLICES"] * defaults["SLICE_INPUTS"]
    step_bytes = 2 * step if weights == "16" else step
    processors = _num_processors(device.type, device.index)
    tiles = (defaults["OUTPUT_TILE"],) if "OUTPUT_TILE" in defaults else _OUTPUT_TILES
    tile, parts = _cut_of_product(outputs, -(-inputs // step), step_bytes, processors, tiles)
    # Two programs fit on a multiprocessor, if it has as many, so that one reads while another starts.
    residents = min(2, -(-(-(-outputs // tile) * parts) // processors))
    copies = defaults["SHARED"] // residents // _bytes_of_step(defaults, tile, weights)
    stages = 1 + max(1, min(_MAX_COPIES, copies))
    return {**defaults, "OUTPUT_TILE": tile, "PARTS": parts, "num_stages": stages}


def shared_bytes_of_linear(launch: Options, weights: str) -> int:
    """Return the shared memory that a program of a product of few rows takes.

    It holds the steps that it copies ahead, but at least one, and for scales of blocks the scales of a step.
    """
    tile = launch["OUTPUT_TILE"]
    scales = 4 * launch["SLICES"] * max(tile, MAX_FEW_ROWS) if weights == "blocks" else 0
    return max(1, launch["num_stages"] - 1) * _bytes_of_step(launch, tile, weights) + scales


def fitting(launch: Options, weights: str, shared: int) -> Options:
    """Return options of a product of few rows with at most as many stages as `shared` bytes hold, but at least one."""
    stages = launch["num_stages"]
    while stages > 1 and shared_bytes_of_linear({**launch, "num_stages": stages}, weights) > shared:
        stages -= 1
    return {**launch, "num_stages": stages}


def _bytes_of_step(launch: Options, tile: int, weights: str) -> int:
    """Return the bytes of rows and weights that a step of a product of few rows reads, with tiles of `tile` outputs."""
    return (tile + MAX_FEW_ROWS) * launch["SLICES"] * launch["SLICE_INPUTS"] * (2 if weights == "16" else 1)


def least_shared_bytes(key: str, launch: Options) -> int:
    """Return the shared memory that a program of the entry `key` takes at least: the tiles that it copies ahead.

    Triton adds queries, scores and buffers for other layouts; the compiler of a launch that exceeds the device by them
    says so.
    """
    kind, *details = key.split("/")
    copies = max(1, launch.get("num_stages", 1) - 1)
    if kind in ("prefill", "decode"):
        return copies * 2 * launch["KEYS"] * int(details[1]) * int(details[0]) // 8
    if kind == "linear" and "OUTPUT_TILE" in launch and "num_stages" in launch:
        return shared_bytes_of_linear(launch, details[0])
    if kind == "fp8":
        return copies * (launch["ROWS"] + launch["OUTPUT_TILE"]) * FLOAT8_GROUP
    if kind == "lora_shrink":
        return copies * 2 * launch["INPUT_TILE"] * (launch["ROWS"] + MIN_HEAD_TILE)
    return 0


def linear_key(outputs: int, inputs: int, weights: str) -> str:
    """Return the key of the table for a product of few rows with a weight [outputs, inputs]."""
    return f"linear/{weights}/{outputs}x{inputs}"


@functools.cache
def _cut_of_product(
    outputs: int, steps: int, step_bytes: int, processors: int, tiles: tuple[int, ...]
) -> tuple[int, int]:
    """Return the tile of `tiles` and the number of parts with which the busiest of `processors` reads the least.

    An output has `steps` steps of `step_bytes` bytes. Parts cost a second kernel, which adds them.
    """

    def bytes_of_busiest(cut: tuple[int, int]) -> float:
        tile, parts = cut
        programs = -(-outputs // tile) * parts
        of_program = -(-steps // parts) * step_bytes * (tile + _TILE_OVERHEAD)
        merge = _MERGE_BYTES + parts * outputs * _SUM_BYTES / processors if parts > 1 else 0
        return -(-programs // processors) * of_program + merge

    # Of equal cuts the first is taken, with the fewest parts and the widest tile.
    most = max(1, min(_MAX_INPUT_PARTS, steps))
    return min(((tile, parts) for parts in range(1, most + 1) for tile in tiles), key=bytes_of_busiest)


def num_parts(num_programs: int, num_tiles: int, device: torch.device) -> int:
    """Return the number of parts into which the `num_tiles` tiles of a product's inputs are cut.

    Each part takes `num_programs` programs.
    """
    parts = options("fp8_parts", device)
    for_device = parts["PROGRAMS"] * _num_processors(device.type, device.index) // num_programs
    return max(1, min(for_device, num_tiles // parts["TILES"]))


def reasoned(capability: tuple[int, int]) -> Mapping[str, Options]:
    """Return all options for GPUs of that compute capability without what was measured on one."""
    return _HOPPER if capability in ((9, 0), (10, 0)) else _SMALL


def tuned_file(capability: tuple[int, int]) -> Path:
    """Return the path of the measured options for GPUs of that compute capability."""
    return Path(__file__).with_name(f"sm_{capability[0]}{capability[1]}.json")


@functools.cache
def _table(device_type: str, index: int | None) -> dict[str, Options]:
    if device_type != "cuda":
        return dict(_INTERPRETED)
    capability = torch.cuda.get_device_capability(index)
    file = tuned_file(capability)
    measured: dict[str, Options] = json.loads(file.read_text()) if file.exists() else {}
    limit = shared_bytes(device_type, index)
    for key, launch in measured.items():
        if key.startswith("linear/") and key not in _HOPPER:
            measured[key] = launch = fitting(launch, key.split("/")[1], limit)
        if (needed := least_shared_bytes(key, launch)) > limit:
            raise ValueError(
                f"{file}: {key!r} takes {needed:,} bytes of shared memory, and a program of this GPU has {limit:,}; "
                f"run `python tools/gpu/tune_kernels.py --only {key}` on it, or remove the entry"
            )
    return {**reasoned(capability), **measured}


@functools.cache
def shared_bytes(device_type: str, index: int | None) -> int:
    """Return the bytes of shared memory that a program may have."""
    capability = torch.cuda.get_device_capability(index) if device_type == "cuda" else (9, 0)
    if capability in SHARED_BYTES:
        return SHARED_BYTES[capability]
    properties: Any = torch.cuda.get_device_properties(index)
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def _num_processors(device_type: str, index: int | None) -> int:
    if device_type != "cuda":
        return 4
    processors: int = torch.cuda.get_device_properties(index).multi_processor_count
    return processors


def padded(size: int) -> int:
    """Return the side of a tile that holds `size` elements."""
    side: int = triton.next_power_of_2(size)
    return max(MIN_HEAD_TILE, side)
