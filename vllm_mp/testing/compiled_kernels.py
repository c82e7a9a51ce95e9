"""Triton kernels compiled for GPUs that need not be installed, and what their machine code takes of a GPU.

Triton's interpreter must be off.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

from vllm_mp.kernels.reference import FLOAT8
from vllm_mp.kernels.triton import launch

Capability = tuple[int, int]

NUM_PROCESSORS = 132
"""Multiprocessors of an H100 or H200; launches are those for a GPU of this size."""
_LABEL = re.compile(r"\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)(?:[^`;]*`\((\.L_\w+)\))?")
_MATRICES = re.compile(r"swizzled_shared<\{[^}]*order = \[(\d, \d, \d)\]")
"""The order of the dimensions of a tile of several matrices, from the fastest; Triton swizzles by the second."""
_WIDTHS = {"U8": "8", "S8": "8", "U16": "16", "S16": "16", "64": "64", "128": "128"}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    FLOAT8: "fp8e4nv",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_ALIGNED = [["tt.divisibility", 16]]
_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")
"""Of a launch, those that the compiler takes."""


class _Multiprocessor(NamedTuple):
    """Limits of one multiprocessor, from the tables of the CUDA programming guide."""

    warps: int
    programs: int
    shared: int  # bytes


_REGISTERS = 65_536
_RESERVED_SHARED = 1024
"""Bytes of shared memory that each program takes beside its own."""
_MULTIPROCESSORS = {
    (8, 0): _Multiprocessor(64, 32, 164 * 1024),
    (8, 6): _Multiprocessor(48, 16, 100 * 1024),
    (8, 9): _Multiprocessor(48, 24, 100 * 1024),
    (9, 0): _Multiprocessor(64, 32, 228 * 1024),
    (10, 0): _Multiprocessor(64, 32, 228 * 1024),
}


class Compiler:
    """Compiles launches in place of `JITFunction.run`, and keeps what it compiled."""

    def __init__(self, capability: Capability) -> None:
        self.capability = capability
        self.kernels: dict[tuple[str, ...], CompiledKernel] = {}
        """By name, signature, constants and options."""

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """Compile `kernel` as Triton would for these arguments, unless that was done before."""
        values = {**dict(zip(kernel.arg_names, args, strict=False)), **named}
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for i, parameter in enumerate(kernel.params):
            name, value = parameter.name, values[parameter.name]
            specialized = not parameter.do_not_specialize
            if parameter.is_constexpr or (specialized and isinstance(value, int) and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name], attributes[i,] = f"*{_NAMES[value.dtype]}", _ALIGNED
            elif isinstance(value, int):
                signature[name] = "i32"
                if specialized and value % 16 == 0:
                    attributes[i,] = _ALIGNED
            else:
                signature[name] = "fp32"
        options = {name: named[name] for name in _OPTIONS if name in named}
        key = (kernel.__name__, *map(str, (signature, constants, options)))
        if key not in self.kernels:
            target = GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)
            source = ASTSource(kernel, signature, constants, attributes)
            self.kernels[key] = compile_kernel(source, target=target, options=options)


@contextlib.contextmanager
def compiling(capability: Capability, table: dict[str, launch.Options] | None = None) -> Iterator[Compiler]:
    """Compile every launch of a kernel for `capability` instead of running it; results hold whatever memory held.

    Launches on CPU tensors use `table`, by default the options of `launch.py` for that GPU.
    """
    compiler = Compiler(capability)
    options = dict(launch.reasoned(capability)) if table is None else table
    saved = JITFunction.run, launch._table, launch._num_processors
    # A function, unlike a bound method, gets the kernel that it is called on.
    JITFunction.run = lambda kernel, *args, **named: compiler.run(kernel, *args, **named)
    launch._table = lambda *_: options  # type: ignore[assignment]
    launch._num_processors = lambda *_: NUM_PROCESSORS  # type: ignore[assignment]
    try:
        yield compiler
    finally:
        JITFunction.run, launch._table, launch._num_processors = saved


class KernelCode(NamedTuple):
    """What the machine code of one kernel takes. Instructions are counted in the code, not as they run."""

    registers: int  # of a thread
    spills: int  # loads and stores of registers that did not fit
    shared: int  # bytes of a program
    warps: int
    programs: int  # that a multiprocessor holds at a time, by registers, shared memory and warps
    instructions: int
    loop: int  # instructions of the longest innermost loop
    shared_loads: dict[str, int]  # by width in bits, or "matrix"
    global_loads: dict[str, int]  # by width in bits; "async" begins the ones that go to shared memory
    tensor: int  # tensor core instructions
    unswizzled: int  # tiles of several matrices whose rows lie where a matrix load reads them from the same banks
    additions: int  # of float32
    fused: int  # multiplications with an addition that round once
    approximate: int  # divisions that round otherwise than a CPU
    prefetches: int
    starts_early: bool  # whether it is launched before the kernel before it has ended
    too_early: list[str]  # operations before the wait for that kernel that access memory or leave the straight path


def read_code(kernel: CompiledKernel, capability: Capability) -> KernelCode:
    """Return what the machine code of `kernel` takes, from the tools that come with Triton."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(kernel.asm["cubin"])
        usage = _output("cuobjdump", "-res-usage", str(file))
        listing = _output("nvdisasm", "-c", str(file))
    resources = re.search(r"REG:(\d+)", usage)
    assert resources is not None, usage
    code = _parsed(listing)
    operations = [operation for operation, _ in code]
    registers, shared, warps = int(resources[1]), kernel.metadata.shared, kernel.metadata.num_warps
    return KernelCode(
        registers=registers,
        spills=sum(operation.split(".")[0] in ("LDL", "STL") for operation in operations),
        shared=shared,
        warps=warps,
        programs=_programs(registers, shared, warps, _MULTIPROCESSORS[capability]),
        instructions=sum(operation != "NOP" for operation in operations),
        loop=_longest_loop(code),
        shared_loads=_counted(operations, {"LDS": "", "LDSM": "matrix"}),
        global_loads=_counted(operations, {"LDG": "", "LDGSTS": "async "}),
        tensor=sum(operation.split(".")[0] in ("HMMA", "HGMMA", "QGMMA", "QMMA", "IMMA") for operation in operations),
        unswizzled=sum(order.split(", ")[-1] != "0" for order in _MATRICES.findall(kernel.asm["ttgir"])),
        additions=sum(operation.split(".")[0] == "FADD" for operation in operations),
        fused=len(re.findall(r"\bfma\.", kernel.asm["ptx"])),
        prefetches=sum(operation.startswith("CCTL") and "PF2" in operation for operation in operations),
        starts_early=kernel.metadata.launch_pdl,
        too_early=_too_early(operations) if kernel.metadata.launch_pdl else [],
        approximate=len(re.findall(r"\bdiv\.(?:full|approx)", kernel.asm["ptx"])),
    )


