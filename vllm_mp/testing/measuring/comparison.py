"""The figures of engines beside each other: the table, the page and the plot, headed by the machine they are of."""

import datetime
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from vllm_mp.machine.cpu_info import KERNEL_BUILDS, cpu_flags, cpu_name, runnable_builds
from vllm_mp.machine.file_owner import write_output
from vllm_mp.testing.measuring.peers import Figures, is_time
from vllm_mp.testing.measuring.roofline import Ceilings, product_dtype
from vllm_mp.testing.measuring.test_run import commit_of_tree

T = TypeVar("T")

OURS = "vllm_mp"
"""The first word of this engine's names."""
_INSTRUCTION_SETS = {
    "AMX": KERNEL_BUILDS["amx"],
    "AVX-512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "BF16": {"avx512_bf16"},
    "VNNI": {"avx512_vnni"},
    "AVX-VNNI": {"avx_vnni"},
    "AVX2": KERNEL_BUILDS["avx2"],
}
_TITLES = {
    "amx": "with AMX",
    "avx512": "with AVX-512",
    "avx512_vnni": "with AVX-512 and without BF16",
    "avx2": "with AVX2",
    "portable": "without AVX2",
}
_COMMAND = "tools/bench compare --figures docs/figures"


class Machine(NamedTuple):
    """The machine that figures are of."""

    processor: str
    """The processor's name, as the system states it."""
    cores: int
    """Processors that this process may use."""
    instruction_sets: list[str]
    memory_gib: float
    kernels: str
    """The build of this engine's kernels that the machine runs; a key of KERNEL_BUILDS."""

    @staticmethod
    def this() -> "Machine":
        """Return the machine that this process runs on."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        flags = cpu_flags()
        sets = [name for name, needed in _INSTRUCTION_SETS.items() if needed <= flags]
        cores = len(os.sched_getaffinity(0))
        return Machine(cpu_name() or os.uname().machine, cores, sets, round(memory / 2**30, 1), runnable_builds()[0])

    def head(self, ceilings: Ceilings | None, product_dtype: str) -> list[str]:
        """Return the lines that head a table. `ceilings` are the best rates of reads and of products, if measured."""
        lines = [
            f"{self.processor}, {self.cores} cores ({', '.join(self.instruction_sets) or 'no vectors'}), "
            f"{self.memory_gib:,.0f} GiB; this engine's kernels: {self.kernels}"
        ]
        if ceilings is not None:
            lines.append(
                f"reads of {ceilings.bytes / 1e9:.1f} GB/s, "
                f"products of {ceilings.flops / 1e12:.2f} TFLOP/s ({product_dtype})"
            )
        return lines


class Report(NamedTuple):
    """What was measured, and which engines failed."""

    names: list[str]
    """Names of the engines."""
    rows: dict[str, dict[str, list[float]]]
    """The figures of all rounds, by workload and engine."""
    ceilings: list[Ceilings]
    """The best that the processors reached, measured in each round."""
    failures: dict[str, str]
    """When each failed engine failed, and the last line of its error."""
    unmeasured: dict[str, str]
    """Which workloads an engine cannot run, and why, by engine."""

    def attempt(self, engine: str, when: str, task: Callable[[], T]) -> T | None:
        """Return the result of `task`. If it fails, record the failure of `engine` and return None."""
        try:
            return task()
        except Exception as error:  # a peer may fail in any way, and the others are measured nevertheless
            print(f"{engine} failed: {error}", file=sys.stderr)
            last_line = (str(error).strip().splitlines() or [repr(error)])[-1]
            self.failures[engine] = f"{when}: {last_line}"
            return None

    def add(self, engine: str, figures: Figures) -> None:
        """Add the figures of one round."""
        for workload, value in figures.items():
            self.rows.setdefault(workload, {}).setdefault(engine, []).append(value)

    def table(self) -> str:
        """Return medians with the lowest and highest figure, the ratios to the first engine, and the failures."""
        lines = [f"{'tokens/s':<32}" + "".join(f"{name:>30}" for name in self.names)]
        for workload in self.rows:
            cells = []
            for name in self.names:
                ratio = self.ratio(workload, name)
                beside = "" if name == self.names[0] or ratio is None else f"  {ratio:.2f} x"
                cells.append(self.cell(workload, name) + beside)
            lines.append(f"{workload:<32}" + "".join(f"{cell:>30}" for cell in cells))
        return "\n".join([*lines, *self.remarks()])

    def cell(self, workload: str, name: str) -> str:
        """Return the median with the lowest and highest figure; "failed" or "-" if the engine has no figure."""
        values = self.rows[workload].get(name)
        if values is None:
            return "failed" if name in self.failures else "-"
        return f"{statistics.median(values):,.0f} ({min(values):,.0f}-{max(values):,.0f})"

    def remarks(self) -> list[str]:
        """Return why figures are missing: a line for each engine that failed or cannot run a workload of the table."""
        lines = [f"{name} failed in {failure}" for name, failure in self.failures.items()]
        return lines + [
            f"{name}: {reason}"
            for name, reason in self.unmeasured.items()
            if name not in self.failures and any(name not in figures for figures in self.rows.values())
        ]

    def ratio(self, workload: str, name: str, base: str | None = None) -> float | None:
        """Return the ratio of `base`'s figure (the first engine's by default) to that of `name`.

        It is inverted for a time, as less is better; None if a figure is missing.
        """
        figures, base = self.rows[workload], base or self.names[0]
        if base not in figures or name not in figures:
            return None
        first, other = statistics.median(figures[base]), statistics.median(figures[name])
        return other / first if is_time(workload) else first / other

    def median_ceilings(self) -> Ceilings | None:
        """Return the medians of the best rates; None before they are measured."""
        if not self.ceilings:
            return None
        return Ceilings(*(statistics.median(values) for values in zip(*self.ceilings, strict=True)))


class Record(NamedTuple):
    """A comparison as a file keeps it."""

    machine: Machine
    product_dtype: str
    """The dtype of the matrix products among the ceilings."""
    date: str
    commit: str
    report: Report
    limits: list[str]
    """Which shares of the processors' limits this engine reaches, as lines."""

    @staticmethod
    def of(report: Report, limits: Sequence[str]) -> "Record":
        """Return the record of what this machine measured today."""
        date, commit = datetime.datetime.now(datetime.UTC).date().isoformat(), commit_of_tree() or "unknown"
        return Record(Machine.this(), product_dtype(), date, commit, report, list(limits))

    @staticmethod
    def read(path: Path) -> "Record":
        """Read a file that `write` wrote. Raises ValueError if it is not one."""
        try:
            kept = json.loads(path.read_text())
            ceilings = [Ceilings(*pair) for pair in kept["ceilings"]]
            report = Report(kept["engines"], kept["figures"], ceilings, kept["failed"], kept["unmeasured"])
            machine = Machine(**kept["machine"])
            return Record(machine, kept["product_dtype"], kept["date"], kept["commit"], report, kept["limits"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a file of `tools/bench compare`: {error!r}; measure again") from error

    @property
    def rounds(self) -> int:
        """The most rounds that an engine was measured in; an engine that failed has fewer."""
        return max((len(values) for figures in self.report.rows.values() for values in figures.values()), default=0)

    def write(self, path: Path) -> None:
        """Replace the file at `path` by this record."""
        kept = {
            "machine": self.machine._asdict(),
            "product_dtype": self.product_dtype,
            "date": self.date,
            "commit": self.commit,
            "engines": self.report.names,
            "ceilings": self.report.ceilings,
            "figures": self.report.rows,
            "failed": self.report.failures,
            "unmeasured": self.report.unmeasured,
            "limits": self.limits,
        }
        unfinished = path.with_name(path.name + ".partial")
        write_output(unfinished, json.dumps(kept, indent=1) + "\n")
        unfinished.replace(path)

    def page(self, plot: str) -> str:
        """Return the record as a page in Markdown: a table for each type of weights, and the plot of that file name."""
        machine, ceilings = self.machine, self.report.median_ceilings()
        facts = {
            "processor": f"{machine.processor}, {machine.cores} cores ({', '.join(machine.instruction_sets)})",
            "memory": f"{machine.memory_gib:,.0f} GiB" if machine.memory_gib else "",
            "kernels of this engine": f"`{machine.kernels}`",
            "date, commit": f"{self.date}, {self.commit[:8]}" + self.commit[40:],
            "rounds": f"{self.rounds}, in turns",
        }
        if ceilings is not None:
            facts["memory"] += (", " if facts["memory"] else "") + f"reads of {ceilings.bytes / 1e9:.1f} GB/s"
            facts["products of matrices"] = f"{ceilings.flops / 1e12:.2f} TFLOP/s (torch, {self.product_dtype})"
        lines = [
            f"# Figures: beside other engines on a CPU {_TITLES[machine.kernels]}",
            "",
            f"`{_COMMAND}` measures this on such a machine and writes this page;",
            f"[cpu_{machine.kernels}.json](cpu_{machine.kernels}.json) has every round.",
            "[Beside other engines on a CPU](cpu.md) says what is measured.",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in facts.items()),
            "",
            "Tokens per second, or milliseconds where the first column says so: medians (lowest to highest). A ratio",
            "of 2 means that this engine is twice as good.",
        ]
        for weights, names in self._groups().items():
            lines += ["", f"## Weights in {weights}", "", *self._group_table(names)]
        sections = {
            "Figures that are missing": self.report.remarks(),
            "Shares of the limit that reads and products set": self.limits,
        }
        for title, remarks in sections.items():
            if remarks:
                lines += ["", f"## {title}", "", *(f"- {line}" for line in remarks)]
        return "\n".join([*lines, "", f"![Shares of the best]({plot})", ""])

    def _groups(self) -> dict[str, list[str]]:
        """Return the engines by the type of their weights, those that this engine has too first."""
        groups: dict[str, list[str]] = {}
        for name in self.report.names:
            if name not in self.report.failures or any(name in figures for figures in self.report.rows.values()):
                groups.setdefault(weights_of(name), []).append(name)
        return groups

    def _group_table(self, names: Sequence[str]) -> list[str]:
        base = next((name for name in names if name.split()[0] == OURS), None)
        columns = [name for name in names if name != base]
        heads = ([base] if base else []) + [head for name in columns for head in ([name, "ratio"] if base else [name])]
        lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
        for workload, figures in self.report.rows.items():
            if not any(name in figures for name in names):
                continue
            cells = [self.report.cell(workload, base)] if base else []
            for name in columns:
                cells.append(self.report.cell(workload, name))
                if base:
                    ratio = self.report.ratio(workload, name, base)
                    cells.append("" if ratio is None else f"{ratio:.2f}")
            lines.append(f"| {workload} | " + " | ".join(cells) + " |")
        return lines


def weights_of(name: str) -> str:
    """Return the type of weights that the last word of an engine's name states; llama.cpp writes BF16 for bfloat16."""
    format = name.split()[-1]
    return "bfloat16" if format == "BF16" else format


def plot(report: Report, path: Path, title: str = "") -> None:
    """Draw a bar for each engine and workload, as a share of the best engine."""
    import matplotlib
    from matplotlib.figure import Figure

    workloads = list(report.rows)
    names = [name for name in report.names if any(name in figures for figures in report.rows.values())]
    figure = Figure(figsize=(10, 0.9 * len(workloads) + 1), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        for j, workload in enumerate(workloads):
            medians = {engine: statistics.median(values) for engine, values in report.rows[workload].items()}
            if name not in medians:
                continue
            less_is_better = is_time(workload)
            best = min(medians.values()) if less_is_better else max(medians.values())
            share = best / medians[name] if less_is_better else medians[name] / best
            bar = axes.barh(j + i * height, share, height, color=f"C{i}", label=name if j == 0 else None)
            axes.bar_label(bar, [f"{medians[name]:,.0f}"], padding=2, fontsize=7)
    axes.set_yticks([j + height * (len(names) - 1) / 2 for j in range(len(workloads))], workloads)
    axes.invert_yaxis()
    axes.set_xlabel(
        "share of the best engine; the numbers are tokens per second, or milliseconds where the workload says ms"
    )
    if title:
        axes.set_title(title, fontsize=8)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=4, fontsize=8)
    # The same figures give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "bench"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def write_page(record: Record, folder: Path) -> None:
    """Write the page and the plot of a record into `folder`, named after the build of the kernels."""
    name = f"cpu_{record.machine.kernels}"
    head = record.machine.head(record.report.median_ceilings(), record.product_dtype)
    plot(record.report, folder / f"{name}.svg", "\n".join(head))
    write_output(folder / f"{name}.md", record.page(f"{name}.svg"))


def continued(path: Path, names: Sequence[str], unmeasured: Mapping[str, str]) -> Record | None:
    """Return the record at `path`, with the engines `names` added, to add rounds to it; None if there is no file.

    Raises ValueError if it is of another machine, kernels or memory.
    """
    if not path.exists():
        return None
    kept, machine = Record.read(path), Machine.this()
    if kept.machine != machine:
        raise ValueError(f"{path} is of another machine ({kept.machine.processor}); remove it or name another file")
    report = kept.report
    report.names.extend(name for name in names if name not in report.names)
    report.unmeasured.update(unmeasured)
    for name in names:
        report.failures.pop(name, None)
    return kept


def json_path(folder: Path) -> Path:
    """Return the file in `folder` that keeps this machine's figures."""
    return folder / f"cpu_{Machine.this().kernels}.json"
