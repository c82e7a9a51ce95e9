"""The command `env`: the facts that a problem report needs."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import vllm_mp
from vllm_mp.cli.terminal.table import size_text
from vllm_mp.config.nodes import HOST_KEY, SERVER_KEY, node_folder
from vllm_mp.machine.control_group import cpu_time_limit
from vllm_mp.machine.cpu_info import KERNEL_BUILDS, KERNELS_VARIABLE, cpu_flags, cpu_name, obstacle
from vllm_mp.machine.host_cpus import cpu_share, default_threads, describe, usable_cpus
from vllm_mp.machine.host_memory import host_memory
from vllm_mp.model_store import cache_root
from vllm_mp.model_store.entries import folder_size

USAGE = "[--json]"

_PACKAGES = (
    "vllm-mp",
    "vllm-mp-client",
    "torch",
    "transformers",
    "tokenizers",
    "huggingface-hub",
    "safetensors",
    "gguf",
    "triton",
    "pyzmq",
    "msgspec",
    "uvloop",
    "numpy",
)
_FEATURES = {
    "AVX2": {"avx2"},
    "AVX-512": {"avx512f"},
    "VNNI": {"avx512_vnni"},
    "BF16": {"avx512_bf16"},
    "AMX": {"amx_tile", "amx_bf16"},
}
"""Features of a processor, and the flags that it has then."""
_PREFIXES = ("VLLM_", "CUDA_", "HF_", "OMP_", "GOMP_", "THP_MEM_", "TOKENIZERS_", "TORCH_", "TRITON_")
_NAMES = ("PYTHONPATH", "TMPDIR", "XDG_CACHE_HOME")
_SECRET = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASSWORD")
_CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+@")
"""The name and the password in a URL."""
_MASK = "***"
_FOLDER_OF_BUILDS = Path(vllm_mp.__file__).parent / "kernels" / "cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="Print a JSON object, with sizes in bytes. Default: lines of text."
    )


def run(args: argparse.Namespace) -> int:
    report = _report()
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    memory, cache = report["memory"], report["cache"]
    limit = memory["cgroup_limit_bytes"]
    rows = [("python", report["python"]), ("platform", report["platform"]), *report["packages"].items()]
    rows += [
        ("cpu", f"{report['cpu']['name']}, {report['cpu']['cores']} cores"),
        ("threads", f"{report['cpu']['threads']} by default, on {report['cpu']['cpus']}"),
        *(("" if number else "placement", line) for number, line in enumerate(report["placement"])),
        ("node", f"this machine is {report['node']['name']}; {report['node']['ranks']}; {report['node']['keys']}"),
        ("features", ", ".join(f"{name}: {'yes' if has else 'no'}" for name, has in report["cpu"]["features"].items())),
        ("kernels", "; ".join([report["kernels"]["build"], *report["kernels"]["others"].values()])),
        (
            "memory",
            f"{size_text(memory['total_bytes'])}, {size_text(memory['available_bytes'])} available, "
            + (f"cgroup limit {size_text(limit)}" if limit is not None else "no cgroup limit"),
        ),
        ("gpu", "; ".join(report["gpus"]) or report["no_gpu"]),
        ("cache", f"{cache['folder']}, {size_text(cache['bytes'])}"),
        *report["environment"].items(),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def _report() -> dict[str, Any]:
    """Return all facts as plain data, sizes in bytes."""
    flags, memory, cache = cpu_flags(), host_memory(), cache_root()
    build, others = _kernels()
    gpus, no_gpu = _gpus()
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": _platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": {
            "name": cpu_name() or platform.machine(),
            "cores": len(usable_cpus()),
            "cpus": describe(usable_cpus()),
            "threads": default_threads(),
            "time_limit": cpu_time_limit(),
            "features": {name: needed <= flags for name, needed in _FEATURES.items()},
        },
        "kernels": {"build": build, "others": others},
        "memory": {
            "total_bytes": memory.total,
            "available_bytes": memory.available,
            "cgroup_limit_bytes": memory.group_limit,
        },
        "placement": _placement(_visible_gpus(len(gpus))),
        "node": {
            "name": socket.gethostname(),
            "ranks": "of R ranks on nnodes=N machines, node K runs K*R/N to (K+1)*R/N - 1",
            "keys": _node_keys(),
        },
        "gpus": gpus,
        "no_gpu": no_gpu,
        "cache": {"folder": str(cache), "bytes": folder_size(cache)},
        "environment": {name: _shown(name, value) for name, value in sorted(os.environ.items()) if _is_ours(name)},
    }


def _node_keys() -> str:
    """Say which keys this machine has for engines on several machines."""
    folder = node_folder()
    names = [path.name for path in (folder / SERVER_KEY, folder / HOST_KEY) if path.exists()]
    return f"keys in {folder}: {', '.join(names) or 'none'}"


def _placement(gpus: list[str]) -> list[str]:
    """Return for some numbers of cores and ranks which GPU, or which CPUs, each rank of each core gets by default."""
    if len(gpus) == 1:
        return [f"one core with one rank on GPU {gpus[0]}; each further one needs a GPU of its own"]
    cpus = usable_cpus()

    def devices_of(core: int, num_cores: int, rank: int, num_ranks: int) -> str:
        if gpus:
            return f"GPU {gpus[core * num_ranks + rank]}"
        return describe(cpu_share(cpu_share(cpus, core, num_cores), rank, num_ranks))

    layouts = [
        (num_cores, size // num_cores)
        for size in (2, 4, 8)
        if size <= (len(gpus) or max(2, len(cpus)))
        for num_cores in (1, 2, 4, 8)
        if num_cores <= size
    ]
    lines = []
    for num_cores, num_ranks in layouts:
        devices = [
            " | ".join(devices_of(core, num_cores, rank, num_ranks) for rank in range(num_ranks))
            for core in range(num_cores)
        ]
        of_cores = "; ".join(f"core {core}: {text}" for core, text in enumerate(devices))
        sizes = f"data_parallel_size={num_cores}, pipeline_parallel_size * tensor_parallel_size={num_ranks}"
        lines.append(f"{sizes}: {of_cores}")
    return lines


def _visible_gpus(num_gpus: int) -> list[str]:
    """Return the numbers or ids of the GPUs that CUDA_VISIBLE_DEVICES leaves, in the order in which cores get them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not num_gpus:
        return [str(number) for number in range(num_gpus)]
    return [name for part in visible.split(",") if (name := part.strip()) not in ("", "-1")]


