"""The command `env`: the facts that a bug report needs."""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys

from vllm_mp.cpu_info import cpu_name
from vllm_mp.model_store import cache_root

USAGE = ""
HELP = "Print versions, machine, paths and settings for a bug report."

_PACKAGES = (
    "vllm-mp",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "triton",
    "pyzmq",
    "msgspec",
    "uvloop",
    "numpy",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command takes no arguments."""


def run(args: argparse.Namespace) -> int:
    rows = [("python", f"{platform.python_version()} ({sys.executable})"), ("platform", platform.platform())]
    rows += [(name, _version(name)) for name in _PACKAGES]
    rows += [
        ("cpu", f"{cpu_name() or platform.machine()}, {len(os.sched_getaffinity(0))} cores"),
        ("memory", f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB"),
        ("gpu", _gpus()),
        ("cache", str(cache_root())),
    ]
    rows += [(name, value) for name, value in sorted(os.environ.items()) if name.startswith(("VLLM_MP_", "CUDA_"))]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _gpus() -> str:
    """Return name, memory and driver version of each GPU, as `nvidia-smi` prints them."""
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    if shutil.which("nvidia-smi") is None:
        return "none (no nvidia-smi)"
    result = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=30, check=False)
    return result.stdout.strip().replace("\n", "; ") or "none"
