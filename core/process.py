"""The life of a core process: start, signals, the parent's death, a clean end.

This module imports no torch, which takes a second or more: the address is bound first.
"""

import contextlib
import faulthandler
import gc
import io
import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import zmq

from vllm_mp.core.ipc.bound_socket import BoundSocket
from vllm_mp.core.ipc.request_handler import RequestHandler
from vllm_mp.core.parent_watch import parent_has_ended, wait_for_end_of_parent
from vllm_mp.core.start_times import StartTimes
from vllm_mp.core.stop_signal import StopSignal
from vllm_mp.core.template import LEAVE_MODEL_TEMPLATE, drop_argument, end_standby
from vllm_mp.core.torch_import.rare_parts_of_torch import defer_rare_parts_of_torch, needs_all_of_torch
from vllm_mp.core_link.core_description import CoreDescription
from vllm_mp.core_link.core_launch import STACKS_SIGNAL, CoreLaunch, KeptCache, waiting_path
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.machine.deferred_modules import load_deferred_modules
from vllm_mp.machine.host_cpus import bind_process
from vllm_mp.machine.loading_thread import BESIDE_A_CORE
from vllm_mp.machine.log_setup import set_up_core_log
from vllm_mp.version import __version__
from vllm_mp.wire import PROTOCOL_VERSION, SCHEMA

if TYPE_CHECKING:
    import torch

    from vllm_mp.core.engine_core import EngineCore
    from vllm_mp.core.parallel.ranks import Ranks
    from vllm_mp.core.worker.memory.loaded_model import LoadedModel

logger = logging.getLogger("vllm_mp.core")

_STOP_GRACE_S = 5.0
"""Time that the loop has to stop after the parent's death, before the process is ended."""
_PARENT_END_S = 2.0
"""Time from the end of the parent's pipe to the end of the parent or its SIGTERM."""
_LINGER_MS = 1000
"""Time that unsent messages have to leave when the socket is closed."""
_FAILED_LINGER_MS = 200
"""The same for a core that failed while it served: the supervisor waits for its end before it starts the next."""
_HELLO_WAIT_S = 0.5
"""Time that clients get to say hello to a core that only accepts their connections to refuse them."""
_WAIT_S = 1.0
"""Time between two looks of a process that waits for its turn at what the core has left in the KV cache."""
_unread = bytearray()
"""What has been read of standard input beyond a launch line."""
_kept: list[Exception] = []
"""The error that ended the core. Its frames keep all objects of the core alive until the process is gone: after an
error of the device, an object that holds device memory may hang when it is destroyed."""


def main() -> int:
    """Run the core that the launch line on standard input describes; return the exit code, 1 if the core failed.

    A core that a signal stops dies by that signal, so that the parent learns the cause. A core with a public address
    finishes its requests first if the signal is SIGINT.
    """
    _make_output_lossy()
    faulthandler.register(STACKS_SIGNAL, file=sys.stderr.fileno(), all_threads=True)
    gc.disable()  # until `_load` has imported everything
    launch = _read_launch()
    set_up_core_log("core")
    stop = StopSignal()
    stop.listen(drains=launch.public is not None)
    start = _Start(launch, stop)
    try:
        failed = _serve(start)
    finally:
        start.stopped.set()
    if _parent_has_died(launch, stop):
        start.remove_files()
    if stop.signal is not None:
        signal.signal(stop.signal, signal.SIG_DFL)
        signal.raise_signal(stop.signal)
    return 1 if failed else 0


