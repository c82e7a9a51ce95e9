"""The model of the tile instructions computes and faults as Intel's manual says, and as processors with tiles do.

Machine code with tile instructions computes what the model computes: on the processor, or emulated with the model.
"""

import ctypes
import faulthandler
import multiprocessing
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.paged_batch import MIXED, PREFILLS, PagedBatch
from support.random_blocks import random_weight
from support.tile_emulation import IS_X86, TileEmulation, compiled

from vllm_mp.kernels import ops
from vllm_mp.kernels.cpu.block_linear import BlockLinear
from vllm_mp.kernels.cpu.library import Library, load
from vllm_mp.kernels.cpu.packed import PackedLinear
from vllm_mp.machine.cpu_info import runnable_builds

LEAST_NORMAL = np.finfo(np.float32).tiny
Multiply = Callable[..., str | None]

runs_machine_code = pytest.mark.skipif(not IS_X86, reason="the machine code is for x86-64")


def multiply_of(folder: Path, *flags: str) -> Multiply:
    """Return `multiply` of tile_product.cpp, compiled with `flags`."""
    function = compiled("tests/kernels/tile_product.cpp", folder, *flags).multiply
    function.restype = ctypes.c_char_p

    def multiply(
        config: bytes, a: NDArray[Any], b: NDArray[Any], sums: NDArray[Any], *, is_bf16: bool = True
    ) -> str | None:
        fault = function(config, *(x.ctypes.data_as(ctypes.c_void_p) for x in (a, b, sums)), int(is_bf16))
        return None if fault is None else fault.decode()

    return multiply


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Multiply:
    return multiply_of(tmp_path_factory.mktemp("model"), "-DVMP_TILE_MODEL", "-march=native")


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory: pytest.TempPathFactory) -> Multiply:
    return multiply_of(tmp_path_factory.mktemp("machine_code"), "-mamx-tile", "-mamx-bf16", "-mamx-int8")


def configuration(
    sizes: list[tuple[int, int]], palette: int = 1, start_row: int = 0, reserved: int | None = None
) -> bytes:
    """Return a configuration in which tile i has `sizes[i]` rows and bytes per row."""
    sizes = [*sizes, *[(0, 0)] * (8 - len(sizes))]
    rows, row_bytes = zip(*sizes, strict=True)
    config = bytearray(struct.pack("<BB14x8H16x8B8x", palette, start_row, *row_bytes, *rows))
    if reserved is not None:
        config[reserved] = 1
    return bytes(config)


def sizes_of(rows: int, inputs: int, columns: int) -> list[tuple[int, int]]:
    """Return the sizes of tiles for sums, `a` and `b`; `inputs` counts 32-bit words."""
    return [(rows, 4 * columns), (rows, 4 * inputs), (inputs, 4 * columns)]


def flushed(x: NDArray[Any]) -> NDArray[np.float32]:
    x = x.astype(np.float32)
    return np.where(np.abs(x) < LEAST_NORMAL, np.copysign(np.float32(0), x), x)


def bf16_sums(a: NDArray[Any], b: NDArray[Any], sums: NDArray[Any]) -> NDArray[np.float32]:
    """Return what TDPBF16PS makes of `sums` [16, 16], for bits `a` [16, 32] and `b` [16, 32]; sums of pairs in turn."""
    wide_a, wide_b = (flushed((x.astype(np.uint32) << 16).view(np.float32)).astype(np.longdouble) for x in (a, b))
    halves = []
    for half in (0, 1):
        total = np.zeros((16, 16), np.float32)
        for k in range(16):
            total = flushed(wide_a[:, 2 * k + half, None] * wide_b[None, k, half::2] + total)
        halves.append(total)
    return flushed(flushed(sums) + flushed(halves[0] + halves[1]))


def bf16_case(generator: np.random.Generator, scale: float) -> tuple[NDArray[Any], ...]:
    """Return `a` and `b` [16, 32], bits of bfloat16, and `sums` [16, 16]; with a small `scale` products underflow."""
    factors = (generator.standard_normal((2, 16, 32)) * scale).astype(np.float32)
    a, b = (factors.view(np.uint32) >> 16).astype(np.uint16)
    return a, b, (generator.standard_normal((16, 16)) * scale * scale).astype(np.float32)


@pytest.mark.parametrize("scale", [1, 2e-19, 3e-38])
def test_bf16_products_sum_the_halves_of_pairs_separately_and_flush_small_numbers(
    model: Multiply, scale: float
) -> None:
    a, b, sums = bf16_case(np.random.default_rng(0), scale)
    expected = bf16_sums(a, b, sums)
    assert model(configuration(sizes_of(16, 16, 16)), a, b, sums) is None
    assert np.array_equal(sums, expected)
    assert bool(expected.any()) == (scale > 1e-20)


def test_int8_products_are_exact_and_wrap(model: Multiply) -> None:
    generator = np.random.default_rng(0)
    a = generator.integers(0, 256, (16, 64), np.uint8)
    b = generator.integers(-128, 128, (16, 64), np.int8)
    sums = generator.choice([-(2**31), 5, 2**31 - 1], (16, 16)).astype(np.int32)
    exact = sums + np.einsum("mki,kni->mn", a.reshape(16, 16, 4).astype(int), b.reshape(16, 16, 4).astype(int))
    assert model(configuration(sizes_of(16, 16, 16)), a, b, sums, is_bf16=False) is None
    assert np.array_equal(sums, exact.astype(np.int32))
    assert not np.array_equal(sums, exact)


