"""The name and the features of this machine's processor, as the Linux kernel states them, and the kernels for it."""

from pathlib import Path
from typing import Final

KERNELS_VARIABLE: Final = "VLLM_MP_CPU_KERNELS"
"""Environment variable: the name of a build of the C++ kernels, `none` for torch, or `triton` for Triton's kernels in
its interpreter."""
KERNEL_BUILDS: Final = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set[str](),
}
"""The builds of the C++ kernels, the fastest first, and the processor flags that each needs."""


def cpu_flags() -> frozenset[str]:
    """Return the processor's feature flags, such as "avx2"; empty if the system does not tell."""
    return frozenset((_field("flags") or "").split())


def runnable_builds() -> list[str]:
    """Return the names of the builds of the C++ kernels that this processor runs, the fastest first."""
    flags = cpu_flags()
    return [name for name, needs in KERNEL_BUILDS.items() if needs <= flags]


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
