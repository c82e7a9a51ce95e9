"""The engines of this user that run on this machine, found by their core processes."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mp.core_description import CoreDescription
from vllm_mp.status_page import VERSION, CoreState, CoreStatus, StatusPage

_SILENT_S = 5.0
"""Age of a heartbeat that is worth telling."""


class RunningEngine(NamedTuple):
    """A core process, with what its status page says."""

    pid: int
    parent_pid: int
    """The client of a private core; the process that keeps a shared core alive."""
    memory: int
    """Resident memory of the core in bytes."""
    problem: str = ""
    """Why nothing else is known; empty otherwise."""
    description: CoreDescription | None = None
    status: CoreStatus | None = None
    num_clients: int = 0
    adapter_folders: tuple[str, ...] = ()

    @property
    def folders(self) -> list[Path]:
        """The folders of its model, tokenizer and LoRA adapters."""
        own = () if self.description is None else self.description.folders
        return [Path(folder).resolve() for folder in (*own, *self.adapter_folders)]

    @property
    def state(self) -> str:
        """What the core is doing, in a few words."""
        status = self.status
        if status is None:
            return "unknown" if self.problem else "starting"
        if status.heartbeat_age > _SILENT_S and status.state in (CoreState.IDLE, CoreState.STEPPING):
            return f"silent for {status.heartbeat_age:.0f} s"
        if status.state == CoreState.LOADING:
            return f"loading {status.load_progress:.0%}"
        if status.suspension.sleep.missing:
            return "asleep"
        if status.suspension.pause:
            return "paused"
        return "running" if status.state == CoreState.STEPPING else status.state.name.lower()

    def report(self) -> dict[str, Any]:
        """Return what is known as plain data, with sizes in bytes and times in seconds."""
        about, status = self.description, self.status
        report: dict[str, Any] = {"pid": self.pid, "parent_pid": self.parent_pid, "state": self.state}
        if about is not None:
            report |= {
                "kind": "shared" if about.address else "private",
                "address": about.address or None,
                "model": about.model,
                "uptime_s": max(0.0, time.time() - about.started),
                "restarts": about.num_restarts,
            }
        if status is not None:
            report |= {
                "clients": self.num_clients,
                "running": status.num_running,
                "waiting": status.num_waiting,
            }
        return report | {"memory_bytes": self.memory, **({"problem": self.problem} if self.problem else {})}


def running_engines() -> list[RunningEngine]:
    """Return the engines, the oldest process first.

    Files that dead engines have left are not looked at: each page is found by the process that has mapped it.
    """
    return sorted(_engines(), key=lambda engine: engine.pid)


def _engines() -> Iterator[RunningEngine]:
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and folder.stat().st_uid == os.geteuid() and _is_core(folder):
                engine = _engine(folder)
                if engine is not None:
                    yield engine
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended meanwhile


def _is_core(process: Path) -> bool:
    arguments = (process / "cmdline").read_bytes().split(b"\0")
    return b"-m" in arguments and b"vllm_mp.core" in arguments


def _engine(process: Path) -> RunningEngine | None:
    """Return the engine of the core process at `/proc/PID`; None for a standby."""
    fields = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
    if "VmRSS" not in fields:
        return None  # it is ending
    engine = RunningEngine(int(process.name), int(fields["PPid"]), 1024 * int(fields["VmRSS"].split()[0]))
    try:
        path = _page_path(process)
        if path is None:
            is_standby = b"--standby" in (process / "cmdline").read_bytes().split(b"\0")
            return None if is_standby else engine
        page = StatusPage.open(path)
        if page is None:
            return engine._replace(problem=_why_unreadable(path))
    except PermissionError as error:
        return engine._replace(problem=f"it cannot be looked at: {error.strerror}")
    status = page.read()
    if status.pid != engine.pid:
        return engine._replace(problem=f"its status page {path} was removed or replaced")
    return engine._replace(
        description=page.description,
        status=status,
        num_clients=page.num_clients,
        adapter_folders=tuple(record.path for record in page.adapters() or ()),
    )


def _page_path(process: Path) -> Path | None:
    """Return the path of the status page that a core has mapped; None if it has not made one yet."""
    for line in (process / "maps").read_text(errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].removesuffix(" (deleted)").endswith(".status"):
            return Path(fields[5].removesuffix(" (deleted)"))
    return None


def _why_unreadable(path: Path) -> str:
    try:
        version = StatusPage.version_at(path)
    except FileNotFoundError:
        return f"its status page {path} was removed"
    if version not in (None, VERSION):
        return (
            f"its status page has version {version}, and this vllm-mp reads version {VERSION}; use the vllm-mp that "
            "started it"
        )
    return f"its status page {path} is not complete"
