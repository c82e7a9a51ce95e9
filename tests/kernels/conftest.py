"""Every build of the C++ kernels that this processor runs, and those for tiles: with a model of the tile instructions,
and with the instructions themselves, which are emulated on processors that have the others of the build `amx`.

All builds but the fastest that this processor runs are left to slow and extended tests, because
`tools/setup-venv test` compiles only that one.
"""

import shutil
from pathlib import Path
from runpy import run_path

import pytest
import setuptools
import torch
from support.item_sample import sample
from support.tile_emulation import TileEmulation

from vllm_mp.kernels import ops
from vllm_mp.kernels.cpu.library import load
from vllm_mp.machine.cpu_info import runnable_builds

_FASTEST, *_OTHERS = runnable_builds()
_HAS_TILES = _FASTEST == "amx"
_EMULATED = ["amx"] if _FASTEST == "avx512" else []
_SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS + _EMULATED]
_MODEL = pytest.param("amx_model", marks=pytest.mark.extended)


def pytest_collection_modifyitems(items):
    """Of the tests with emulated instructions, each of which takes a microsecond or more, keep a sample."""
    emulated = [item for item in items if hasattr(item, "callspec") and item.callspec.params.get("build") in _EMULATED]
    dropped = set(emulated) - set(sample(emulated))
    items[:] = [item for item in items if item not in dropped]


@pytest.fixture(scope="session")
def tile_emulation(tmp_path_factory):
    return TileEmulation(tmp_path_factory.mktemp("tile_emulation"))


@pytest.fixture
def tiles(request):
    """Make instructions on tiles run, on the processor or emulated; then every thread must have released its tiles."""
    if _HAS_TILES:
        yield
        return
    emulation = request.getfixturevalue("tile_emulation")
    with emulation:
        yield
    assert emulation.configured_threads == 0


@pytest.fixture(params=[_FASTEST, *_SLOW, _MODEL])
def build(request, monkeypatch):
    found = load(request.param)
    if found is None and shutil.which("g++") is None:
        pytest.skip("no compiler is installed, so the kernels are not built")
    assert found is not None, "not built although a compiler is installed: run tools/setup-venv test-all"
    if request.param in _EMULATED:
        request.getfixturevalue("tiles")
    monkeypatch.setattr(ops, "library", lambda: found)
    torch.manual_seed(0)
    return found


@pytest.fixture
def set_up(monkeypatch):
    """The names in setup.py."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    return run_path("setup.py")


@pytest.fixture
def three_threads():
    number = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(number)
