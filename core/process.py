"""The life of a core process: start, signals, the parent's death, a clean end."""

import contextlib
import gc
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from vllm_mp.core.ipc.bound_socket import BoundSocket
from vllm_mp.core.ipc.request_handler import RequestHandler
from vllm_mp.core.lossy_output import make_output_lossy
from vllm_mp.core.standby import wait_for_launch
from vllm_mp.core.stop_signal import StopSignal
from vllm_mp.core_launch import CoreLaunch
from vllm_mp.status_page import CoreState, StatusPage

if TYPE_CHECKING:
    from vllm_mp.core.engine_core import EngineCore

logger = logging.getLogger("vllm_mp.core")

_STOP_GRACE_S = 5.0
_LINGER_MS = 1000
_FAILED_LINGER_MS = 200
"""Less, because somebody waits for the end of this core to start the next."""
_kept: list[Exception] = []
"""What has ended the core, and by its frames all that the core had, until the process is gone without taking anything
apart: after an error of the device, what lies there may hang when it is destroyed."""


def main() -> int:
    """Run a core as the launch line on standard input says; returns the exit code.

    With `--standby` it is imported first, and ends with 0 if there is no such line.
    A stand-alone core that is told to stop ends with 0. One that belongs to a parent and is stopped by a signal from
    elsewhere dies by that signal, so that the parent learns the cause.
    """
    make_output_lossy()
    gc.disable()
    if "--standby" in sys.argv[1:] and not wait_for_launch():
        return 0
    launch = _read_launch()
    logging.basicConfig(
        level=os.environ.get("VLLM_MP_LOG_LEVEL", "INFO").upper(),
        format="%(asctime)s %(levelname)s core: %(message)s",
        stream=sys.stderr,
    )
    stop = StopSignal()
    stop.listen(drains=not launch.supervised)
    stopped = threading.Event()
    if launch.supervised:
        _follow_parent(launch, stop, stopped)
    try:
        failed = _serve(launch, stop)
    finally:
        stopped.set()
    if launch.supervised and os.getppid() != launch.parent_pid:
        _remove_runtime_dir(launch)
    if launch.supervised and stop.signal is not None:
        signal.signal(stop.signal, signal.SIG_DFL)
        signal.raise_signal(stop.signal)
    return 1 if failed else 0


def _serve(launch: CoreLaunch, stop: StopSignal) -> bool:
    """Bind, load, run; True if that failed for a reason that has been logged and told to the clients."""
    try:
        listener = BoundSocket(launch.address, launch.key_file)
    except ValueError as error:
        logger.error("%s", error)
        return True
    server = RequestHandler(listener.socket, launch.config, launch.incarnation)
    core, page = None, None
    try:
        page = StatusPage.create(launch.status_path, launch.incarnation)
        core = _load(launch, page, server, listener, stop)
        if core is not None:
            core.run()
        page.enter(CoreState.STOPPED)
        listener.close(_LINGER_MS)
        return False
    except Exception as error:
        _kept.append(error)
        gc.disable()
        if isinstance(error, ValueError) and core is None:
            reason = str(error)  # written for whoever configured the core
            logger.error("%s", reason)
        else:
            reason = f"{type(error).__name__}: {error}"
            logger.exception("the core failed")
        server.refuse(reason)
        # Of a core that failed while it served, the page goes on to say what it was doing.
        if page is not None and core is None:
            page.enter(CoreState.STOPPED)
        return True
    finally:
        if launch.status_path is not None and not launch.supervised:
            with contextlib.suppress(OSError):
                os.unlink(launch.status_path)
        listener.close(_LINGER_MS if core is None else _FAILED_LINGER_MS)


def _load(
    launch: CoreLaunch, page: StatusPage, server: RequestHandler, listener: BoundSocket, stop: StopSignal
) -> "EngineCore | None":
    """The core with its weights loaded; None if it was told to stop meanwhile."""
    started = time.monotonic()
    # Torch takes a second or more to import: after the address is known to be good, so that a bad one costs nothing.
    from vllm_mp.core.engine_core import EngineCore
    from vllm_mp.core.worker.device import (
        check_float8,
        choose_device,
        choose_dtype,
        choose_overlap,
        choose_step_size,
        set_threads,
    )
    from vllm_mp.core.worker.memory import memory_to_start
    from vllm_mp.core.worker.model_runner import ModelRunner

    # What has been imported stays: looking through it for garbage would take 0.1 s, now or within a step.
    gc.freeze()
    gc.enable()
    config = launch.config
    device = choose_device(config)
    check_float8(config, device)
    dtype = choose_dtype(config, device)
    choose_step_size(config, device)
    choose_overlap(config, device)
    set_threads(config)
    page.enter(CoreState.LOADING)
    faults = None
    if config.liveness_config.fault_injection:
        from vllm_mp.fault_injection.hooks import FaultHooks

        faults = FaultHooks(launch)

    def progress(share: float) -> None:
        if stop.is_set:
            raise StopSignal.Stopped
        page.enter(CoreState.LOADING, share)
        if faults is not None:
            faults.while_loading(share)

    try:
        with memory_to_start(config):
            runner = ModelRunner(config, device, dtype, progress, page.beat)
    except StopSignal.Stopped:
        return None
    if faults is not None:
        faults.install(runner, server)
    logger.info(
        "%s in %s on %s, %d KV blocks of %d tokens, ready after %.1f s, listening on %s",
        config.model_config.model,
        config.model_config.dtype,
        device,
        config.cache_config.num_blocks - 1,
        config.cache_config.block_size,
        time.monotonic() - started,
        launch.address,
    )
    return EngineCore(config, device, runner, server, listener.socket, stop, page)


def _read_launch() -> CoreLaunch:
    """The first line of standard input, which stays open: its end is the death of the parent."""
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(0, 65_536)
        if not chunk:
            raise SystemExit("python -m vllm_mp.core reads its configuration as a line of JSON on standard input")
        line += chunk
    return msgspec.json.decode(bytes(line), type=CoreLaunch)


def _follow_parent(launch: CoreLaunch, stop: StopSignal, stopped: threading.Event) -> None:
    """Start a thread that stops the core when its parent dies, at once if the loop does not end by itself.

    It watches the standard input, whose other end the parent holds, and the parent's pid, because a child that
    the parent forked may hold that end too. The kernel's parent-death signal would not do: it comes when the
    *thread* that started the core ends.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(0, select.POLLHUP)
        while not poll.poll(500) and os.getppid() == launch.parent_pid:
            pass
        stop.set()
        if not stopped.wait(_STOP_GRACE_S):
            _remove_runtime_dir(launch)
            os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _remove_runtime_dir(launch: CoreLaunch) -> None:
    """What the parent would have done."""
    if launch.runtime_dir is not None:
        shutil.rmtree(launch.runtime_dir, ignore_errors=True)
