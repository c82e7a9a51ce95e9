"""The supervisor of a core: its limit on restarts, causes of deaths, the end of a core that has just started."""

import contextlib
import errno
import os
import signal
import socket
from types import SimpleNamespace

import pytest
import zmq

from vllm_mp import EngineStartError, wire
from vllm_mp.client.cores import health
from vllm_mp.client.cores import supervisor as supervisor_module
from vllm_mp.client.cores.recovery.news import Absence, Death, End
from vllm_mp.client.cores.recovery.restart_limit import RestartLimit
from vllm_mp.client.cores.replacement import end_between_steps
from vllm_mp.client.cores.sources.core_source import Core
from vllm_mp.client.cores.sources.launcher import CoreLauncher
from vllm_mp.client.cores.sources.remote_core import RemoteCore
from vllm_mp.client.cores.supervisor import CoreSupervisor
from vllm_mp.core_link.core_status import CoreState
from vllm_mp.machine.loading_thread import BESIDE_A_CORE


def test_cores_that_served_are_restarted_at_once_up_to_the_limit():
    limit = RestartLimit(3, 10.0)
    assert [limit.delay_after(now, True) for now in (0.0, 1.0, 2.0, 3.0)] == [0.0, 0.0, 0.0, None]


def test_deaths_before_the_window_do_not_count():
    limit = RestartLimit(2, 10.0)
    assert [limit.delay_after(now, True) for now in (0.0, 1.0, 10.0, 11.0, 12.0)] == [0.0, 0.0, 0.0, 0.0, None]


def test_restarts_of_cores_that_never_serve_are_delayed_up_to_a_limit():
    limit = RestartLimit(None, 1.0)
    delays = [limit.delay_after(float(now), False) for now in range(10)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]
    assert limit.delay_after(10.0, True) == 0.0
    assert limit.delay_after(11.0, False) == 0.1


def test_limit_of_zero_allows_no_restart():
    assert RestartLimit(0, 10.0).delay_after(0.0, True) is None


def test_forgiven_deaths_do_not_count():
    limit = RestartLimit(2, 100.0)
    for now in (0.0, 1.0):
        limit.delay_after(now, True)
    limit.forgive([0.0, 1.0, 1.0, 50.0])
    assert [limit.delay_after(now, True) for now in (2.0, 3.0, 4.0)] == [0.0, 0.0, None]


def test_deaths_of_forgiven_cores_do_not_count():
    limit = RestartLimit(2, 100.0)
    for incarnation in (5, 6):
        limit.delay_after(1.0, True, incarnation)
    limit.forgive_cores([4, 5])
    assert [limit.delay_after(1.0, True, incarnation) for incarnation in (7, 8)] == [0.0, None]


@pytest.mark.parametrize(("num_stages", "num_begun"), [(1, 2), (2, 2), (4, 4)])
def test_deaths_are_not_forgiven_if_no_core_has_completed_a_step(num_stages, num_begun):
    forgiven = []

    def die(incarnation, step):
        page = SimpleNamespace(read=lambda: SimpleNamespace(step=step), convicted=lambda: [incarnation])
        supervisor._forgive_convicted(page, num_stages, restarts)

    supervisor = CoreSupervisor(None, core(), None)
    restarts = SimpleNamespace(forgive_cores=lambda cores: forgiven.extend(cores) or True)
    die(1, num_begun)
    die(2, num_begun)
    assert forgiven == [1], "until it is known that no core works"
    die(3, num_begun + 1)
    assert forgiven == [1, 3]


def core():
    """Return a core of this process that serves."""
    signals = []
    process = SimpleNamespace(signals=signals, send_signal=signals.append)
    config = SimpleNamespace(liveness_config=SimpleNamespace(core_restart_window_s=1.0, max_core_restarts=1))
    connection = SimpleNamespace(incarnation=1, model=wire.NO_DIGEST)
    return Core(connection, 0, config, None, process, SimpleNamespace(last_death=None))


def test_core_that_is_told_to_end_at_the_moment_when_it_serves_gets_the_signal():
    class Source(CoreLauncher):
        def __init__(self):
            self.predecessor = None

        def begin(self):
            pass

        def discard(self, process):
            pass

        def clear_up(self):
            pass

        def finish(self, check):
            check()
            supervisor.end_core(signal.SIGINT)
            return successor

    first, successor = core(), core()
    supervisor = CoreSupervisor(Source(), first, RestartLimit(None, 1.0))
    supervisor._replace(first, Death("it died", {}, 0, False))
    assert successor.process.signals == [signal.SIGINT]
    supervisor.end_core(signal.SIGKILL)
    assert successor.process.signals == [signal.SIGINT, signal.SIGKILL]


def test_core_on_several_machines_is_not_replaced():
    config = SimpleNamespace(**vars(core().config), parallel_config=SimpleNamespace(nnodes=2))
    source = CoreLauncher.__new__(CoreLauncher)
    supervisor = CoreSupervisor(source, core()._replace(config=config), RestartLimit(1, 1.0))
    with pytest.raises(ValueError, match=r"nnodes=2: .*; shut the engine down and start it again"):
        supervisor.replace_core()