def _output(tool: str, *arguments: str) -> str:
    done = subprocess.run([str(_TOOLS / tool), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} cannot read the machine code of a kernel: {done.stderr}")
    return done.stdout


def _parsed(listing: str) -> list[tuple[str, int | None]]:
    """Return the operation of each instruction in a listing, and for branches the index of the target."""
    found: list[tuple[str, str | None]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := _INSTRUCTION.search(line):
            found.append((instruction[1], instruction[2]))
    return [(operation, labels[target] if target else None) for operation, target in found]


def _longest_loop(code: list[tuple[str, int | None]]) -> int:
    """Return the number of instructions of the longest loop that holds no other; 0 if there is no loop."""
    # The branch of an instruction to itself ends the code of every kernel.
    loops = [(target, i) for i, (_, target) in enumerate(code) if target is not None and target < i]
    innermost = [
        (first, last)
        for first, last in loops
        if not any(first <= start and stop <= last and (start, stop) != (first, last) for start, stop in loops)
    ]
    return max((last - first + 1 for first, last in innermost), default=0)


def _too_early(operations: list[str]) -> list[str]:
    """Return the operations before the first wait for earlier kernels that no program may execute there.

    These are accesses to memory other than prefetches and constants of the launch, and branches, which might leave the
    wait out.
    """
    wait = operations.index("ACQBULK") if "ACQBULK" in operations else len(operations)
    forbidden = ("CCTL.IV", "LD", "ST", "ATOM", "RED", "UTMA", "UBLK", "BRA", "BRX", "JMP", "CALL", "RET", "EXIT")
    return [operation for operation in operations[:wait] if operation.startswith(forbidden) and operation[:3] != "LDC"]


def _counted(operations: list[str], kinds: dict[str, str]) -> dict[str, int]:
    """Count loads by width in bits; `kinds` maps their names to what stands before the width."""
    counts: dict[str, int] = {}
    for operation in operations:
        name, *modifiers = operation.split(".")
        if name in kinds:
            width = next((_WIDTHS[modifier] for modifier in modifiers if modifier in _WIDTHS), "32")
            key = kinds[name] if kinds[name] == "matrix" else kinds[name] + width
            counts[key] = counts.get(key, 0) + 1
    return dict(sorted(counts.items()))


def _programs(registers: int, shared: int, warps: int, limits: _Multiprocessor) -> int:
    """Return the number of programs that a multiprocessor holds; a warp gets registers in units of 256."""
    warps_by_registers = _REGISTERS // (-(-registers * 32 // 256) * 256)
    return min(
        limits.programs,
        min(limits.warps, warps_by_registers) // warps,
        limits.shared // (shared + _RESERVED_SHARED),
    )