def test_rows_and_bytes_past_the_configuration_are_neither_read_nor_written(model: Multiply) -> None:
    a, b, sums = bf16_case(np.random.default_rng(0), 1)
    before = sums.copy()
    a[3:], b[5:] = 0x7FC0, 0x7FC0
    a[:, 10:], b[:, 14:] = 0x7FC0, 0x7FC0
    assert model(configuration(sizes_of(3, 5, 7)), a, b, sums) is None
    used = (slice(3), slice(7))
    assert np.isfinite(sums).all()
    assert not np.array_equal(sums[used], before[used])
    sums[used] = before[used]
    assert np.array_equal(sums, before)


GOOD = sizes_of(16, 16, 16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (configuration(GOOD, palette=2), "palette 2 is unknown"),
        (configuration(GOOD, palette=0), "no configuration is loaded"),
        (configuration(GOOD, start_row=1), "start row 1"),
        (configuration(GOOD, reserved=5), "reserved byte 5"),
        (configuration(GOOD, reserved=33), "reserved byte 33"),
        (configuration([*GOOD, (17, 64)]), "tile 3 is too large"),
        (configuration([*GOOD, (16, 65)]), "tile 3 is too large"),
        (configuration([*GOOD, (16, 0)]), "tile 3 has rows without bytes"),
        (configuration(GOOD[:2]), "tile 2 is not configured"),
        (configuration([(16, 64), (8, 64), (16, 64)]), "rows differ"),
        (configuration([(16, 60), (16, 64), (16, 64)]), "columns differ"),
        (configuration([(16, 64), (16, 64), (15, 64)]), "other columns than the second rows"),
        (configuration([(16, 62), (16, 64), (16, 62)]), "not a multiple of four bytes"),
    ],
)
def test_what_a_processor_refuses_is_a_fault(model: Multiply, config: bytes, message: str) -> None:
    fault = model(config, *bf16_case(np.random.default_rng(0), 1))
    assert fault is not None
    assert fault.startswith("a tile instruction faults: ")
    assert message in fault


@runs_machine_code
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("scale", [1, 2e-19, 3e-38])
def test_machine_code_computes_what_the_model_computes(model: Multiply, machine_code: Multiply, scale: float) -> None:
    generator = np.random.default_rng(1)
    for rows, inputs, columns in ((16, 16, 16), (1, 16, 16), (7, 3, 5)):
        for is_bf16 in (True, False):
            a, b, sums = bf16_case(generator, scale)
            expected = sums.copy()
            config = configuration(sizes_of(rows, inputs, columns))
            assert model(config, a, b, expected, is_bf16=is_bf16) is None
            assert machine_code(config, a, b, sums, is_bf16=is_bf16) is None
            assert np.array_equal(sums.view(np.int32), expected.view(np.int32))


def multiply_without_configuration(machine_code: Multiply, emulation: TileEmulation) -> None:
    faulthandler.disable()
    with emulation:
        machine_code(configuration(GOOD, palette=0), *bf16_case(np.random.default_rng(0), 1))


@runs_machine_code
def test_emulated_instruction_that_a_processor_refuses_ends_the_process(
    machine_code: Multiply, tile_emulation: TileEmulation, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = (machine_code, tile_emulation)
    process = multiprocessing.get_context("fork").Process(target=multiply_without_configuration, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGABRT
    assert "a tile instruction faults: no configuration is loaded for tile 0" in capfd.readouterr().err


def computed_by(build: Library, threads: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Return products and attention in random cases, for numbers of rows from one to several blocks."""
    monkeypatch.setattr(ops, "library", lambda: build)
    torch.manual_seed(0)
    products: list[PackedLinear | BlockLinear] = []
    for inputs in (576, 36):
        weight = torch.randn(70, inputs).bfloat16()
        products += [PackedLinear(build, weight, None, quantization) for quantization in (None, "int8")]
    for name, inputs in (("Q4_0", 96), ("Q4_1", 256), ("Q2_K", 256), ("Q6_K", 256)):
        parts = [random_weight(name, 40, inputs), random_weight("Q8_0", 30, inputs)]
        products.append(BlockLinear(build, parts, None, torch.bfloat16))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        computed = []
        for product in products:
            x = torch.randn(100, product.interface.inputs).bfloat16()
            computed += [product(x[:rows]) for rows in (1, 5, 16, 17, 33, 100)]
        for steps in (MIXED, PREFILLS):
            batch = PagedBatch(steps, 6, 2, 72, 16)
            caches = (batch.k_cache.bfloat16(), batch.v_cache.bfloat16())
            computed.append(ops.paged_attention(batch.q.bfloat16(), *caches, batch.metadata, 0.125))
        return computed
    finally:
        torch.set_num_threads(before)


@pytest.mark.extended
@pytest.mark.skipif(runnable_builds()[0] not in ("amx", "avx512"), reason="the kernels for tiles also use AVX-512")
@pytest.mark.usefixtures("tiles")
def test_kernels_compute_with_machine_code_what_they_compute_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_code, model = load("amx"), load("amx_model")
    if (machine_code is None or model is None) and shutil.which("g++") is None:
        pytest.skip("no compiler is installed, so the kernels are not built")
    assert machine_code is not None
    assert model is not None
    expected = computed_by(model, 1, monkeypatch)
    for threads in (1, 3):
        for got, right in zip(computed_by(machine_code, threads, monkeypatch), expected, strict=True):
            assert torch.equal(got, right)
