"""The end of a core that hangs: what it was doing is kept, and it is killed."""

from vllm_mp.client.cores.process_activity import describe_activity, is_stopped
from vllm_mp.client.cores.sources.process import CoreProcess
from vllm_mp.core_link.status_page import StatusPage

_STACKS_TIMEOUT_S = 1.0
"""Time that a core gets to write its stacks to its log; it takes milliseconds, unless the kernel holds the core."""
_UNSEEN_STACKS_TIMEOUT_S = 0.1
"""The same if the core writes its log to an output that this process cannot look at."""


def end_hung_core(process: CoreProcess, page: StatusPage, exceeded: str) -> tuple[str, bool]:
    """Kill a core that made no progress for `exceeded`; return the cause, and whether a signal had stopped it.

    Before, the core writes the Python stacks of its threads to its log, unless it is stopped, which no request can have
    caused.
    """
    status, was_stopped = page.read(), is_stopped(process.pid)
    how = ", stopped by a signal" if was_stopped else ""
    state = describe_activity(process.pid)
    timeout = _UNSEEN_STACKS_TIMEOUT_S if process.log_path is None else _STACKS_TIMEOUT_S
    has_stacks = not was_stopped and process.write_stacks(timeout)
    process.kill()
    stacks = f", and wrote its stacks to its log ({process.log_path})" if has_stacks else ""
    return (
        f"the core process {process.pid} made no progress for {exceeded}{how} ({state}){stacks}: {status}",
        was_stopped,
    )
