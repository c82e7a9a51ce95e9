"""The life of a core process: start, standby, signals, the parent's death, a clean end.

This module imports no torch, which takes a second or more: the address is bound first.
"""

import contextlib
import gc
import io
import logging
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_mp.core.ipc.bound_socket import BoundSocket
from vllm_mp.core.ipc.request_handler import RequestHandler
from vllm_mp.core.parent_watch import wait_for_end_of_parent
from vllm_mp.core.stop_signal import StopSignal
from vllm_mp.core_link.core_description import CoreDescription
from vllm_mp.core_link.core_launch import CoreLaunch
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.machine.host_cpus import bind_process

if TYPE_CHECKING:
    from vllm_mp.core.engine_core import EngineCore
    from vllm_mp.core.parallel.ranks import Ranks

logger = logging.getLogger("vllm_mp.core")

_STOP_GRACE_S = 5.0
"""Time that the loop has to stop after the parent's death, before the process is ended."""
_PARENT_END_S = 2.0
"""Time from the end of the parent's pipe to the end of the parent or its SIGTERM."""
_STANDBY_PARENT_CHECK_MS = 2000
_LINGER_MS = 1000
"""Time that unsent messages have to leave when the socket is closed."""
_FAILED_LINGER_MS = 200
"""The same for a core that failed while it served: the supervisor waits for its end before it starts the next."""
_kept: list[Exception] = []
"""The error that ended the core. Its frames keep all objects of the core alive until the process is gone: after an
error of the device, an object that holds device memory may hang when it is destroyed."""


def main() -> int:
    """Run the core that the launch line on standard input describes; return the exit code, 1 if the core failed.

    With `--standby` the process first imports everything, then waits for its launch line, and returns 0 if none comes.
    A core that a signal stops dies by that signal, so that the parent learns the cause. A core with a public address
    finishes its requests first if the signal is SIGINT.
    """
    _make_output_lossy()
    gc.disable()  # until `_load` has imported everything
    if "--standby" in sys.argv[1:] and not _stand_by():
        return 0
    launch = _read_launch()
    logging.basicConfig(
        level=os.environ.get("VLLM_MP_LOG_LEVEL", "INFO").upper(),
        format="%(asctime)s %(levelname)s core: %(message)s",
        stream=sys.stderr,
    )
    stop = StopSignal()
    stop.listen(drains=launch.public is not None)
    stopped = threading.Event()
    _follow_parent(launch, stop, stopped)
    try:
        failed = _serve(launch, stop)
    finally:
        stopped.set()
    if _parent_has_died(launch, stop):
        _remove_files(launch)
    if stop.signal is not None:
        signal.signal(stop.signal, signal.SIG_DFL)
        signal.raise_signal(stop.signal)
    return 1 if failed else 0


def _serve(launch: CoreLaunch, stop: StopSignal) -> bool:
    """Bind the address, load the model and run; return True if that failed.

    The reason is then logged, and sent to the clients if the address was bound.
    """
    try:
        bound = BoundSocket(launch.address, launch.public)
    except ValueError as error:
        logger.error("%s", error)
        return True
    handler = RequestHandler(
        bound.socket,
        launch.config,
        launch.incarnation,
        operator_key=launch.operator_key,
        predecessor=launch.predecessor,
        is_shared=launch.public is not None,
    )
    core, page, ranks = None, None, None
    try:
        page = StatusPage.create(launch.status_path, launch.incarnation)
        _note_signals(page)
        page.describe(_description(launch))
        page.note_suspension(launch.suspension)  # for the successor, in case this core dies before it serves
        ranks = _start_ranks(launch, page)
        core = _load(launch, page, handler, bound, stop, ranks)
        if core is not None:
            core.run()
            core.close()
        if ranks is not None:
            ranks.close()
        page.enter(CoreState.STOPPED)
        bound.close(_LINGER_MS)
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
        handler.refuse(reason)
        # The page of a core that failed while it served still says what the core was doing.
        if page is not None and core is None:
            page.enter(CoreState.STOPPED)
        return True
    finally:
        if ranks is not None:
            ranks.close(at_once=True)
        bound.close(_LINGER_MS if core is None else _FAILED_LINGER_MS)


def _start_ranks(launch: CoreLaunch, page: StatusPage) -> "Ranks | None":
    """Start the processes of the other ranks, which import and load beside the core; None for a core of one rank."""
    if launch.config.parallel_config.world_size == 1:
        return None
    from vllm_mp.core.parallel.ranks import Ranks

    return Ranks(launch.config, Path(launch.runtime_dir or tempfile.gettempdir()), page.beat)