class _Start:
    """What a core has while it starts."""

    def __init__(self, launch: CoreLaunch, stop: StopSignal) -> None:
        self.launch = launch
        """The latest launch line."""
        self.stop = stop
        self.stopped = threading.Event()
        """Set when the core has stopped."""
        self.page: StatusPage | None = None
        self.template_socket = _template_socket()
        """The socket for a template process with the model, if this core is to leave one."""
        self.bound: BoundSocket | None = None
        self.handler: RequestHandler | None = None
        self.is_public = not (launch.waits or launch.serves_later)
        """Clients can find the core: the public address and the status page are its own."""
        self._has_threads = False
        self._orphan_since: float | None = None
        """When the end of the parent was seen; None: it has not ended."""

    def check_version(self) -> None:
        """Raise ValueError if the parent has another version of the package, whose messages differ."""
        if self.launch.protocol != (PROTOCOL_VERSION, SCHEMA):
            raise ValueError(
                f"the package is now vllm-mp {__version__} with other messages than those of the process that starts "
                "this core; restart that process too"
            )

    def start_threads(self) -> None:
        """Watch the parent, note signals, and open the address unless the core waits for its turn; idempotent.

        Neither the threads nor the notes may be there when a template process or a rank is forked.

        Raises ValueError as `open_address` does.
        """
        if self._has_threads:
            return
        self._has_threads = True
        _follow_parent(self)
        assert self.page is not None
        _note_signals(self.page)
        if not self.launch.waits:
            self.open_address()

    def look_at_parent(self) -> None:
        """Do once what the thread of `_follow_parent` does, before that thread exists."""
        if self._orphan_since is None:
            if parent_has_ended(self.launch.parent_pid):
                self._orphan_since = time.monotonic()
                self.stop.set()
        elif time.monotonic() > self._orphan_since + _STOP_GRACE_S:
            self.end_orphan()

    def open_address(self) -> None:
        """Accept connections at the addresses of the launch. Raises ValueError if that is not possible."""
        launch = self.launch
        self.bound = BoundSocket(launch.address, launch.listener, launch.public if self.is_public else None)
        self.handler = RequestHandler(
            self.bound.socket,
            launch.config,
            launch.incarnation,
            operator_key=launch.operator_key,
            predecessor=launch.predecessor,
            is_shared=launch.public is not None,
        )

    def make_page(self) -> StatusPage:
        """Make the status page, which describes the core unless the core waits for its turn."""
        path = self.launch.status_path
        if path is not None and not self.is_public:
            path = str(waiting_path(Path(path)))
        self.page = StatusPage.create(path, self.launch.incarnation)
        if not self.launch.waits:
            self._describe(self.page)
        return self.page

    def take_turn(self, meanwhile: Callable[[], None]) -> KeptCache | None:
        """Wait, if the launch says so, until there is no other core, and open the address; return where the cache lies.

        `meanwhile` is called once and then every `_WAIT_S` while this waits. Raises `StopSignal.Stopped` if this is not
        to become the core, and ValueError as `open_address` does.
        """
        waiting = self.launch
        if waiting.waits:
            assert self.page is not None
            meanwhile()
            self.page.enter(CoreState.WAITING)
            launch = _read_launch(self.stop, meanwhile)
            end_standby()
            launch.config = waiting.config  # which says what the device and the model have decided
            self.launch = launch
            self.is_public = not launch.serves_later
            self.open_address()
            if self.is_public:
                self._show_page()
            self._describe(self.page)
            self.page.enter(CoreState.LOADING, 1.0)
        return self.launch.kept_cache

    def wait_to_serve(self) -> bool:
        """Answer the parent alone, if the launch says so, until the core may serve; return False if it is told to stop.

        Then open the public address. Raises ValueError if that is not possible.
        """
        if self.is_public:
            return True
        assert self.bound is not None
        assert self.handler is not None
        assert self.page is not None
        poller = zmq.Poller()
        poller.register(self.bound.socket, zmq.POLLIN)
        poller.register(self.stop.fd, zmq.POLLIN)
        poller.register(0, zmq.POLLIN)
        while b"\n" not in _unread:
            events = dict(poller.poll())
            if self.stop.is_set or (0 in events and not _read_more()):
                return False
            self.handler.receive()
        self.is_public = True
        self._show_page()
        if self.launch.public is not None:
            self.bound.listen(self.launch.public)
        return True

    def remove_files(self) -> None:
        """Remove, in place of the parent, which has died, its runtime folder and the files of its public address.

        Until the core serves there, the address is that of another parent.
        """
        launch = self.launch
        if launch.runtime_dir is not None:
            shutil.rmtree(launch.runtime_dir, ignore_errors=True)
        if launch.public is not None and self.is_public:
            launch.public.remove_files()
        elif launch.status_path is not None:
            waiting_path(Path(launch.status_path)).unlink(missing_ok=True)

    def end_orphan(self) -> NoReturn:
        """End the process, whose parent is gone or does not want it any more."""
        if os.getppid() != self.launch.parent_pid:
            self.remove_files()
        os._exit(1)

    def _show_page(self) -> None:
        """Put the status page where clients find it."""
        assert self.launch.status_path is not None
        os.replace(waiting_path(Path(self.launch.status_path)), self.launch.status_path)

    def refuse(self, reason: str) -> None:
        """Tell the clients why there is no core, if they can reach it."""
        wait_s = 0.0
        if self.handler is None and not self.launch.waits:  # they wait for an answer, but none has been read
            wait_s = _HELLO_WAIT_S
            with contextlib.suppress(ValueError):
                self.open_address()
        if self.handler is not None:
            self.handler.refuse(reason, wait_s)

    def close_address(self, linger_ms: int) -> None:
        """Close the address, with time for what is not sent yet; idempotent."""
        if self.bound is not None:
            self.bound.close(linger_ms)

    def _describe(self, page: StatusPage) -> None:
        page.describe(_description(self.launch))
        page.note_suspension(self.launch.suspension)  # for the successor, in case this core dies before it serves


