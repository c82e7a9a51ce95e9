"""How a process ended, in words."""

import signal


def describe_exit(code: int) -> str:
    """Return how a process ended, from its return code: "exit code 1", or "signal SIGKILL" for -9."""
    if code >= 0:
        return f"exit code {code}"
    if -code == signal.SIGBUS:
        return "signal SIGBUS (a file that it had mapped, like the model's weights, was truncated, or its disk failed)"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"
