"""Hooks in the core at which injected faults strike, so that tests and operators see the effect on users.

This module is loaded, and steps are wrapped, only if the option `fault_injection` is set.
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

from vllm_mp.core.fault_hooks import device_faults
from vllm_mp.core_link.core_launch import CoreLaunch
from vllm_mp.fault_injection.faults import (
    ADAPTER,
    CALL,
    COMPILE,
    IMAGE,
    LOAD,
    MESSAGE,
    PUBLISH,
    SEAL,
    STEP,
    Fault,
    mark_of_strike,
    parse_faults,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mp.core.ipc.call_handler import CallHandler
    from vllm_mp.core.ipc.request_handler import RequestHandler
    from vllm_mp.core.lora.adapter_cache import AdapterCache
    from vllm_mp.core.lora.cached_adapter import CachedAdapter
    from vllm_mp.core.scheduler.batch import Batch, Rows
    from vllm_mp.core.scheduler.cache.seal_table import SealTable
    from vllm_mp.core.scheduler.step import ModelOutput, OutputHandle, ScheduledStep, StepUpdate
    from vllm_mp.core.structured_output.grammar import Grammar
    from vllm_mp.core.structured_output.llguidance_library import PreparedConstraint
    from vllm_mp.core.structured_output.trial_compilation import TrialCompilation
    from vllm_mp.core.worker.image_encodings import ImageEncodings
    from vllm_mp.core.worker.model_runner import ModelRunner
    from vllm_mp.core.worker.sampling.sampler import Sampler
    from vllm_mp.wire import Call

logger = logging.getLogger(__name__)

_EXIT_CODE = 70
_WRITES_OF_THE_TABLE = ("forget", "note_before", "note_full", "note_tokens", "seal")
_OOM_HEADROOM_BYTES = 2**29
"""Address space that a core may still allocate before it runs out of memory, however much the machine has."""


class FaultHooks:
    """The faults of one incarnation, and the hooks at which they strike."""

    def __init__(self, launch: CoreLaunch) -> None:
        config = launch.config
        self._all = parse_faults(config.liveness_config.fault_injection, config.device_config.device)
        self.slow_down = any(fault.action == "slow" for fault in self._all)
        """Faults sleep in steps that do not hang."""
        self._number = launch.number
        self._chances = {fault: random.Random(f"{fault.seed} {launch.number}") for fault in self._all}
        self._folder = None if launch.runtime_dir is None else Path(launch.runtime_dir)
        self._struck: set[Fault] = set()
        self._latest_token: Callable[[int], int] | None = None
        """Returns token i of those that were sampled last; it may still be on the device only."""
        self._step = 0
        logger.warning("faults are injected: %s", config.liveness_config.fault_injection)

    def while_loading(self, share: float) -> None:
        """Let faults of loading strike. The loader calls this repeatedly with the loaded share of the weights."""
        for fault in self._at(LOAD):
            if share >= fault.share and self._is_due(fault):
                _strike(fault)

    def install(self, runner: "ModelRunner", server: "RequestHandler") -> None:
        """Wrap `runner` and `server`, so that faults of steps and of their messages strike there."""
        launch, publish = runner.launch, server.publish
        in_steps, in_messages = self._at(STEP), self._at(PUBLISH)
        due: dict[int, list[Fault]] = {}  # by step number: a step may be launched before its predecessor is published
        poison = _Poison()
        self._latest_token = runner.latest_token

        def faulty_launch(step: "ScheduledStep", batch: "Batch", sampler: "Sampler") -> "OutputHandle":
            self._step += 1
            due[self._step] = [
                fault for fault in in_messages if len(self._rows_hit(fault, step, batch)) and self._is_due(fault)
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

        if any(fault.action == "nan" for fault in in_steps):
            runner.memory.wrap_model(lambda model: _PoisonedModel(model, poison))
        if in_steps or in_messages:
            runner.launch = faulty_launch  # type: ignore[method-assign]
        if in_messages:
            server.publish = faulty_publish  # type: ignore[method-assign]
        if (in_images := self._at(IMAGE)) and runner.encodings is not None:
            self._install_in_images(runner.encodings, in_images)

    def _install_in_images(self, encodings: "ImageEncodings", faults: list[Fault]) -> None:
        """Wrap `encodings`, so that `faults` strike after each chunk of a layer."""
        beat = encodings.beat

        def faulty_beat() -> None:
            beat()
            for fault in faults:
                if self._is_due(fault):
                    _strike(fault)

        encodings.beat = faulty_beat

    def install_outside(
        self,
        server: "RequestHandler",
        calls: "type[CallHandler]",
        compilation: "type[TrialCompilation]",
        adapters: "type[AdapterCache]",
    ) -> None:
        """Wrap `server` and methods of the classes, so that faults strike in what the core does outside of steps."""
        make, read = compilation.compile, adapters._read_folder
        run_call, admit = calls._run, server._admit

        def faulty_compile(owner: "TrialCompilation", prepared: "PreparedConstraint") -> "Grammar":
            self._strike_about(COMPILE, prepared.text)
            return make(owner, prepared)

        def faulty_read(cache: "AdapterCache", adapter: "CachedAdapter") -> Any:
            self._strike_about(ADAPTER, adapter.name)
            return read(cache, adapter)

        def faulty_call(owner: "CallHandler", message: "Call", *others: Any) -> Any:
            self._strike_about(CALL, message.name)
            return run_call(owner, message, *others)

        def faulty_admit(client: int, message: Any, *others: Any) -> None:
            self._strike_about(MESSAGE, message.request_id)
            admit(client, message, *others)

        if self._at(COMPILE):
            compilation.compile = faulty_compile  # type: ignore[method-assign, assignment]
        if self._at(ADAPTER):
            adapters._read_folder = faulty_read  # type: ignore[method-assign, assignment]
        if self._at(CALL):
            calls._run = faulty_call  # type: ignore[method-assign, assignment]
        if self._at(MESSAGE):
            server._admit = faulty_admit  # type: ignore[method-assign, assignment]

    def install_sealing(self, table: "type[SealTable]") -> None:
        """Wrap the methods of the class that write to the table, so that faults strike between two of their writes."""
        faults = self._at(SEAL)
        for name in _WRITES_OF_THE_TABLE if faults else ():
            setattr(table, name, self._interrupted(getattr(table, name), faults))

    def _interrupted(self, write: Callable[..., None], faults: list[Fault]) -> Callable[..., None]:
        """Return `write`, which faults interrupt when half of the blocks are written."""

        def interrupted(table: "SealTable", blocks: npt.NDArray[np.int32], *columns: Any) -> None:
            for fault in faults:
                if self._is_due(fault):
                    half = len(blocks) // 2
                    write(table, blocks[:half], *(each if isinstance(each, int) else each[:half] for each in columns))
                    _strike(fault)
            write(table, blocks, *columns)

        return interrupted

    def _strike_about(self, point: str, text: str) -> None:
        """Let faults strike at a point outside of steps that is about `text`."""
        for fault in self._at(point):
            if (fault.about is None or fault.about in text) and self._is_due(fault):
                _strike(fault)

    def _at(self, point: str) -> list[Fault]:
        """Return the faults that strike at `point` in this incarnation."""
        numbers = (None, self._number)
        return [fault for fault in self._all if fault.point == point and fault.incarnation in numbers]

    def _is_due(self, fault: Fault) -> bool:
        """Return whether `fault` strikes now, given that its other conditions hold. Call this once per visit."""
        if self._chances[fault].random() >= fault.probability:
            return False
        if not fault.once:
            return True
        if fault in self._struck:
            return False
        # A file tells later incarnations not to strike again, since this one may die before it can send anything.
        mark = None if self._folder is None else mark_of_strike(self._folder, self._all.index(fault))
        if mark is not None and mark.exists():
            return False
        self._struck.add(fault)
        if mark is not None:
            mark.touch()
        return True

    def _rows_hit(self, fault: Fault, step: "ScheduledStep", batch: "Batch") -> "Rows":
        """Return the rows of `step` to which the conditions of `fault` apply; none if this is not its step."""
        if fault.step not in (None, self._step):
            return step.rows[:0]
        if not fault.is_about_a_request:
            return step.rows
        hit = [self._is_hit(fault, step, batch, i) for i in range(len(step.rows))]
        return step.rows[np.array(hit, np.bool_)]

    def _is_hit(self, fault: Fault, step: "ScheduledStep", batch: "Batch", i: int) -> bool:
        """Return whether the request in row `i` of `step` meets the conditions of `fault`."""
        row = int(step.rows[i])
        request = batch.request(row)
        num_computed, num_tokens = int(batch.num_computed_tokens[row]), int(batch.num_tokens[row])
        position = num_tokens - request.num_prompt_tokens
        num_drafts = 0 if step.drafts is None else int(step.drafts.counts[i])
        return (
            (fault.request is None or fault.request in request.request_id)
            and (fault.token is None or fault.token in self._tokens(step, batch, i))
            and (
                fault.position is None
                or (bool(step.samples[i]) and position <= fault.position <= position + num_drafts)
            )
            and (fault.computed is None or num_computed >= fault.computed)
        )

    def _tokens(self, step: "ScheduledStep", batch: "Batch", i: int) -> list[int]:
        """Return the token ids that `step` computes for its row `i`."""
        if i in step.awaits:
            assert self._latest_token is not None
            return [self._latest_token(int(step.awaited[step.awaits == i][0]))]
        row = int(step.rows[i])
        begin = int(batch.num_computed_tokens[row])
        tokens: list[int] = batch.token_ids[row, begin : begin + int(step.counts[i])].tolist()
        return tokens


class _Poison:
    """The tokens of the step whose hidden states become NaN."""

    tokens: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
    """[num_tokens]"""


class _PoisonedModel:
    """A model that returns NaN as the hidden states of poisoned tokens."""

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
    """Let `fault` strike, which may end the core, raise an error or never return."""
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


def _compute(fault: Fault) -> None:
    end = time.monotonic() + fault.seconds
    while time.monotonic() < end:
        pass


def _run_out_of_memory(fault: Fault) -> None:
    """Allocate memory until none is left. The core's own address space is limited first, so the machine is unharmed."""
    with Path("/proc/self/statm").open() as sizes:
        in_use = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _OOM_HEADROOM_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    allocated = []
    while True:
        allocated.append(bytes(2**24))


def _fill_disk(_fault: Fault) -> None:
    """Make every later write to a file fail, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _set_clock(fault: Fault) -> None:
    """Move the time of day, as Python code sees it, by `fault.seconds`."""
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
    "busy": _compute,
    "oom": _run_out_of_memory,
    "fulldisk": _fill_disk,
    "clock": _set_clock,
    "device_oom": lambda _: device_faults.run_out_of_memory(),
    "illegal_access": lambda _: device_faults.access_illegally(),
    "device_assert": lambda _: device_faults.fail_an_assertion(),
}
