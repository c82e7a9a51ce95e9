"""Tile instructions (Intel AMX) on processors without them, emulated by tile_emulation.cpp."""

import ctypes
import platform
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def compiled(source: str, folder: Path, *flags: str) -> ctypes.CDLL:
    """Compile a C++ file of the repository into a library in `folder`, and load it; skip the test without `g++`."""
    return ctypes.CDLL(str(compiled_program(source, folder, "-shared", "-fPIC", *flags)))


def compiled_program(source: str, folder: Path, *flags: str) -> Path:
    """Compile a C++ file of the repository into a program in `folder`; skip the test without `g++`."""
    program = folder / Path(source).stem
    include = f"-I{ROOT / 'kernels/cpu/csrc'}"
    try:
        subprocess.run(["g++", "-std=c++17", "-O2", include, *flags, ROOT / source, "-o", program], check=True)
    except FileNotFoundError:
        pytest.skip("no compiler is installed")
    return program


class TileEmulation:
    """Within `with`, instructions on tiles compute what the model of them computes, in all threads of the process.

    An instruction that a processor would refuse ends the process.
    """

    def __init__(self, folder: Path) -> None:
        self._library = compiled("tests/support/tile_emulation.cpp", folder, "-march=native")
        self._library.configured_threads.restype = ctypes.c_int64

    def __enter__(self) -> None:
        self._library.start_emulation()

    def __exit__(self, *_: object) -> None:
        self._library.stop_emulation()

    @property
    def configured_threads(self) -> int:
        """How many threads have not released their tiles."""
        return int(self._library.configured_threads())
