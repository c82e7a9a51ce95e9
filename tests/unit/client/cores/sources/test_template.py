"""What this process makes of its template process: forks, a death, silence, another environment, the end."""

import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from vllm_mp.client.cores.sources.template import CoreTemplate
from vllm_mp.config.engine_args import EngineArgs
from vllm_mp.core_link import early_template

FORKS = """
    import os, signal, sys, threading
    from vllm_mp.core import template
    template.run_template(lambda: None, niceness=0)
"""


@pytest.fixture
def start(monkeypatch):
    """A function that makes a `CoreTemplate` whose template process runs Python code."""
    templates = []
    monkeypatch.setattr("vllm_mp.client.cores.sources.template._FORK_TIMEOUT_S", 60.0)  # a busy machine forks slowly

    def started(code, starts_early=False):
        monkeypatch.setattr(early_template, "_PROGRAM", ("-c", textwrap.dedent(code)))
        template = CoreTemplate(takes_early=starts_early)
        if starts_early:
            monkeypatch.setattr(early_template, "_is_too_late", False)
            early_template.start_template_early()
        template.join()
        templates.append(template)
        return template

    yield started
    for template in templates:
        template.leave()


def become_ready(template):
    deadline = time.monotonic() + 60
    while not (template.prepare() and template.pid):
        assert time.monotonic() < deadline, "the template is not ready after 60 s"
        time.sleep(0.002)


def fork(template, **options):
    """Fork a process from the template, without a log; return None if that is not possible."""
    return template.fork([], None, Path("/"), [], **options)


def test_forked_process_has_the_standard_input_and_its_exit_code_arrives(start):
    template = start(f"{FORKS}\n    os._exit(len(sys.stdin.readline()))")
    become_ready(template)
    process = fork(template)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.stdin.write(b"12345\n")
    process.stdin.flush()
    assert process.wait(30) == process.poll() == 6
    process.kill()  # no-op: the id may belong to another process
    process.stdin.close()


def test_template_that_was_started_early_is_waited_for_once(start):
    slow = "    import time\n    time.sleep(0.3)" + FORKS
    template = start(f"{slow}\n    os._exit(7)", starts_early=True)
    process = fork(template)
    assert process.wait(30) == 7
    process.stdin.close()
    ended = start("    raise SystemExit(1)", starts_early=True)
    assert fork(ended) is None
    assert early_template.take_early_template() is None


def test_only_a_template_that_a_start_waits_for_imports_at_the_usual_priority(start):
    ends = f"    import sys\n    code = 8 if '--awaited' in sys.argv else 9{FORKS}\n    os._exit(code)"
    for is_early, code in ((True, 8), (False, 9)):
        template = start(ends, starts_early=is_early)
        become_ready(template)
        process = fork(template)
        assert process.wait(30) == code
        process.stdin.close()