def _serve(start: _Start) -> bool:
    """Bind the address, load the model and run; return True if that failed.

    The reason is then logged, and sent to the clients if the address was bound.
    """
    core, page, ranks = None, None, None
    try:
        start.check_version()
        page = start.make_page()
        ranks = _start_ranks(start.launch, page)
        if start.template_socket is None:
            start.start_threads()
        core = _load(start, page, ranks)
        if core is not None:
            if start.wait_to_serve():
                core.run()
            core.close()
        if ranks is not None:
            ranks.close()
        page.enter(CoreState.STOPPED)
        start.close_address(_LINGER_MS)
        return False
    except Exception as error:
        _kept.append(error)
        gc.disable()  # for the same reason as `_kept`
        if isinstance(error, ValueError) and core is None:
            reason = str(error)  # a mistake in the configuration, explained to the user
            logger.error("%s", reason)
        else:
            reason = f"{type(error).__name__}: {error}"
            logger.exception("the core failed")
        start.refuse(reason)
        # The page of a core that failed while it served still says what the core was doing.
        if page is not None and core is None:
            page.enter(CoreState.STOPPED)
        return True
    finally:
        if ranks is not None:
            ranks.close(at_once=True)
        start.close_address(_LINGER_MS if core is None else _FAILED_LINGER_MS)


def _start_ranks(launch: CoreLaunch, page: StatusPage) -> "Ranks | None":
    """Start the processes of the other ranks, which import and load beside the core; None for a core of one rank."""
    if launch.config.parallel_config.world_size == 1:
        return None
    from vllm_mp.core.parallel.ranks import Ranks

    folder = Path(launch.runtime_dir or tempfile.gettempdir())
    return Ranks(launch.config, folder, page.beat, launch.kept_cache)


def _description(launch: CoreLaunch) -> CoreDescription:
    """Return what the core says of itself on its status page."""
    model = launch.config.model_config
    return CoreDescription(
        model=model.served_model_name,
        folders=[each.path for each in launch.config.models] + [model.tokenizer],
        address=launch.public.address if launch.public is not None else "",
        parent_pid=launch.parent_pid,
        num_restarts=0 if launch.predecessor is None else launch.predecessor.num_restarts,
        started=time.time(),
    )


def _note_signals(page: StatusPage) -> None:
    """Have fatal signals that another process sends noted on `page`, so that no request is blamed for them."""
    with contextlib.suppress(ImportError):  # not compiled: such signals are not told from crashes
        from vllm_mp.core import _signal_sender

        _signal_sender.note_in(page.outside_signal)


