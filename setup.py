"""Builds the C++ kernels, and in C the client's output path and a signal handler of the core.

Everything else about the package is in pyproject.toml.
"""

import glob
import platform

from setuptools import Extension, setup

SOURCES = "kernels/cpu/csrc"
FLAGS = ["-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
BUILDS = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    BUILDS["avx2"] = ["-march=x86-64-v3"]
    BUILDS["avx512"] = ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"]

setup(
    ext_modules=[
        Extension(
            f"vllm_mp.kernels.cpu._{name}",
            [f"{SOURCES}/kernels.cpp"],
            depends=glob.glob(f"{SOURCES}/*.h"),
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-fopenmp"],
            optional=True,  # without a compiler, torch computes
        )
        for name, flags in BUILDS.items()
    ]
    + [
        Extension(
            "vllm_mp.client.outputs._output_path",
            ["client/outputs/csrc/output_path.c"],
            depends=glob.glob("client/outputs/csrc/*.h"),
            optional=True,  # without a compiler, the same path runs in Python
        ),
        Extension(
            "vllm_mp.core._signal_sender",
            ["core/csrc/signal_sender.c"],
            optional=True,  # without a compiler, signals from other processes are not told from crashes
        ),
    ]
)
