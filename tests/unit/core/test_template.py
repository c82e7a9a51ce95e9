"""The template process: what its forks are, which state they start with, and when it refuses to fork."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap

import msgspec
import pytest

from vllm_mp.core import sibling_fork
from vllm_mp.core.sibling_fork import ForkRefused, fork_sibling
from vllm_mp.core_link.fork_messages import MAX_BYTES, Forked, ForkRefusal, ForkRequest, FromTemplate, TemplateReady

WITHOUT_IMPORTS = """
    import json, os, random, signal, sys, threading
    from pathlib import Path
    from vllm_mp.core import template
    import_core = lambda: None
"""
DESCRIBE = """
    about = {
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "name": Path("/proc/self/comm").read_text().strip(),
        # The listing itself has a descriptor, which is closed afterwards.
        "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if Path("/proc/self/fd", fd).is_symlink()),
        "variables": [os.environ.get(name) for name in ("NEW", "OLD")],
        "random": random.random(),
        "line": sys.stdin.readline(),
    }
    print(json.dumps(about), flush=True)
"""


class Template:
    """A process that runs Python code, which ends in `run_template` or `leave_template` and goes on in each fork."""

    def __init__(self, code, is_left_by_core=False):
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(code), str(theirs.fileno())],
                stdin=None if is_left_by_core else theirs,
                stdout=subprocess.PIPE,
                pass_fds=[theirs.fileno()] if is_left_by_core else [],
                env=os.environ | {"OLD": "1"},
            )

    def receive(self):
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        assert poll.poll(60_000), "the template says nothing"
        return msgspec.json.decode(self.control.recv(MAX_BYTES), type=FromTemplate)

    def fork(self, folder="/", inherited=(), arguments=(), line=b"hello\n"):
        """Let a core be forked; return its process id, and the descriptor of its output."""
        reader, stdin = os.pipe()
        output, writer = os.pipe()
        place = os.open(folder, os.O_PATH)
        request = ForkRequest(
            arguments=list(arguments), environment={"NEW": "2", "OLD": None}, inherited=list(inherited)
        )
        socket.send_fds(self.control, [msgspec.json.encode(request)], [place, reader, writer, writer, *inherited])
        answer = self.receive()
        os.write(stdin, line)
        for descriptor in (reader, stdin, writer, place):
            os.close(descriptor)
        assert isinstance(answer, Forked), answer
        return answer.pid, output

    def about_fork(self, **options):
        """Return what a fork says of itself."""
        pid, output = self.fork(**options)
        with os.fdopen(output) as text:
            about = json.loads(text.read())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return pid, about

    def close(self):
        self.control.close()
        self.process.stdout.close()
        self.process.wait(30)


@pytest.fixture
def start():
    """A function that starts a template process of Python code."""
    templates = []

    def started(code, **options):
        templates.append(Template(WITHOUT_IMPORTS + code, **options))
        return templates[-1]

    yield started
    for template in templates:
        template.close()


RUN = "\n    template.run_template(import_core, niceness=0)\n"


def test_fork_is_a_child_of_the_sender_with_the_descriptors_of_the_request(start, tmp_path):
    template = start(RUN + DESCRIBE)
    assert template.receive() == TemplateReady(pid=template.process.pid)
    with (tmp_path / "file").open("w") as file:
        pid, about = template.about_fork(folder=str(tmp_path), inherited=[file.fileno()], arguments=["--option"])
        assert about["descriptors"] == [0, 1, 2, file.fileno()]
    assert about["parent"] == os.getpid()
    assert about["group"] == pid
    assert about["folder"] == str(tmp_path)
    assert about["arguments"] == ["--option"]
    assert about["variables"] == ["2", None]
    assert about["line"] == "hello\n"
    assert about["name"] == os.path.basename(sys.executable)[:15]


def test_forks_have_random_numbers_of_their_own(start):
    template = start(RUN + DESCRIBE)
    template.receive()
    assert template.about_fork()[1]["random"] != template.about_fork()[1]["random"]


@pytest.mark.parametrize(
    ("end", "code"),
    [("os._exit(7)", 7), ("signal.raise_signal(signal.SIGSEGV)", -signal.SIGSEGV), ("os.kill(os.getpid(), 9)", -9)],
    ids=["exit", "fault", "kill"],
)
def test_sender_learns_how_a_fork_ended(start, end, code):
    template = start(f"{RUN}\n    {end}\n")
    template.receive()
    pid, output = template.fork()
    os.close(output)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code


def test_template_with_a_second_thread_refuses_to_fork(start):
    template = start("    import_core = threading.Thread(target=threading.Event().wait, daemon=True).start\n" + RUN)
    template.receive()
    with pytest.raises(AssertionError, match="the process has 2 threads"):
        template.fork()


def test_template_says_which_import_failed_and_ends(start):
    template = start(f"    import_core = lambda: __import__('no_torch')\n{RUN}")
    assert template.receive() == ForkRefusal(reason="ModuleNotFoundError: No module named 'no_torch'")
    assert template.process.wait(30) == 1


def test_template_ends_when_its_parent_closes_the_socket(start):
    template = start(RUN)
    template.receive()
    template.control.close()
    assert template.process.wait(30) == 0


def test_core_that_leaves_a_template_goes_on_and_the_template_forks_others(start):
    leave = "\n    template.leave_template(int(sys.argv[1]), import_core)\n    sys.argv[1:] = []\n"
    template = start(leave + DESCRIBE, is_left_by_core=True)
    ready = template.receive()
    try:
        first = json.loads(template.process.stdout.readline())
        assert ready.pid != template.process.pid
        assert first["descriptors"] == [0, 1, 2]
        _, about = template.about_fork()
        assert about["parent"] == first["parent"] == os.getpid()
        assert about["descriptors"] == [0, 1, 2]
        assert template.process.wait(30) == 0, "the first core does not wait for its template"
    finally:
        template.control.close()
        assert os.waitstatus_to_exitcode(os.waitpid(ready.pid, 0)[1]) == 0


def test_fork_is_refused_without_the_c_library_that_it_knows(monkeypatch):
    monkeypatch.setattr(sibling_fork, "count_threads", lambda: 1)
    monkeypatch.setattr(os, "confstr", lambda name: (_ for _ in ()).throw(ValueError(name)))
    sibling_fork._prepared.cache_clear()
    with pytest.raises(ForkRefused, match="GNU C library"):
        fork_sibling()
    sibling_fork._prepared.cache_clear()
