"""Faults that the core brings about itself, so that tests and operators see what becomes of its users.

Nothing of this is loaded, and nothing stands in the way of a step, unless the option `fault_injection` asks for it.
"""

import itertools
import logging
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vllm_mp.core_launch import CoreLaunch
from vllm_mp.fault_injection import device_faults
from vllm_mp.fault_injection.faults import LOAD, PUBLISH, STEP, Fault, parse_faults

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mp.core.ipc.request_handler import RequestHandler
    from vllm_mp.core.scheduler.batch import Batch, Rows
    from vllm_mp.core.scheduler.step import ModelOutput, ScheduledStep, StepUpdate
    from vllm_mp.core.worker.model_runner import ModelRunner, PendingOutput
    from vllm_mp.core.worker.sampler import Sampler

logger = logging.getLogger(__name__)

_EXIT_CODE = 70
_OOM_ROOM = 2**29
"""Bytes of address space that are left to a core that runs out of memory, whatever the machine has."""


class FaultHooks:
    """The faults of one incarnation, and the hooks that let them strike."""

    def __init__(self, launch: CoreLaunch) -> None:
        config = launch.config
        self._all = parse_faults(config.liveness_config.fault_injection, config.device_config.device)
        self._incarnation = launch.incarnation
        self._chances = {one: random.Random(f"{one.seed} {launch.incarnation}") for one in self._all}
        self._folder = None if launch.runtime_dir is None else Path(launch.runtime_dir)
        self._struck: set[Fault] = set()
        self._latest_of: Callable[[int], int] | None = None
        """The token that a row was last given, which the host may not have been told yet."""
        self._step = 0
        logger.warning("faults are injected: %s", config.liveness_config.fault_injection)

    def while_loading(self, share: float) -> None:
        """To be called now and then while the model loads, with the share that is done."""
        for fault in self._at(LOAD):
            if share >= fault.share and self._is_due(fault):
                _strike(fault)

    def install(self, runner: "ModelRunner", server: "RequestHandler") -> None:
        """Let the faults of steps and of their messages strike in `runner` and `server`."""
        launch, publish = runner.launch, server.publish
        in_steps, in_messages = self._at(STEP), self._at(PUBLISH)
        due: dict[int, list[Fault]] = {}  # by step: another may be launched before one is published
        poison = _Poison()
        self._latest_of = runner.latest_token

        def faulty_launch(step: "ScheduledStep", batch: "Batch", sampler: "Sampler") -> "PendingOutput":
            self._step += 1
            due[self._step] = [
                one for one in in_messages if len(self._rows_hit(one, step, batch)) and self._is_due(one)
            ]
            poison.tokens = np.zeros(int(step.counts.sum()), np.bool_)
            for fault in in_steps:
                rows = self._rows_hit(fault, step, batch)
                if len(rows) and self._is_due(fault):
                    if fault.action == "nan":
                        poison.tokens |= np.repeat(np.isin(step.rows, rows), step.counts)
                    else:
                        _strike(fault)
            return launch(step, batch, sampler)

        def faulty_publish(number: int, update: "StepUpdate", output: "ModelOutput") -> None:
            faults = due.pop(number, None)
            if not faults:
                return publish(number, update, output)
            messages = server.step_outputs(number, update, output)
            for client, message in itertools.islice(messages, faults[0].messages):
                server._send_to(client, message)
            for fault in faults:
                _strike(fault)
            for client, message in messages:
                server._send_to(client, message)
            return None

        if any(one.action == "nan" for one in in_steps):
            runner.wrap_model(lambda model: _PoisonedModel(model, poison))
        if in_steps or in_messages:
            runner.launch = faulty_launch  # type: ignore[method-assign]
        if in_messages:
            server.publish = faulty_publish  # type: ignore[method-assign]

    def _at(self, place: str) -> list[Fault]:
        return [one for one in self._all if one.place == place and one.incarnation in (None, self._incarnation)]

    def _is_due(self, fault: Fault) -> bool:
        """Whether `fault`, whose other conditions hold, strikes now; to be asked once a visit."""
        if self._chances[fault].random() >= fault.probability:
            return False
        if not fault.once:
            return True
        if fault in self._struck:
            return False
        self._struck.add(fault)
        if self._folder is None:
            return True
        # A later incarnation must not strike again, and this one may have no time to tell it.
        mark = self._folder / f"fault-{self._all.index(fault)}"
        if mark.exists():
            return False
        mark.touch()
        return True

    def _rows_hit(self, fault: Fault, step: "ScheduledStep", batch: "Batch") -> "Rows":
        """The rows of `step` that `fault` is about; none where it is not about this step."""
        if fault.step not in (None, self._step):
            return step.rows[:0]
        if not fault.is_about_a_request:
            return step.rows
        hit = [self._is_hit(fault, step, batch, i) for i in range(len(step.rows))]
        return step.rows[np.array(hit, np.bool_)]

    def _is_hit(self, fault: Fault, step: "ScheduledStep", batch: "Batch", i: int) -> bool:
        """Whether the request in row `i` of `step` is one that `fault` is about."""
        row = int(step.rows[i])
        request = batch.request(row)
        begin, known = int(batch.num_computed_tokens[row]), int(batch.num_tokens[row])
        return (
            (fault.request is None or fault.request in request.request_id)
            and (fault.token is None or fault.token in self._tokens(step, batch, i))
            and (
                fault.position is None
                or (bool(step.samples[i]) and known - request.num_prompt_tokens == fault.position)
            )
            and (fault.computed is None or begin >= fault.computed)
        )

    def _tokens(self, step: "ScheduledStep", batch: "Batch", i: int) -> list[int]:
        """What `step` computes of its row `i`."""
        row = int(step.rows[i])
        if i in step.awaits:
            assert self._latest_of is not None
            return [self._latest_of(row)]
        begin = int(batch.num_computed_tokens[row])
        tokens: list[int] = batch.token_ids[row, begin : begin + int(step.counts[i])].tolist()
        return tokens


