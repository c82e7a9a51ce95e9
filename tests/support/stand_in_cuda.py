"""A stand-in for CUDA's driver, and cores on CPUs that keep their KV cache in its device memory."""

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil

from vllm_mp.core.worker.memory import kept_memory
from vllm_mp.core.worker.memory.cuda_driver import CudaDriver

DEVICE = 1
"""The only number of a device that the stand-in takes."""
FAILS = "STAND_IN_CUDA_FAILS"
"""Variable with the name of a function that fails."""
EXPORTS_NOTHING = "STAND_IN_CUDA_EXPORTS_NOTHING"
"""Variable in whose presence the device cannot export memory."""
_LIBRARY = "STAND_IN_CUDA_LIBRARY"


@functools.cache
def library() -> str:
    """Return the path of the compiled library; processes that this one starts find it too."""
    if _LIBRARY not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="stand-in-cuda-"))
        atexit.register(shutil.rmtree, folder)
        path = folder / "libcuda.so.1"
        source = Path(__file__).with_suffix(".cpp")
        subprocess.run(["g++", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-o", path, source], check=True)
        os.environ[_LIBRARY] = str(path)
    return os.environ[_LIBRARY]


def driver():
    return CudaDriver(DEVICE, library())


def use():
    """Let the cores of this process, and those forked from it, compute on CPUs in memory of the stand-in."""
    kept_memory.driver_of = lambda device: driver()


def give_to_cores(folder, patch):
    """Let the cores that this process starts do so; `folder` is an empty one, and `patch` pytest's monkeypatch."""
    library()
    lines = (
        "import sys",
        "if 'vllm_mp.core' in sys.orig_argv:",
        "    from support.stand_in_cuda import use",
        "    use()",
    )
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    tests = Path(__file__).parents[1]
    paths = filter(None, [str(folder), str(tests), os.environ.get("PYTHONPATH")])
    patch.setenv("PYTHONPATH", os.pathsep.join(paths))


def mapped_bytes(pid):
    """Return the bytes of device memory that a process maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    ranges = [line.split()[0].split("-") for line in lines if "stand-in-device" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def pids_with_memory():
    """Return the descendants of this process that map device memory."""
    return {child.pid for child in psutil.Process().children(recursive=True) if mapped_bytes(child.pid)}
