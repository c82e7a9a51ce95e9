"""A limit for the time of each test, with which `tools/test` keeps its default set short.

`pytest --time-limit SECONDS` names each test that takes longer, and fails those that take four times as long: no busy
machine makes the time of a test differ by that much. A test's own time is its processor time, with that of all
descendants of this process, or its duration without the time in which processes of this machine waited for a processor
or a disk, whichever is larger. So tests that compute and tests that wait are both found, and other programs on the
machine make no test fail. Fixtures that tests share are left out. On a slower processor the limit is longer.
"""

import contextlib
import os
import time
from collections.abc import Generator
from typing import Any, Final, NamedTuple

import psutil
import pytest

EXCEPTIONS: Final = {
    # Two cores die several times.
    "tests/engine/test_data_parallel.py::test_poison_request_fails_alone_and_all_others_complete": 4.0,
    # Cores die, and template processes import everything beside them.
    "tests/faults/test_core_template.py::test_killed_core_is_replaced_by_a_fork_and_its_stream_goes_on": 4.0,
    "tests/faults/test_kept_kv_cache.py::test_requests_of_all_kinds_continue_and_nothing_is_computed_again": 4.0,
    "tests/faults/test_standalone_core.py::test_streams_of_all_clients_continue_with_the_next_core_at_the_address": 4.0,
    # It starts a program that starts a core and its template processes.
    "tests/faults/test_standalone_core.py::test_clients_share_a_core_and_leave_independently": 4.0,
    # It starts a program that starts a core, neither of which can be forked.
    "tests/engine/test_lifecycle.py::test_core_ends_when_its_client_is_killed": 8.0,
    "tests/engine/test_lifecycle.py::test_engine_can_be_made_in_a_running_loop_and_as_a_context_manager": 8.0,
    # The kernels of steps of many shapes run on the fake device.
    "tests/kernels/test_steps_on_fake_cuda.py::test_steps_are_replayed_without_waits_and_compile_nothing": 4.0,
    "tests/kernels/test_steps_on_fake_cuda.py::test_steps_with_drafts_are_replayed_and_compile_nothing": 4.0,
}
"""Limits in seconds of tests that need more than the others, by node id without parameters."""

_REFERENCE_S: Final = 0.05
"""Processor time that `_speed_sample` took on the machine on which the limit was chosen: a Xeon with AMX at 2.2 GHz."""
_TOLERANCE: Final = 4.0
"""A test fails beyond the limit times this. On a busy machine a test was seen at 1.8 times its limit."""
_READING_LASTS_S: Final = 0.05
"""Time in which a reading is used again. It takes milliseconds, and most tests take less."""
_PRESSURES: Final = ("/proc/pressure/cpu", "/proc/pressure/io")
_monotonic: Final = time.monotonic
"""The function itself, because tests that have just ended may still replace it."""


class _Used(NamedTuple):
    """What this process and its descendants have used until now, in seconds."""

    processor: float
    elapsed: float
    """Time without waits for a processor or a disk; 0 on a system that does not count these."""

    @classmethod
    def now(cls) -> "_Used":
        stalled_s = _stalled_s()
        return cls(_processor_s(), 0.0 if stalled_s is None else _monotonic() - stalled_s)


class TimeLimit:
    """The pytest plugin that measures tests."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._slowness = max(1.0, min(_speed_sample() for _ in range(3)) / _REFERENCE_S)
        self._began = _Used(0.0, 0.0)
        self._shared = _Used(0.0, 0.0)
        """Used by fixtures that several tests share, since the test began."""
        self._slow: list[str] = []
        """Tests over the limit, with their time."""
        self._depth = 0
        """Number of shared fixtures that are being set up."""
        self._reading, self._read_at = _Used.now(), _monotonic()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._slow:
            terminalreporter.write_line(f"over the limit of {self._limit_s:g} s: {', '.join(self._slow)}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._began, self._shared = self._now(), _Used(0.0, 0.0)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        if fixturedef.scope == "function" or self._depth:
            return (yield)
        began = self._now()
        self._depth += 1
        try:
            return (yield)
        finally:
            self._depth -= 1
            self._shared = _sum(self._shared, _difference(self._now(), began))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "call" and report.passed:
            own_s = max(_difference(_difference(self._now(), self._began), self._shared))
            limit_s = EXCEPTIONS.get(item.nodeid.partition("[")[0], self._limit_s) * self._slowness
            if own_s > limit_s:
                self._slow.append(f"{item.nodeid}: {own_s:.1f} s")
            if own_s > limit_s * _TOLERANCE:
                report.outcome = "failed"
                report.longrepr = (
                    f"the test took {own_s:.1f} s of its own, the limit is {limit_s:.1f} s: make it cheaper, or mark "
                    "it with `extended`, which leaves it out of the default set"
                )
        return report

    def _now(self) -> _Used:
        if _monotonic() > self._read_at + _READING_LASTS_S:
            self._reading, self._read_at = _Used.now(), _monotonic()
        return self._reading


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="fail tests that take more time of their own, without waits for a processor and without shared fixtures",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (limit_s := config.getoption("--time-limit")) is not None:
        config.pluginmanager.register(TimeLimit(limit_s))


def _processor_s() -> float:
    """Return the processor time of this process and of all its descendants, also those that have ended."""
    total = sum(os.times()[:4])
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            total += sum(process.cpu_times()[:4])
    return total


def _stalled_s() -> float | None:
    """Return the time in which some process of this machine waited for a processor or a disk.

    None if the system has no count.
    """
    total = 0.0
    try:
        for path in _PRESSURES:
            with open(path) as file:
                some = file.readline()
            total += int(some.rpartition("total=")[2]) / 1e6
    except OSError:
        return None
    return total


def _speed_sample() -> float:
    """Return the processor time of a fixed piece of work in seconds."""
    began = time.process_time()
    counts: dict[int, int] = {}
    for i in range(500_000):
        counts[i % 1000] = counts.get(i % 1000, 0) + i
    return time.process_time() - began


def _sum(first: _Used, second: _Used) -> _Used:
    return _Used(*(a + b for a, b in zip(first, second, strict=True)))


def _difference(later: _Used, earlier: _Used) -> _Used:
    return _Used(*(a - b for a, b in zip(later, earlier, strict=True)))
