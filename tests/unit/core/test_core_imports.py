"""The library of torch that a core loads in a thread."""

import importlib.machinery
import importlib.util
import inspect
import subprocess
import sys

from vllm_mp.core import core_imports

PROGRAM = """
import sys
from pathlib import Path
from vllm_mp.core.core_imports import load_torch_library

load_torch_library()
assert "torch" not in sys.modules
before = "libtorch_cpu.so" in Path("/proc/self/maps").read_text()
import torch
print(before == (torch.version.cuda is None), torch.ones(2, 3).sum().item())
"""


def test_library_of_a_build_for_cpus_is_loaded_before_torch_is_imported():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "6.0"]


def test_modules_that_are_found_by_name_are_the_usual_ones():
    things = [core_imports, core_imports.import_core, inspect.currentframe(), importlib.machinery.ModuleSpec]
    usual = [inspect.getmodule(thing) for thing in things]
    with core_imports._modules_found_by_name():
        assert [inspect.getmodule(thing) for thing in things] == usual
        assert inspect.getsource(core_imports.import_core).startswith("def import_core")
        assert inspect.getmodule(1) is None
    assert inspect.getmodule.__module__ == "inspect"


def test_builds_for_gpus_and_a_missing_torch_are_left_to_the_import(monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr(core_imports.ctypes, "CDLL", lambda name: opened.append(name))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    found = importlib.machinery.ModuleSpec("torch", None, is_package=True)
    found.submodule_search_locations = [str(tmp_path)]
    for spec in (found, None):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        core_imports.load_torch_library()
    assert not opened
    (tmp_path / "lib" / "libtorch_cuda.so").unlink()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    core_imports.load_torch_library()
    assert opened, "a build for CPUs"