def _description(launch: CoreLaunch) -> CoreDescription:
    """Return what the core says of itself on its status page."""
    model = launch.config.model_config
    return CoreDescription(
        model=model.served_model_name,
        folders=[model.path, model.tokenizer],
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


def _load(
    launch: CoreLaunch,
    page: StatusPage,
    handler: RequestHandler,
    bound: BoundSocket,
    stop: StopSignal,
    ranks: "Ranks | None",
) -> "EngineCore | None":
    """Return the core with its weights loaded; None if it was told to stop in the meantime.

    `ranks` are the other ranks; None if there are none.

    Raises ValueError, with the remedy, if the configuration does not suit the model or the machine.
    """
    started = time.monotonic()
    if launch.config.device_config.cpus:  # before the imports, which must not take the CPUs of another core
        bind_process(launch.config.device_config.cpus)
    from vllm_mp.core.collectives.group import ALONE
    from vllm_mp.core.engine_core import EngineCore
    from vllm_mp.core.parallel.followers import lead
    from vllm_mp.core.weights.digest import model_digest
    from vllm_mp.core.worker.device import prepare_device
    from vllm_mp.core.worker.memory.plan import memory_to_start
    from vllm_mp.core.worker.model_runner import ModelRunner
    from vllm_mp.core.worker.sampling.registered_processors import RegisteredProcessors

    # Imported objects stay. A garbage collection that visits them would take 0.1 s, now or within a step.
    gc.freeze()
    gc.enable()
    config = launch.config
    device, dtype = prepare_device(config)
    page.enter(CoreState.LOADING)
    processors = RegisteredProcessors(config, device) if config.model_config.logits_processors else None
    faults = None
    if config.liveness_config.fault_injection:
        from vllm_mp.core.fault_hooks.hooks import FaultHooks

        faults = FaultHooks(launch)

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
            runner = ModelRunner(
                config, device, dtype, progress, page.beat, group=group, leader=leader, pipeline=pipeline
            )
        if ranks is not None:
            ranks.wait_until_ready(config.model_config, stop.raise_if_set)
    except StopSignal.Stopped:
        return None
    if faults is not None:
        from vllm_mp.core.ipc.call_handler import CallHandler
        from vllm_mp.core.lora.adapter_cache import AdapterCache
        from vllm_mp.core.structured_output.backends import TrialCompilation

        faults.install(runner, handler)
        faults.install_outside(handler, CallHandler, TrialCompilation, AdapterCache)
    handler.greeting.model_digest = model_digest(config.model_config)
    handler.processors = processors
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


def _read_launch() -> CoreLaunch:
    """Read the launch line from standard input, which stays open: its end means that the parent has died.

    Raises SystemExit if standard input ends before the line does.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65_536)
        if not chunk:
            raise SystemExit(
                "standard input has no launch line: python -m vllm_mp.core is for engines to start; use "
                "`vllm-mp engine` to start a core by hand"
            )
        line += chunk
    return msgspec.json.decode(bytes(line), type=CoreLaunch)


def _follow_parent(launch: CoreLaunch, stop: StopSignal, stopped: threading.Event) -> None:
    """Start a thread that stops the core when its parent dies, and ends the process if the loop does not stop in time.

    `stopped` must be set when the loop has stopped.
    """

    def watch() -> None:
        wait_for_end_of_parent(launch.parent_pid)
        stop.drain = False
        stop.set()
        if not stopped.wait(_STOP_GRACE_S):
            if os.getppid() != launch.parent_pid:
                _remove_files(launch)
            os._exit(1)

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


def _remove_files(launch: CoreLaunch) -> None:
    """Remove the runtime folder and the files of the public address in place of the parent, which has died."""
    if launch.runtime_dir is not None:
        shutil.rmtree(launch.runtime_dir, ignore_errors=True)
    if launch.public is not None:
        launch.public.remove_files()


def _stand_by() -> bool:
    """Import everything that a core needs, then wait; return True when standard input has something to read.

    Return False when standard input ends or the parent dies: no launch will come. A failed import is left to the
    launch, which fails with its message.
    """
    parent = os.getppid()
    with contextlib.suppress(Exception):
        _import_all()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    # A child that the parent forked may hold the other end of the pipe open after the parent's death.
    while not (events := poll.poll(_STANDBY_PARENT_CHECK_MS)) and os.getppid() == parent:
        pass
    return any(event & select.POLLIN for _, event in events)


def _import_all() -> None:
    """Import the modules of a core, and run torch's first operations."""
    import torch

    import vllm_mp.core.engine_core
    import vllm_mp.core.worker.model_runner  # noqa: F401
    from vllm_mp.core.models import import_native_models

    import_native_models()

    # The first operation of each dtype initializes libraries, which takes as long as some imports.
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            torch.nn.functional.linear(torch.ones(32, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype)).sum().item()


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
