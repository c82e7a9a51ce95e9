"""Ranks that are forked from their core: what they start with, and when a core starts a new interpreter instead."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.extended  # the programs import torch

FORK = """
    import json, os, signal, sys, threading, types
    from pathlib import Path

    {before}
    from vllm_mp.core.parallel import rank_fork, worker_main
    from vllm_mp.core.sibling_fork import end_idle_threads

    def main():
        about = {{
            "line": sys.stdin.readline(),
            "descriptors": [fd for fd in range(1000) if Path(f"/proc/self/fd/{{fd}}").is_symlink()],
            "parent": os.getppid(),
            "handles": callable(signal.getsignal(signal.SIGTERM)),
        }}
        os.write(int(sys.argv[1]), json.dumps(about).encode())
        {end}

    worker_main.main = main
    signal.signal(signal.SIGTERM, lambda *_: None)
    secret = os.open("/dev/null", os.O_RDONLY)
    end_idle_threads()  # those of NumPy
    process = rank_fork.fork_rank([int(sys.argv[1])])
    if process is None:
        os._exit(100)
    with process.stdin as line:
        line.write(b"launch\\n")
    code = process.wait(30)
    print(json.dumps([os.getpid(), code]))
    os._exit(0)
"""
IMPORTED = "sys.modules['vllm_mp.core.worker.model_runner'] = types.ModuleType('')"


def run(before=IMPORTED, end="return 7"):
    """Run a core that forks a rank; return its end, its process id, the rank's exit code and what the rank says."""
    reader, writer = os.pipe()
    code = textwrap.dedent(FORK.format(before=before, end=end))
    done = subprocess.run(
        [sys.executable, "-c", code, str(writer)], pass_fds=[writer], capture_output=True, text=True, timeout=60
    )
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    pid, ended = json.loads(done.stdout) if done.returncode == 0 else (None, None)
    return done, pid, ended, json.loads(said) if said else None, writer


@pytest.mark.parametrize(("end", "code"), [("return 7", 7), ("raise MemoryError", 1), ("os.kill(os.getpid(), 9)", -9)])
def test_rank_is_a_child_with_its_launch_line_and_no_other_descriptors_and_its_core_learns_its_end(end, code):
    done, pid, ended, said, writer = run(end=end)
    assert done.returncode == 0, done.stderr
    assert said == {"line": "launch\n", "descriptors": [0, 1, 2, writer], "parent": pid, "handles": False}
    assert ended == code


@pytest.mark.parametrize(
    "before",
    ["", f"{IMPORTED}; threading.Thread(target=threading.Event().wait, daemon=True).start()"],
    ids=["nothing is imported", "another thread"],
)
def test_core_that_cannot_be_forked_starts_a_new_interpreter(before):
    done, _, _, said, _ = run(before)
    assert done.returncode == 100, done.stderr
    assert said is None