def _load(start: _Start, page: StatusPage, ranks: "Ranks | None") -> "EngineCore | None":
    """Return the core with its weights loaded; None if it was told to stop in the meantime.

    `ranks` are the other ranks; None if there are none.

    Raises ValueError, with the remedy, if the configuration does not suit the model or the machine.
    """
    started = time.monotonic()
    times = StartTimes()
    config, stop = start.launch.config, start.stop
    if config.device_config.cpus:  # before the imports, which must not take the CPUs of another core
        bind_process(config.device_config.cpus)
    defer_rare_parts_of_torch()
    import torch

    from vllm_mp.core.collectives.group import ALONE
    from vllm_mp.core.engine_core import EngineCore
    from vllm_mp.core.parallel.followers import lead
    from vllm_mp.core.worker.device import prepare_device
    from vllm_mp.core.worker.memory.plan import memory_to_start
    from vllm_mp.core.worker.model_runner import ModelRunner
    from vllm_mp.core.worker.sampling.registered_processors import RegisteredProcessors
    from vllm_mp.kernels.triton.available import kernel_counts

    # Imported objects stay. A garbage collection that visits them would take 0.1 s, now or within a step.
    gc.freeze()
    gc.enable()
    times.end("imports")
    device, dtype, num_threads = prepare_device(config)
    if needs_all_of_torch(config, device.type):
        load_deferred_modules()
    times.end("device")
    page.enter(CoreState.LOADING)
    processors = RegisteredProcessors(config, device) if config.model_config.logits_processors else None
    faults = None
    if config.liveness_config.fault_injection:
        from vllm_mp.core.fault_hooks.hooks import FaultHooks

        faults = FaultHooks(start.launch)

    def progress(share: float) -> None:
        if stop.is_set:
            raise StopSignal.Stopped
        page.enter(CoreState.LOADING, share)
        if faults is not None:
            faults.while_loading(share)

    try:
        group, pipeline, followers = (ALONE, None, None) if ranks is None else lead(config, ranks, device, stop)
        with memory_to_start(config):
            leader = None if followers is None else followers.leader
            loaded = _loaded_model(start, device, dtype, num_threads, progress)
            torch.set_num_threads(num_threads)
            start.start_threads()
            runner = ModelRunner(
                config,
                device,
                dtype,
                progress,
                page.beat,
                group=group,
                leader=leader,
                pipeline=pipeline,
                take_turn=start.take_turn,
                captures_late=ranks is None,  # all ranks capture the same shapes in the same order
                times=times,
                loaded=loaded,
                former_cache=start.launch.kept_cache if start.launch.waits else None,
                note_model=page.note_model,
            )
        if ranks is not None:
            ranks.wait_until_ready(config.model_config, stop.raise_if_set)
    except StopSignal.Stopped:
        return None
    launch, bound, handler = start.launch, start.bound, start.handler
    assert bound is not None
    assert handler is not None
    if faults is not None:
        from vllm_mp.core.ipc.call_handler import CallHandler
        from vllm_mp.core.lora.adapter_cache import AdapterCache
        from vllm_mp.core.scheduler.cache.seal_table import SealTable
        from vllm_mp.core.structured_output.trial_compilation import TrialCompilation

        faults.install(runner, handler)
        faults.install_sealing(SealTable)
        faults.install_outside(handler, CallHandler, TrialCompilation, AdapterCache)
    has_slow_faults = faults is not None and faults.slow_down
    if device.type != "cpu" or ranks is not None or processors is not None or has_slow_faults:
        page.note_waits()
    handler.greeting.model_digest = runner.digest
    handler.processors = processors
    logger.info("the start took: %s%s", times, kernel_counts)
    logger.info(
        "%s in %s on %s, %d KV blocks of %d tokens, ready after %.1f s, listening on %s",
        config.model_config.model,
        config.model_config.dtype,
        device,
        config.cache_config.num_blocks - 1,
        config.cache_config.block_size,
        time.monotonic() - started,
        launch.address if launch.public is None else launch.public.address,
    )
    return EngineCore(
        config,
        device,
        runner,
        handler,
        bound.socket,
        stop,
        page,
        launch.suspension,
        processors,
        launch.adapters,
        followers,
        launch.tried_constraints,
    )


