"""What a core does about ranks that join wrongly, end, fail or say what no rank says; no process is left behind."""

import os
import signal
import subprocess
import sys

import msgspec
import psutil
import pytest

from vllm_mp import AsyncEngineArgs, __version__
from vllm_mp.core.parallel import worker_processes
from vllm_mp.core.parallel.messages import PROTOCOL, Failed, Joined, Ready, chosen_options, digest_of
from vllm_mp.core.parallel.rank_state import WorkerFailedError
from vllm_mp.core.parallel.ranks import Ranks
from vllm_mp.testing.random_models import CONFIGS, save_config

SCRIPT = """
import json, os, socket, sys, time
launch = json.loads(sys.stdin.readline())
says = socket.socket(fileno=launch["socket"])
for message in {messages!r}:
    says.sendall(message)
{then}
"""
"""The program of a rank that says `messages`."""
WAIT = "time.sleep(600)"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = save_config(CONFIGS["llama"], tmp_path_factory.mktemp("model") / "llama")
    arguments = AsyncEngineArgs(
        str(folder),
        tensor_parallel_size=2,
        skip_tokenizer_init=True,
        load_format="dummy",
        engine_iteration_timeout_s=1.0,
    )
    return arguments.create_engine_config()


@pytest.fixture
def start(config, monkeypatch, tmp_path):
    """A function that starts a rank which says some messages; all are ended after the test."""
    started = []
    popen = subprocess.Popen

    def start(*messages, then=WAIT):
        script = SCRIPT.format(
            messages=[m if isinstance(m, bytes) else msgspec.msgpack.encode(m) for m in messages], then=then
        )
        monkeypatch.setattr(
            worker_processes.subprocess,
            "Popen",
            lambda command, **options: popen([sys.executable, "-c", script], **options),
        )
        started.append(Ranks(config, tmp_path))
        return started[-1]

    yield start
    pids = [pid for processes in started for pid in processes.pids]
    for processes in started:
        processes.close(at_once=True)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def joined(config, **changes):
    fields = {"rank": 1, "protocol": PROTOCOL, "package": __version__, "digest": digest_of(config)}
    fields["chosen"] = chosen_options(config)
    return Joined(**{**fields, **changes})


def test_rank_with_the_same_version_and_options_joins(start, config):
    processes = start(joined(config), Ready(rank=1))
    processes.join(config, lambda: None)
    processes.wait_until_ready(config.model_config, lambda: None)
    processes.check()


@pytest.mark.parametrize("changes", [{"protocol": 99}, {"package": "9.9"}, {"digest": "00"}, {"rank": 3}])
def test_rank_with_another_version_or_other_options_is_refused(changes, start, config):
    with pytest.raises(ValueError, match=r"rank 1 \(process \d+\) cannot join: .* install one version"):
        start(joined(config, **changes)).join(config, lambda: None)


def test_option_that_the_machine_of_a_rank_chose_otherwise_is_named(start, config):
    chosen = {**chosen_options(config), "dtype": "bfloat16"}
    refusal = r"rank 1 \(process \d+\) cannot join: .* chosen dtype='bfloat16' instead of 'auto'; give all"
    with pytest.raises(ValueError, match=refusal):
        start(joined(config, digest="00", chosen=chosen)).join(config, lambda: None)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\xc1",
        b"rubbish",
        msgspec.msgpack.encode({"tag": 1}),
        b"\x00" * 1000,
        b"\x82\xa4type\xa6failed\xa5error\xa1\xff",
        b"\x83\xa4type\xa5reply\xa6number\x01\xa6result" + b"\x91" * 10_000 + b"\xc0",
    ],
    ids=["no message", "text", "another message", "zeros", "not UTF-8", "deep"],
)
def test_rank_that_says_what_no_rank_says_is_the_end(rubbish, start, config):
    with pytest.raises(WorkerFailedError, match=r"rank 1 \(process \d+\) says what no rank says"):
        start(rubbish).join(config, lambda: None)


def test_rank_that_says_something_out_of_turn_is_the_end(start, config):
    with pytest.raises(WorkerFailedError, match="says Ready where Joined is due"):
        start(Ready(rank=1)).join(config, lambda: None)


@pytest.mark.parametrize(
    ("then", "cause"), [("sys.exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "signal SIGKILL")]
)
def test_rank_that_ends_is_the_end_with_its_cause(then, cause, start, config):
    with pytest.raises(WorkerFailedError, match=f"ended with {cause}"):
        start(then=then).join(config, lambda: None)


def test_mistake_that_a_rank_finds_is_explained_to_the_user(start, config):
    with pytest.raises(ValueError, match=r"rank 1 \(process \d+\): no space for the cache"):
        start(Failed(error="no space for the cache", is_mistake=True)).join(config, lambda: None)
    with pytest.raises(WorkerFailedError, match=r"rank 1 .* failed: RuntimeError: device"):
        start(Failed(error="RuntimeError: device")).join(config, lambda: None)


def test_rank_that_does_not_start_is_named_before_the_supervisor_gives_the_core_up(start, config, monkeypatch):
    limits = msgspec.structs.replace(config.liveness_config, start_timeout_s=0.5)
    monkeypatch.setattr(config, "liveness_config", limits)
    with pytest.raises(
        WorkerFailedError, match=r"rank 1 \(process \d+\) has not got on .* for 0\.\d s; .* start_timeout_s"
    ):
        start().join(config, lambda: None)


def test_rank_that_a_signal_stops_while_it_starts_is_the_end_long_before_start_timeout_s(start, config):
    ranks = start()
    os.kill(ranks.pids[0], signal.SIGSTOP)
    with pytest.raises(WorkerFailedError, match=r"rank 1 \(process \d+\) has made no progress .* stopped by a signal"):
        ranks.join(config, lambda: None)


def test_rank_without_progress_is_the_end(start, config):
    processes = start(joined(config), Ready(rank=1))
    processes.join(config, lambda: None)
    processes.wait_until_ready(config.model_config, lambda: None)
    with pytest.raises(WorkerFailedError, match=r"rank 1 \(process \d+\) has made no progress for"):
        processes.replies(1)


def test_core_that_is_told_to_stop_does_not_wait_for_its_ranks(start, config):
    class Stopped(Exception):
        pass

    def stop():
        raise Stopped

    with pytest.raises(Stopped):
        start().join(config, stop)