def test_absence_of_a_shared_core_is_reported_again_only_when_the_last_report_was_taken(monkeypatch):
    monkeypatch.setattr(supervisor_module, "_ABSENCE_INTERVAL_S", 0.0)
    reports = []

    class Source:
        reconnect_timeout, trouble = 0.0, "no core answers there"

        def load_progress(self):
            return None

        def finish(self, check):
            for _ in range(2):
                reports.append([type(news) for news in supervisor.take_news()])
                for _ in range(5):
                    check()
            reports.append([type(news) for news in supervisor.take_news()])
            raise EngineStartError("enough")

    supervisor = CoreSupervisor(Source(), core(), None)
    supervisor._rejoin(Source(), Death("it broke", {}, 0, True))
    assert reports == [[Death], [Absence], [Absence]]


def test_shared_core_that_its_parent_gives_up_ends_with_what_the_parent_knows():
    class Source(RemoteCore):
        def __init__(self):
            self.reconnect_timeout = 1e9

        def load_progress(self):
            return None

        def finish(self, check):
            check()
            supervisor.give_up("it died too often", is_from_outside=False)
            check()
            raise AssertionError("the supervisor still waits")

    supervisor = CoreSupervisor(Source(), core(), None)
    death = Death("the connection broke", {3: 0}, 1, is_from_outside=True)
    assert supervisor._replace(supervisor.core, death) is None
    told, end = supervisor.take_news()
    assert told == death
    assert end.cause == supervisor.end == "it died too often"
    assert end.death.is_final
    assert (end.death.in_step, end.death.is_from_outside) == ({3: 0}, False)


@pytest.mark.parametrize(("look", "kind"), [(1, "signal"), (4, "out_of_memory")])
def test_sigkill_is_for_lack_of_memory_only_if_the_kernel_killed_a_process_shortly_before(monkeypatch, look, kind):
    looks = []
    monkeypatch.setattr(health, "_OOM_LOOK_S", 0.0)
    monkeypatch.setattr(health, "count_oom_kills", lambda: int(len(looks) >= look))
    with contextlib.ExitStack() as closing:
        pid_fd, monitor = (closing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) for _ in range(2))
        process = SimpleNamespace(
            pid=os.getpid(),
            pid_fd=pid_fd.fileno(),
            is_alive=lambda: looks.append(None) or len(looks) < 4,
            describe_end=lambda: "it was killed",
            ended_by_signal=True,
            was_killed=True,
            was_told_to_stop=False,
        )
        limits = SimpleNamespace(engine_iteration_timeout_s=0.01, start_timeout_s=1.0)
        connection = SimpleNamespace(incarnation=1, monitor=monitor.fileno(), is_broken=lambda: False)
        config = SimpleNamespace(liveness_config=limits)
        dying = core()._replace(process=process, connection=connection, config=config)
        death = CoreSupervisor(SimpleNamespace(prepare_template=lambda: None), dying, None)._watch(dying)
    assert (death.kind, death.is_from_outside) == (kind, kind == "signal")


def test_model_is_not_at_fault_if_the_system_starts_no_process_for_a_moment():
    errors = [OSError(errno.EMFILE, "Too many open files"), zmq.ZMQError(errno.EMFILE)]
    successor = core()

    class Source(CoreLauncher):
        def __init__(self):
            self.predecessor = None

        def discard(self, process):
            pass

        def clear_up(self):
            pass

        def begin(self):
            if errors:
                raise errors.pop()

        def finish(self, check):
            return successor

        def lasting_error(self, error):
            return "the file of the model cannot be read: Too many open files"

    supervisor = CoreSupervisor(Source(), core(), RestartLimit(None, 1.0))
    assert supervisor._replace(supervisor.core, Death("it died", {}, 0, False)) is successor


def news_of_deaths(max_restarts, num_deaths):
    """Return the news of deaths of cores in a row."""

    class Source(CoreLauncher):
        def __init__(self):
            self.predecessor = None

        def begin(self):
            pass

        def discard(self, process):
            assert isinstance(supervisor._news[-1], Death | End), "other cores wait for the news"

        def clear_up(self):
            assert isinstance(supervisor._news[-1], Core), "the streams wait for the next core"

        def finish(self, check):
            return core()

    restarts = None if max_restarts is None else RestartLimit(max_restarts, 100.0)
    supervisor = CoreSupervisor(Source(), core(), restarts)
    for number in range(num_deaths):
        supervisor._replace(supervisor.core, Death("it died", {3: 0}, 1, False, time=float(number)))
    return supervisor.take_news()


def test_death_without_a_successor_is_news_together_with_the_end():
    for max_restarts in (None, 0):  # None: there is no recovery
        (end,) = news_of_deaths(max_restarts, 1)
        assert end.death.is_final
        assert end.death.in_step == {3: 0}
    death, _, end = news_of_deaths(1, 2)
    assert (death.num_restarts_left, death.is_final, end.death.is_final) == (0, False, True)


@pytest.mark.parametrize("leaves_memory", [True, False])
def test_end_of_a_stopped_core_is_waited_for_only_if_its_successor_needs_its_memory(leaves_memory):
    calls = []
    process = SimpleNamespace(
        is_alive=lambda: True,
        send_signal=lambda number: calls.append(number),
        lower_priority=lambda niceness: calls.append(f"nicer by {niceness}"),
        kill=lambda: calls.append("killed and waited for"),
        was_told_to_stop=False,
        was_killed=True,
    )
    stopped = core()._replace(process=process, page=SimpleNamespace(state=CoreState.STOPPED))
    assert end_between_steps(stopped, 60.0, leaves_memory)
    end = [f"nicer by {BESIDE_A_CORE}", signal.SIGKILL] if leaves_memory else ["killed and waited for"]
    assert calls == [signal.SIGTERM, *end]