def _loaded_model(
    start: _Start,
    device: "torch.device",
    dtype: "torch.dtype",
    num_threads: int,
    progress: Callable[[float], None],
) -> "LoadedModel | None":
    """Return the model of the template that has forked this core, or load it to leave such a template; None: neither.

    Raises what loading raises.
    """
    from vllm_mp.core.model_template import held_model, load_with_template

    config, control = start.launch.config, start.template_socket
    if device.type == "cpu" and config.parallel_config.world_size == 1:
        if (held := held_model(config, dtype, progress)) is not None:
            return held
        if control is not None:
            niceness = BESIDE_A_CORE if start.launch.waits else 0
            return load_with_template(
                config, dtype, num_threads, progress, start.look_at_parent, control, _run_forked, niceness
            )
    if control is not None:
        control.close()
    return None


def _template_socket() -> socket.socket | None:
    """Return the socket for the template process that this core is to leave; None: it is to leave none."""
    descriptor = drop_argument(LEAVE_MODEL_TEMPLATE)
    return None if descriptor is None else socket.socket(fileno=int(descriptor))


def _run_forked() -> NoReturn:
    """Run the core that a template process has forked, above the frames of the core that has left the template."""
    _unread.clear()
    exit_code = main()
    logging.shutdown()
    os._exit(exit_code)


def _read_launch(stop: StopSignal | None = None, meanwhile: Callable[[], None] = lambda: None) -> CoreLaunch:
    """Read a launch line from standard input, which stays open: its end means that the parent has died.

    With `stop` calls `meanwhile` every `_WAIT_S`, and raises `StopSignal.Stopped` once `stop` is set, or if standard
    input ends. Without raises SystemExit if standard input ends before the line does.
    """
    while b"\n" not in _unread:
        if stop is not None:
            while not select.select([0, stop.fd], [], [], _WAIT_S)[0]:
                meanwhile()
            stop.raise_if_set()
        is_open = _read_more()
        if not is_open and stop is not None:
            raise StopSignal.Stopped
        if not is_open:
            raise SystemExit(
                "standard input has no launch line: python -m vllm_mp.core is for engines to start; use "
                "`vllm-mp engine` to start a core by hand"
            )
    line, _, rest = bytes(_unread).partition(b"\n")
    _unread[:] = rest
    return msgspec.json.decode(line, type=CoreLaunch)


def _read_more() -> bool:
    """Read from standard input, which has something to read, into `_unread`; return False at its end."""
    chunk = os.read(0, 65_536)
    _unread.extend(chunk)
    return bool(chunk)


def _follow_parent(start: _Start) -> None:
    """Start a thread that stops the core when its parent dies, and ends the process if the loop does not stop in time.

    `start.stopped` must be set when the loop has stopped.
    """
    launch, stop = start.launch, start.stop

    def watch() -> None:
        wait_for_end_of_parent(launch.parent_pid)
        stop.drain = False
        stop.set()
        if not start.stopped.wait(_STOP_GRACE_S):
            start.end_orphan()

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _parent_has_died(launch: CoreLaunch, stop: StopSignal) -> bool:
    """Return whether the parent is gone, or is on its way out.

    The system closes the pipe of a dying parent a moment before it gives the parent's children to another process. A
    parent that lives on and closes the pipe sends SIGTERM next.
    """
    deadline = time.monotonic() + _PARENT_END_S
    while os.getppid() == launch.parent_pid:
        pipe_ended = stop.is_set and stop.signal is None
        if not pipe_ended or time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class _LossyFile(io.FileIO):
    """Discards data that cannot be written."""

    def write(self, data: Any, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(data)
        return len(data)


def _make_output_lossy() -> None:
    """Make writes to standard output and error never fail, even if the disk is full or the reader has gone.

    Standard descriptors that are closed are opened on /dev/null. Otherwise the next opened file would get such a
    descriptor, and with it everything that is printed.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_LossyFile(descriptor, "w", closefd=False)),
            errors="backslashreplace",
            line_buffering=True,
        )
        for descriptor in (1, 2)
    )
