"""The request to a core that it stop."""

import os
import signal


class StopSignal:
    """Set by signal handlers and by other threads; the loop polls its file descriptor `fd`."""

    class Stopped(Exception):
        """Raised to leave work that has become pointless."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.signal: int | None = None
        """The signal that asked for the stop; None if another thread did."""
        self.is_set = False
        self.drain = False
        """True: finish the work first."""

    def set(self) -> None:
        """Ask the core to stop; safe in signal handlers and threads."""
        self.is_set = True
        os.eventfd_write(self.fd, 1)

    def listen(self, drains: bool) -> None:
        """Stop on SIGTERM and SIGINT, on SIGINT after draining if `drains`; the second signal kills the process."""

        def handle(signum: int, _frame: object) -> None:
            if self.signal is not None:
                signal.signal(signum, signal.SIG_DFL)
                signal.raise_signal(signum)
            self.signal = signum
            self.drain = drains and signum == signal.SIGINT
            self.set()

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)
