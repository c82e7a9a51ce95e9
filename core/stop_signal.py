"""The signal that tells a core to stop."""

import os
import signal


class StopSignal:
    """Tells the loop to stop. Signal handlers and other threads set it; the loop polls its file descriptor `fd`."""

    class Stopped(Exception):
        """Raised to abandon work that is pointless once the core is told to stop."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.signal: int | None = None
        """The number of the signal that told the core to stop; None if a thread did."""
        self.is_set = False
        self.drain = False
        """True: the core finishes its work before it stops."""

    def set(self) -> None:
        """Tell the core to stop; safe in signal handlers and threads."""
        self.is_set = True
        os.eventfd_write(self.fd, 1)

    def raise_if_set(self) -> None:
        """Raise `Stopped` if the core is told to stop."""
        if self.is_set:
            raise StopSignal.Stopped

    def listen(self, drains: bool) -> None:
        """Set this on SIGTERM and SIGINT, with `drain` on SIGINT if `drains`; the second signal kills the process.

        Call this in the main thread. It unblocks both signals, which an app that blocks them passes on to its core.
        """

        def handle(signum: int, _frame: object) -> None:
            if self.signal is not None:
                signal.signal(signum, signal.SIG_DFL)
                signal.raise_signal(signum)
            self.signal = signum
            self.drain = drains and signum == signal.SIGINT
            self.set()

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
