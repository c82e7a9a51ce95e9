"""The library of torch that a process loads in a thread."""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys

from vllm_mp.core.torch_import import torch_library

PROGRAM = """
import sys
from pathlib import Path
from vllm_mp.core.torch_import.torch_library import load_torch_library

load_torch_library()
assert "torch" not in sys.modules
before = "libtorch_cpu.so" in Path("/proc/self/maps").read_text()
import torch
print(before == (torch.version.cuda is None), torch.ones(2, 3).sum().item())
"""


def test_library_of_a_build_for_cpus_is_loaded_before_torch_is_imported():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "6.0"]


def test_builds_for_gpus_and_a_missing_torch_are_left_to_the_import(monkeypatch, tmp_path):
    opened = []
    monkeypatch.setattr(torch_library.ctypes, "CDLL", lambda name: opened.append(name))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    found = importlib.machinery.ModuleSpec("torch", None, is_package=True)
    found.submodule_search_locations = [str(tmp_path)]
    for spec in (found, None):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        torch_library.load_torch_library()
    assert not opened
    (tmp_path / "lib" / "libtorch_cuda.so").unlink()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    torch_library.load_torch_library()
    assert opened, "a build for CPUs"


def test_only_numpy_that_a_user_has_not_limited_is_limited_while_it_is_imported(monkeypatch):
    seen = []
    monkeypatch.setattr(importlib, "import_module", lambda name: seen.append(os.environ["OPENBLAS_NUM_THREADS"]))
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    torch_library._import_modules_with_libraries()
    assert set(seen) == {"1"}
    assert "OPENBLAS_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    torch_library._import_modules_with_libraries()
    assert seen[-1] == os.environ["OPENBLAS_NUM_THREADS"] == "7"
