"""Fixtures with real engines: each has its own core process and a real model."""

import contextlib
import math
import subprocess
import types
from collections.abc import Iterator

import pytest

from support.forked_cores import FORKS_RANKS, NOT_FORKED, forking
from vllm_mp import AsyncEngineArgs, AsyncLLM
from vllm_mp.core_link import early_template
from vllm_mp.core_link.core_environment import core_environment, package_path
from vllm_mp.keys.operator_key import ensure_operator_key
from vllm_mp.model_store import resolve_model
from vllm_mp.testing.engines import ENGINE, running_engine


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which variables kept processes from being forked: one that a test leaves behind slows down all after it."""
    if NOT_FORKED:
        found = ", ".join(f"{name} ({count})" for name, count in NOT_FORKED.most_common())
        terminalreporter.write_line(f"processes that were not forked because a variable differed: {found}")


@pytest.fixture(scope="session")
def llm(small_model, core_template):
    """An engine of `small_model` for all tests that neither configure nor harm it, with steps of at least 5 ms."""
    with starting_from(core_template):
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=str(small_model), **ENGINE, fault_injection=SHORT_STEPS, num_threads=1)
        )
    yield engine
    engine.shutdown()


@pytest.fixture(scope="session")
def real_llm(default_model):
    """An engine of the default model for tests of what its answers say. They neither configure nor harm it."""
    with running_engine(default_model) as engine:
        yield engine


@pytest.fixture
def make_engine(default_model):
    """A function that makes engines with own options. They are shut down after the test."""
    engines = []

    def make(**options):
        engines.append(AsyncLLM.from_engine_args(AsyncEngineArgs(**{"model": str(default_model), **ENGINE, **options})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture(scope="session")
def small_model(default_model, tmp_path_factory):
    """The folder of a small random model with the default model's tokenizer. Its core starts in a third of the time."""
    from vllm_mp.testing.random_models import save_small_model  # which imports torch

    folder = tmp_path_factory.mktemp("small") / "model"
    save_small_model(folder, default_model)
    return folder


SHORT_STEPS = "slow@step=*,seconds=0.005"
"""Makes the steps of `small_model` long enough for streams to receive most tokens separately."""
SLOW_STEPS = "slow@step=*,seconds=0.02"
"""Makes the steps of `small_model` take as long as the steps of a real model, which leaves time for a fault."""


@pytest.fixture
def make_small_engine(small_model, make_engine):
    """A function that makes engines of `small_model` with slow steps, for tests of their life and death."""

    def make(**options):
        return make_engine(**{"model": str(small_model), "fault_injection": SLOW_STEPS, **options})

    return make


@pytest.fixture(scope="session")
def core_template():
    with forking(core_environment() | package_path()) as forked_core:
        yield forked_core


PLAIN_POPEN = subprocess.Popen


@contextlib.contextmanager
def starting_from(popen):
    """Start processes in this block with the class `popen` in place of `subprocess.Popen`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen)
        yield


@pytest.fixture(scope="session", autouse=True)
def _starts_no_template_early() -> None:
    """Let the engines of the tests start as all but the first of a process do: the tests have imported everything."""
    early_template.take_early_template()


@pytest.fixture(scope="session", autouse=True)
def _forks_no_core_ahead() -> Iterator[None]:
    """Let the engines of this process have no next core before the first dies: few tests need one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_mp.client.cores.sources.launcher._AHEAD_DELAY_S", math.inf)
        yield


@pytest.fixture(scope="module")
def forked_cores(core_template):
    """Fork the cores that this process starts for the tests of a module, so that they need not import torch."""
    patched = types.SimpleNamespace(**{**vars(subprocess), "Popen": core_template})
    with pytest.MonkeyPatch.context() as patch:
        for module in ("process", "template"):
            patch.setattr(f"vllm_mp.client.cores.sources.{module}.subprocess", patched)
        yield


@pytest.fixture(scope="module")
def forked_ranks(forked_cores):
    """Fork all ranks of the cores of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORKS_RANKS, "1")
        yield


@pytest.fixture(scope="module")
def forked_programs(core_template):
    """Fork the `vllm-mp` commands and Python programs of a module too, and their cores.

    Such a process has imported torch, and has one child more than usual, whose name is `TEMPLATE_NAME`.
    """
    with starting_from(core_template):
        yield


@pytest.fixture
def operators(tmp_path):
    """The flag and path of an operator key file for `standalone_core`."""
    path = tmp_path / "operators"
    ensure_operator_key(path)
    return "--operator-key-file", str(path)


@pytest.fixture(scope="session")
def minilm():
    """The folder of a real sentence encoder, fetched at its first use on a machine."""
    return resolve_model("all-minilm-l6-v2")


@pytest.fixture(scope="session")
def encoder(minilm):
    """An engine of `minilm` for all tests that neither configure nor harm it."""
    with running_engine(minilm, max_model_len=None) as engine:
        yield engine