def test_early_template_that_no_engine_takes_over_ends_with_its_process():
    code = """
        from vllm_mp.core_link import early_template
        early_template._PROGRAM = ("-c", "import signal; signal.pause()")
        early_template.start_template_early()
        early_template.start_template_early()
        print(early_template._early.process.pid)
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert not Path(f"/proc/{int(found.stdout)}").exists()


@pytest.fixture
def waits_early(monkeypatch):
    """Let this process start templates early, which do nothing."""
    monkeypatch.setattr(early_template, "_PROGRAM", ("-c", "import signal; signal.pause()"))
    monkeypatch.setattr(early_template, "_is_too_late", False)


def test_early_template_ends_with_a_start_that_fails_and_later_starts_have_none(waits_early):
    with pytest.raises(KeyError), early_template.template_beside_imports(EngineArgs()):
        raise KeyError(process := early_template._early.process)
    assert not Path(f"/proc/{process.pid}").exists(), "ended and reaped"
    with early_template.template_beside_imports(EngineArgs()):
        assert early_template._early is None


@pytest.mark.parametrize("options", [{"core_template": False}, {"recovery": False}, {"engine_use_ray": True}])
def test_engine_whose_core_no_template_forks_starts_none_early(waits_early, options):
    with early_template.template_beside_imports(EngineArgs(**options)):
        assert early_template._early is None


def test_fork_of_a_process_leaves_the_early_template_to_that(waits_early):
    with early_template.template_beside_imports(EngineArgs()):
        process = early_template._early.process
        child = os.fork()
        if child == 0:
            early_template._end_unused()
            os._exit(0)
        os.waitpid(child, 0)
        assert process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_signal_that_ended_a_forked_process_is_known(start, number):
    template = start(f"{FORKS}\n    signal.pause()")
    become_ready(template)
    process = fork(template)
    process.send_signal(number)
    assert process.wait(30) == -number
    process.stdin.close()


def test_template_is_started_only_when_it_is_prepared_and_ready_before_it_forks(start):
    template = start(FORKS)
    assert template.pid is None
    assert fork(template) is None
    assert not template.prepare()
    become_ready(template)


def test_template_that_was_killed_forks_nothing_and_is_replaced(start, caplog, monkeypatch):
    monkeypatch.setattr("vllm_mp.client.cores.sources.template._RETRY_S", 0.0)
    template = start(f"{FORKS}\n    os._exit(5)")
    become_ready(template)
    first = template.pid
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert fork(template) is None
    assert f"the template process {first} ended with signal SIGKILL" in caplog.text
    become_ready(template)
    process = fork(template)
    assert process.wait(30) == 5
    process.stdin.close()


def test_fork_is_known_even_if_the_template_is_killed_right_after_it(start):
    killed = """
    fork_sibling = template.fork_sibling
    def fork_and_die():
        if (pid := fork_sibling()) != 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return pid
    template.fork_sibling = fork_and_die
    template.run_template("""
    template = start(f"{FORKS.replace('    template.run_template(', killed)}\n    os._exit(5)")
    become_ready(template)
    process = fork(template)
    assert process.wait(30) == 5
    process.stdin.close()


def test_template_that_died_is_not_started_again_at_once(start):
    template = start("    raise SystemExit(3)")
    template.prepare()
    os.waitid(os.P_PID, template.pid, os.WEXITED | os.WNOWAIT)
    assert template.prepare(), "there is nothing to wait for"
    assert template.pid is None


def test_stopped_template_is_ended_and_the_core_is_started_as_usual(start, caplog, monkeypatch):
    monkeypatch.setattr("vllm_mp.client.cores.sources.template._FORK_TIMEOUT_S", 0.05)
    template = start(FORKS)
    become_ready(template)
    stopped = template.pid
    os.kill(stopped, signal.SIGSTOP)
    assert fork(template) is None
    assert template.pid is None
    assert not Path(f"/proc/{stopped}").exists(), "ended and reaped"
    assert "the template process has not forked a core within 0.05 s" in caplog.text


def test_template_with_a_second_thread_is_given_up_with_the_reason(start, caplog):
    thread = "threading.Thread(target=threading.Event().wait, daemon=True)"
    template = start(FORKS.replace("lambda: None", f"{thread}.start"))
    become_ready(template)
    assert fork(template) is None
    assert "does not fork the core: the process has 2 threads" in caplog.text
    assert template.pid is None


def test_template_that_cannot_import_a_module_says_which(start, caplog):
    template = start(FORKS.replace("lambda: None", "lambda: __import__('no_torch')"))
    while not template.prepare():
        time.sleep(0.002)
    assert template.pid is None
    assert "no template process can start: ModuleNotFoundError: No module named 'no_torch'" in caplog.text


def test_variables_that_are_read_when_they_are_used_reach_the_fork(start, monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    template = start(f"{FORKS}\n    os._exit(7 if os.environ.get('TOKENIZERS_PARALLELISM') == 'false' else 1)")
    become_ready(template)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    process = fork(template)
    assert process.wait(30) == 7
    process.stdin.close()


def test_another_environment_needs_another_template(start, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    template = start(FORKS)
    become_ready(template)
    first = template.pid
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert fork(template) is None
    assert "the environment has changed" in caplog.text
    become_ready(template)
    assert template.pid != first


def test_another_limit_of_descriptors_needs_another_template(start):
    template = start(FORKS)
    become_ready(template)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert fork(template) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_template_ends_with_its_last_user(start):
    template = start(FORKS)
    template.join()
    become_ready(template)
    pid = template.pid
    template.leave()
    assert Path(f"/proc/{pid}").exists()
    template.leave()
    assert not Path(f"/proc/{pid}").exists(), "ended and reaped"
    assert template.prepare()
    assert template.pid is None, "nobody needs one"
    template.join()  # the fixture leaves


def test_core_that_ends_before_it_leaves_a_template_is_no_news(start, caplog, monkeypatch):
    monkeypatch.setattr("vllm_mp.client.cores.sources.template._RETRY_S", 0.0)
    template = start(FORKS)
    template.offer().close()
    become_ready(template)
    assert not caplog.text


def test_only_one_core_is_asked_to_leave_a_template(start):
    template = start(FORKS)
    with template.offer():
        assert template.offer() is None
        assert not template.prepare(), "it waits for that core"