def _platform() -> str:
    """Return the name of the distribution, if it has one, and the kernel."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()
    return f"{name}, {platform.platform()}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _kernels() -> tuple[str, dict[str, str]]:
    """Return the build of the CPU kernels that a core uses, and why it uses none of the faster ones."""
    others = {}
    chosen = os.environ.get(KERNELS_VARIABLE)
    for name in KERNEL_BUILDS:
        if (reason := obstacle(name)) is not None:
            others[name] = reason
        elif not any(_FOLDER_OF_BUILDS.glob(f"_{name}.*so")):
            others[name] = f"{name} is not built"
        elif chosen is None:
            return name, others
    if chosen is not None:
        return f"{chosen}, chosen by {KERNELS_VARIABLE}", others
    return "none, torch computes", others


def _gpus() -> tuple[list[str], str]:
    """Return name, memory and driver version of each GPU, as `nvidia-smi` prints them, or why there are none."""
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    if shutil.which("nvidia-smi") is None:
        return [], "none (no nvidia-smi)"
    try:
        result = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return [], "unknown (nvidia-smi did not answer within 30 s)"
    if result.returncode:
        return [], f"unknown (nvidia-smi failed: {(result.stdout or result.stderr).strip().partition(chr(10))[0]})"
    return result.stdout.strip().splitlines(), "none"


def _is_ours(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES


def _shown(name: str, value: str) -> str:
    """Return the value of an environment variable without tokens, keys and passwords."""
    return _MASK if _SECRET.search(name) else _CREDENTIALS.sub(f"{_MASK}@", value)
