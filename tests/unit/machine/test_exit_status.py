"""An error says how a process ended, and what a signal that few know means."""

import signal

import pytest

from vllm_mp.machine.exit_status import describe_exit


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exit code 1"),
        (-signal.SIGKILL, "signal SIGKILL"),
        (-signal.SIGRTMIN - 1, f"signal {signal.SIGRTMIN + 1}"),
        (-signal.SIGBUS, "signal SIGBUS (a file that it had mapped, like the model's weights, was truncated, or its"),
    ],
)
def test_exit_is_described_in_words(code: int, words: str) -> None:
    assert describe_exit(code).startswith(words)
