"""The engines of this user that run on this machine, found by their core processes and the parents of these."""

import contextlib
import itertools
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vllm_mp.arguments.config_file import read_options
from vllm_mp.core_link.core_description import CoreDescription
from vllm_mp.core_link.core_status import CoreState, CoreStatus
from vllm_mp.core_link.status_page import VERSION, StatusPage
from vllm_mp.machine.listening_sockets import listening_addresses
from vllm_mp.machine.page_file import page_path

_SILENT_S = 5.0
"""Age of a heartbeat that is worth telling."""
_NOT_READABLE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""The errors of a process that has ended meanwhile or hides its descriptors, as no engine does."""


class RunningEngine(NamedTuple):
    """A core process, with what its status page says; or an engine between two cores."""

    pid: int | None
    """The core process; None while there is none."""
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
    page_location: str = ""
    """Where all cores of the engine have their pages; empty if the core has none yet."""

    @property
    def urls(self) -> list[str]:
        """Where the HTTP server whose core it is listens; [] without one."""
        return _urls_of(self.parent_pid)

    @property
    def name(self) -> str:
        """The process to which the user must turn."""
        return f"the core process {self.pid}" if self.pid else f"the engine of process {self.parent_pid}"

    @property
    def folders(self) -> list[Path]:
        """The folders of its model, tokenizer and LoRA adapters."""
        own = () if self.description is None else self.description.folders
        return [Path(folder).resolve() for folder in (*own, *self.adapter_folders)]

    @property
    def state(self) -> str:
        """What the core is doing, in a few words."""
        status = self.status
        if self.pid is None:
            return "no core"
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
                "urls": self.urls,
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


def server_urls() -> list[str]:
    """Return where the HTTP servers of this user listen on this machine."""
    return sorted({url for process in _own_processes() for url in _urls_of(int(process.name))})


def _urls_of(pid: int) -> list[str]:
    """Return where a process listens if it is `vllm-mp serve`, by an address of this machine; else []."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
    if "serve" not in arguments or not any("vllm" in argument for argument in arguments[: arguments.index("serve")]):
        return []
    options = _options(arguments, f"/proc/{pid}/cwd")
    scheme = "https" if "ssl-certfile" in options else "http"
    if path := options.get("uds"):
        with contextlib.suppress(OSError):
            return [f"{'https+' * (scheme == 'https')}unix:{os.path.join(os.readlink(f'/proc/{pid}/cwd'), path)}"]
    # A server that listens at every address is asked at that of the machine itself.
    local = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    hosts = (address.rpartition(":") for address in listening_addresses(pid))
    return [
        f"{scheme}://{local.get(host, host)}:{port}" for host, _, port in hosts if port != options.get("metrics-port")
    ]


def _options(arguments: list[str], folder: str) -> dict[str, str]:
    """Return the options of a command that runs in `folder`, also of its `--config` file, by names with hyphens."""
    given = {}
    for argument, following in itertools.pairwise([*arguments, ""]):
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            given[name.replace("_", "-")] = value if equals else following
    if path := given.get("config"):
        with contextlib.suppress(ValueError):  # the file has changed meanwhile
            in_file = read_options(os.path.join(folder, path))
            given = {str(name).replace("_", "-"): str(value) for name, value in in_file.items() if value} | given
    return given


def running_engines() -> list[RunningEngine]:
    """Return the engines, the oldest process first.

    Files that dead engines have left are not looked at: each page is found by the process that has mapped it.
    """
    engines = list(_cores())
    dead = list(_dead_cores({engine.pid for engine in engines}))
    return sorted(_joined(engines, dead), key=lambda engine: engine.pid or engine.parent_pid)


def _own_processes() -> Iterator[Path]:
    """Yield the folder in /proc of each process of this user."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended meanwhile
            if folder.name.isdecimal() and folder.stat().st_uid == os.geteuid():
                yield folder


def _cores() -> Iterator[RunningEngine]:
    """Yield the engines that have a core process."""
    for process in _own_processes():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if _is_core(process):
                engine = _engine(process)
                if engine is not None:
                    yield engine


def _dead_cores(alive: Collection[int | None]) -> Iterator[RunningEngine]:
    """Yield an engine without a core for each page that a parent has mapped of a core that is not `alive`."""
    for process in _own_processes():
        with contextlib.suppress(*_NOT_READABLE):
            for descriptor in list((process / "fd").iterdir()):
                with contextlib.suppress(*_NOT_READABLE):
                    path = page_path(os.readlink(descriptor))
                    page = StatusPage.open(descriptor) if path.endswith(".status") else None
                    about = page.description if page is not None else None
                    if page is None or about is None or about.parent_pid != int(process.name):
                        continue
                    if page.read().pid not in alive:
                        location = _page_location(Path(path))
                        yield RunningEngine(None, about.parent_pid, 0, description=about, page_location=location)


def _joined(cores: list[RunningEngine], dead: Iterable[RunningEngine]) -> list[RunningEngine]:
    """Return the engines of `cores`, and the engines of the `dead` cores that have no successor.

    A successor that has not described itself yet is described by its predecessor.
    """
    joined = list(cores)
    for location, engine in {engine.page_location: engine for engine in dead}.items():
        about = engine.description
        children = [core for core in joined if core.pid and core.parent_pid == engine.parent_pid]
        matching = (
            core for core in children if core.page_location == location or not (core.page_location or core.problem)
        )
        successor = next(matching, None)
        if successor is None:
            joined.append(engine)
        elif successor.description is None and about is not None:
            about = msgspec.structs.replace(about, num_restarts=about.num_restarts + 1, started=time.time())
            joined[joined.index(successor)] = successor._replace(description=about, page_location=location)
    return joined


def _page_location(page: Path) -> str:
    """Return where all cores of the engine of a core have their pages: a private folder, or the path at an address."""
    return str(page.parent if re.fullmatch(r"core-\d+\.status", page.name) else page)


def _is_core(process: Path) -> bool:
    """Return whether a process is a core, and not a template or a standby."""
    arguments = set((process / "cmdline").read_bytes().split(b"\0"))
    return arguments.issuperset((b"-m", b"vllm_mp.core")) and arguments.isdisjoint((b"--template", b"--standby"))


def _engine(process: Path) -> RunningEngine | None:
    """Return the engine of the core process at `/proc/PID`; None if it is ending."""
    fields = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
    if "VmRSS" not in fields:
        return None
    engine = RunningEngine(int(process.name), int(fields["PPid"]), 1024 * int(fields["VmRSS"].split()[0]))
    try:
        path = _page_path(process)
        if path is None:
            return engine
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
        page_location=_page_location(path),
    )


def _page_path(process: Path) -> Path | None:
    """Return the path of the status page that a core has mapped; None if it has not made one yet."""
    for line in (process / "maps").read_text(errors="surrogateescape").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and (path := page_path(fields[5])).endswith(".status"):
            return Path(path)
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
