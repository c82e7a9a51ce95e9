"""What a core has while it starts: the launch line, the address, the status page, and the watch over its parent."""

import contextlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import zmq

from vllm_mp.core.ipc.bound_socket import BoundSocket
from vllm_mp.core.ipc.request_handler import RequestHandler
from vllm_mp.core.parent_watch import parent_has_ended, wait_for_end_of_parent
from vllm_mp.core.start.launch_line import has_launch_line, read_launch_line, read_more
from vllm_mp.core.stop_signal import StopSignal
from vllm_mp.core.template import LEAVE_MODEL_TEMPLATE, drop_argument, end_standby
from vllm_mp.core_link.core_description import CoreDescription
from vllm_mp.core_link.core_launch import CoreLaunch, KeptCache, waiting_path
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.version import __version__
from vllm_mp.wire import PROTOCOL_VERSION, SCHEMA

_STOP_GRACE_S: Final = 5.0
"""Time that the loop has to stop after the parent's death, before the process is ended."""
_PARENT_END_S: Final = 2.0
"""Time from the end of the parent's pipe to the end of the parent or its SIGTERM."""
_HELLO_WAIT_S: Final = 0.5
"""Time that clients get to say hello to a core that only accepts their connections to refuse them."""


class CoreStart:
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

        `meanwhile` is called once and then every second while this waits. Raises `StopSignal.Stopped` if this is not
        to become the core, and ValueError as `open_address` does.
        """
        waiting = self.launch
        if waiting.waits:
            assert self.page is not None
            meanwhile()
            self.page.enter(CoreState.WAITING)
            launch = read_launch_line(self.stop, meanwhile)
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
        while not has_launch_line():
            events = dict(poller.poll())
            if self.stop.is_set or (0 in events and not read_more()):
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


def _template_socket() -> socket.socket | None:
    """Return the socket for the template process that this core is to leave; None: it is to leave none."""
    descriptor = drop_argument(LEAVE_MODEL_TEMPLATE)
    return None if descriptor is None else socket.socket(fileno=int(descriptor))


def _follow_parent(start: CoreStart) -> None:
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


def parent_has_died(launch: CoreLaunch, stop: StopSignal) -> bool:
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
