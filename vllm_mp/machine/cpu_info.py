"""The name and the features of this machine's processor, as the Linux kernel states them, and the kernels for it."""

import ctypes
import os
from pathlib import Path
from typing import Final

KERNELS_VARIABLE: Final = "VLLM_MP_CPU_KERNELS"
"""Environment variable: the name of a build of the C++ kernels, `none` for torch, or `triton` for Triton's kernels in
its interpreter."""
_AVX512_VNNI: Final = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
_AVX512: Final = {*_AVX512_VNNI, "avx512_bf16"}
KERNEL_BUILDS: Final = {
    "amx": {*_AVX512, "amx_tile", "amx_bf16", "amx_int8"},
    "avx512": _AVX512,
    "avx512_vnni": _AVX512_VNNI,
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set[str](),
}
"""The builds of the C++ kernels, the fastest first, and the processor flags that each needs."""

_SYS_ARCH_PRCTL: Final = 158
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_XFEATURE_XTILEDATA: Final = 18


def cpu_flags() -> frozenset[str]:
    """Return the processor's feature flags, such as "avx2"; empty if the system does not tell."""
    return frozenset((_field("flags") or "").split())


def multiplies_bfloat16() -> bool:
    """Return whether the processor has instructions for products in bfloat16."""
    return not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16"})


def runnable_builds() -> list[str]:
    """Return the names of the builds of the C++ kernels that this process can run, the fastest first."""
    return [name for name in KERNEL_BUILDS if obstacle(name) is None]


def obstacle(build: str) -> str | None:
    """Return why this process cannot run a build: missing processor flags, or `refusal`; None if it can."""
    if missing := sorted(KERNEL_BUILDS[build] - cpu_flags()):
        return f"{build} needs {', '.join(missing)}"
    return refusal(build)


def refusal(build: str) -> str | None:
    """Return why the system refuses what the processor could do for a build; None if it refuses nothing.

    A process must ask Linux for permission to use tiles, which has no effect on other processes. Virtual machines and
    containers may be refused it.
    """
    if build != "amx" or not KERNEL_BUILDS[build] <= cpu_flags():
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return None
    return f"{build}: the system refuses permission for tiles ({os.strerror(ctypes.get_errno())})"


def cpu_name() -> str | None:
    """Return the processor's name; None if the system does not tell."""
    return _field("model name")


def _field(name: str) -> str | None:
    """Return the value of the first line of /proc/cpuinfo with this name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
