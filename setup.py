"""Builds the C++ kernels, and in C the client's output path and a signal handler of the core.

Everything else about the package is in pyproject.toml. The environment variable `VLLM_MP_BUILDS` chooses the builds of
the kernels, separated by commas: names of builds, `native` for the fastest build that this processor runs, `all`, the
default, which wheels for other machines need, or `tests` for the other builds that tests run on this processor. One of
these is `amx_model`, in which a model in C++ stands in for the tile instructions, and which is not part of `all`.
"""

import concurrent.futures
import copy
import functools
import glob
import math
import os
import platform
import runpy
import subprocess
import threading
import time

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

FOLDER = "kernels/cpu/csrc"
FLAGS = ["-std=c++17", "-O3", "-g0", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
# Builds that are loaded in one process would share the static variables of inline functions, whose types differ.
FLAGS += ["-fno-gnu-unique"]
BUILDS = {"portable": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    BUILDS["avx2"] = ["-march=x86-64-v3"]
    BUILDS["avx512_vnni"] = ["-march=x86-64-v4", "-mavx512vnni"]
    BUILDS["avx512"] = [*BUILDS["avx512_vnni"], "-mavx512bf16"]
    BUILDS["amx"] = [*BUILDS["avx512"], "-mamx-tile", "-mamx-bf16", "-mamx-int8"]
# Optimized further, it takes g++ four times as long, minutes.
BUILDS["amx_model"] = ["-march=native", "-DVMP_TILE_MODEL", "-O1"]
PROCESSORS = {
    "portable": "any processor",
    "avx2": "AVX2",
    "avx512_vnni": "AVX-512 and VNNI",
    "avx512": "AVX-512, BF16 and VNNI",
    "amx": "AVX-512 and AMX",
    "amx_model": "any processor, for tests",
}
BUILDS_VARIABLE = "VLLM_MP_BUILDS"
KERNELS = "vllm_mp.kernels.cpu"
# Those that take the longest come first.
SOURCES = ("blocks", "attention", "decoder", "kernels", "experts", "lora", "linear")
# What g++ 12 takes for a build on a server of 2021 to 2023.
CPU_SECONDS_OF_BUILD = 60


class ParallelBuild(build_ext):
    """Compiles the sources of all extensions in parallel, one on each processor, and says what it does.

    pip shows what this prints with `-v` only.
    """

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or len(os.sched_getaffinity(0))
        self.slots = threading.Semaphore(self.parallel)
        self.started = time.monotonic()

    def build_extensions(self):
        builds = [name for extension in self.extensions if (name := build_of(extension))]
        seconds = len(builds) * CPU_SECONDS_OF_BUILD / self.parallel
        text = f"compiling the CPU kernels: {', '.join(f'{name} ({PROCESSORS[name]})' for name in builds)}; "
        text += f"about {math.ceil(seconds / 10) * 10} s on {self.parallel} processors"
        if builds != [native := native_build()]:
            text += f"; {BUILDS_VARIABLE}=native compiles only {native}, the fastest that this processor runs"
        report(text)
        super().build_extensions()

    def build_extension(self, extension):
        # Builds of the same source need different places for its object file.
        command = copy.copy(self)
        command.build_temp = os.path.join(self.build_temp, extension.name)
        command.compiler = copy.copy(self.compiler)
        command.compiler.compile = functools.partial(compile_in_parallel, self.slots, self.compiler.compile)
        build_ext.build_extension(command, extension)
        if name := build_of(extension):
            report(f"{name} is compiled, after {time.monotonic() - self.started:.0f} s")


class BuildWithNames(build_py):
    """Puts the modules of `vllm_mp/vllm_names` into the package itself, where type checkers find them."""

    def get_module_outfile(self, build_dir, package, module):
        package = tuple(package)
        if package[:2] == ("vllm_mp", "vllm_names") and (*package[2:], module) != ("__init__",):
            package = ("vllm_mp", *package[2:])
        return super().get_module_outfile(build_dir, package, module)


def report(text):
    print(f"vllm-mp: {text}", flush=True)


def build_of(extension):
    """Return the name of the build of the kernels that an extension is; None for another extension."""
    package, _, name = extension.name.rpartition("._")
    return name if package == KERNELS else None


def compile_in_parallel(slots, compile_files, sources, **options):
    """Compile each of `sources` in a thread of its own; return the object files, in the order of the sources.

    At most as many sources of all extensions are compiled at a time as `slots` has slots.
    """

    def compile_file(source):
        with slots:
            return compile_files([source], **options)

    with concurrent.futures.ThreadPoolExecutor(len(sources)) as pool:
        return [file for files in pool.map(compile_file, sources) for file in files]


def chosen_builds(choice):
    """Return the names of the builds that `choice` asks for. Raises SystemExit if it has an unknown name."""
    chosen = set()
    for name in choice.split(","):
        if name == "native":
            chosen.add(native_build())
        elif name == "all":
            chosen |= BUILDS.keys() - {"amx_model"}
        elif name == "tests":
            chosen |= builds_of_tests()
        elif name in BUILDS:
            chosen.add(name)
        else:
            allowed = ", ".join(["native", "all", "tests", *BUILDS])
            raise SystemExit(f"{BUILDS_VARIABLE}={choice!r}: unknown build {name!r}; give some of {allowed}")
    return [name for name in BUILDS if name in chosen]


def native_build():
    """Return the name of the fastest build that this processor runs and the compiler knows."""
    return next((name for name in runnable_builds() if compiler_knows(BUILDS[name])), "portable")


def builds_of_tests():
    """Return the names of the builds that only tests run on this processor; with AVX-512, they emulate tiles."""
    runnable = {*runnable_builds()}
    emulated = {"amx"} if "avx512" in runnable else set()
    return (runnable | emulated | {"amx_model"}) - {native_build()}


def runnable_builds():
    """Return the names of the builds that this processor runs, the fastest first."""
    runnable = runpy.run_path("vllm_mp/machine/cpu_info.py")["runnable_builds"]()
    return [name for name in runnable if name in BUILDS]


def compiler_knows(flags):
    """Return whether the C++ compiler accepts `flags`."""
    command = [*os.environ.get("CXX", "g++").split(), *flags, "-E", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


EXTENSIONS = [
    *(
        Extension(
            f"{KERNELS}._{name}",
            [f"{FOLDER}/{source}.cpp" for source in SOURCES],
            depends=glob.glob(f"{FOLDER}/*.h"),
            extra_compile_args=[*FLAGS, *BUILDS[name]],
            extra_link_args=["-fopenmp"],
            optional=True,  # without a compiler, torch computes
        )
        for name in chosen_builds(os.environ.get(BUILDS_VARIABLE) or "all")
    ),
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

setup(
    cmdclass={"build_ext": ParallelBuild, "build_py": BuildWithNames},
    # The tree of the client alone lacks the sources of the core and the kernels.
    ext_modules=[extension for extension in EXTENSIONS if os.path.exists(extension.sources[0])],
)