class _Poison:
    """Which tokens of the step have hidden states that are not numbers."""

    tokens: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
    """[num_tokens]."""


class _PoisonedModel:
    """A model some of whose hidden states are not numbers."""

    def __init__(self, model: Any, poison: _Poison) -> None:
        self._model = model
        self._poison = poison

    def __call__(self, *args: Any) -> "Tensor":
        hidden: Tensor = self._model(*args)
        if self._poison.tokens.any():
            hidden = hidden.clone()
            hidden[np.flatnonzero(self._poison.tokens)] = float("nan")
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _strike(fault: Fault) -> None:
    logger.warning("injected fault: %s", fault.text)
    _STRIKES[fault.action](fault)


def _raise(fault: Fault) -> None:
    raise RuntimeError(f"injected fault: {fault.text}")


def _hang(_fault: Fault) -> None:
    while True:
        time.sleep(3600)


def _spin(_fault: Fault) -> None:
    while True:
        pass


def _run_out_of_memory(fault: Fault) -> None:
    """Take memory until there is none: of the core's own allowance, so that the machine keeps its own."""
    with Path("/proc/self/statm").open() as sizes:
        in_use = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _OOM_ROOM, resource.getrlimit(resource.RLIMIT_AS)[1]))
    hoard = []
    while True:
        hoard.append(bytearray(2**24))


def _fill_disk(_fault: Fault) -> None:
    """Let every write to a file fail from now on, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _set_clock(fault: Fault) -> None:
    """Let the time of day, as Python code sees it, jump by `fault.seconds`."""
    now = time.time
    time.time = lambda: now() + fault.seconds


_STRIKES: dict[str, Callable[[Fault], object]] = {
    "exit": lambda _: os._exit(_EXIT_CODE),
    "kill": lambda _: signal.raise_signal(signal.SIGKILL),
    "abort": lambda _: signal.raise_signal(signal.SIGABRT),
    "segv": lambda _: signal.raise_signal(signal.SIGSEGV),
    "raise": _raise,
    "hang": _hang,
    "spin": _spin,
    "slow": lambda fault: time.sleep(fault.seconds),
    "oom": _run_out_of_memory,
    "fulldisk": _fill_disk,
    "clock": _set_clock,
    "device_oom": lambda _: device_faults.run_out_of_memory(),
    "illegal_access": lambda _: device_faults.access_illegally(),
    "device_assert": lambda _: device_faults.fail_an_assertion(),
}
