"""What a fault may not have changed: the answers, and what the engine holds when they are given."""

import contextlib
import gc
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from vllm_mp import AsyncLLM
from vllm_mp.testing.differential import Answered, Judge
from vllm_mp.testing.engines import eventually, is_empty
from vllm_mp.testing.faults.load import AnyCase, AnyOutcome

ROUNDING = 1e-4
"""What log-probabilities and vectors may differ by, as requests that are taken up again meet other company."""
_EMPTY_WITHIN_S = 10.0


class Doubt(NamedTuple):
    """An answer that is not the undisturbed one."""

    case: AnyCase
    got: AnyOutcome
    expected: AnyOutcome


class Comparison:
    """Holds disturbed answers against the undisturbed ones."""

    def __init__(self) -> None:
        self.num_answers = 0
        self.num_tokens = 0
        self.num_excused = 0
        self.broken: list[str] = []
        self._doubts: list[Doubt] = []

    def compare(self, case: AnyCase, got: AnyOutcome, expected: AnyOutcome) -> None:
        """Count an answer; one that differs is judged by `settle`."""
        if not isinstance(got, list):
            self.num_answers += 1
            if not _is_same_vector(got, expected):
                self.broken.append(f"{case}: {_shown(got)}, undisturbed {_shown(expected)}")
            return
        self.num_answers += len(got)
        self.num_tokens += sum(len(one.token_ids) for one in got)
        if isinstance(expected, list) and len(got) == len(expected) and all(map(_is_same, got, expected)):
            return
        self._doubts.append(Doubt(case, got, expected))

    def settle(self, folder: Path, eos_token_ids: list[int]) -> list[str]:
        """What was broken: every difference that is not shown to be rounding by transformers' model in `folder`."""
        if self._doubts:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer

            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            judge = Judge(model, AutoTokenizer.from_pretrained(folder), eos_token_ids)
            for case, got, expected in self._doubts:
                before = len(judge.differences)
                judge.compare(case, got, expected)
                self.num_excused += len(judge.differences) == before
            self.broken += [f"answer {one.index} to {one.case}: {one.what}" for one in judge.differences]
            self._doubts.clear()
        return self.broken


def _is_same(one: Answered, other: Answered) -> bool:
    if one.finish_reason == "abort":
        count = len(one.token_ids)
        return (
            one.token_ids == other.token_ids[:count]
            and other.text.startswith(one.text.rstrip("\ufffd"))
            and _are_same_logprobs(one.logprobs, other.logprobs and other.logprobs[:count])
        )
    return (
        one[:3] == other[:3]
        and (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        and _are_same_logprobs(one.logprobs, other.logprobs)
        and _are_same_logprobs(one.prompt_logprobs, other.prompt_logprobs)
        and (one.cumulative_logprob is None) == (other.cumulative_logprob is None)
        and math.isclose(
            one.cumulative_logprob or 0, other.cumulative_logprob or 0, abs_tol=ROUNDING * (1 + len(one.token_ids))
        )
    )


def _are_same_logprobs(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(
        (mine is None and theirs is None)
        or (
            mine.keys() == theirs.keys()
            and all(
                abs(mine[token].logprob - theirs[token].logprob) <= ROUNDING
                and (mine[token].rank, mine[token].decoded_token) == (theirs[token].rank, theirs[token].decoded_token)
                for token in mine
            )
        )
        for mine, theirs in zip(one, other, strict=True)
    )


def _is_same_vector(got: AnyOutcome, expected: AnyOutcome) -> bool:
    if isinstance(got, np.ndarray) and isinstance(expected, np.ndarray):
        return got.shape == expected.shape and bool(np.abs(got - expected).max() <= ROUNDING)
    return isinstance(got, str) and got == expected


def _shown(outcome: AnyOutcome) -> str:
    if isinstance(outcome, np.ndarray):
        return f"a vector {outcome[:3]}…"
    return outcome if isinstance(outcome, str) else "an answer"


async def what_is_held(engine: AsyncLLM) -> list[str]:
    """What the core of an engine without requests still holds; nothing, where all is well."""
    try:
        await eventually(lambda: is_empty(engine), _EMPTY_WITHIN_S)
    except AssertionError:
        status = await engine.core_status()
        return [f"the core is not empty after {_EMPTY_WITHIN_S:g} s: {status}"]
    left = await engine.get_num_unfinished_requests()
    return [f"{left} requests have not ended"] if left else []


class Holdings(NamedTuple):
    """What this process holds of the system."""

    descriptors: int
    children: set[int]
    folders: set[str]
    """Runtime folders of engines."""

    @classmethod
    def now(cls) -> "Holdings":
        gc.collect()  # errors that were raised hold what was in use at that time
        return cls(
            len(os.listdir("/proc/self/fd")),
            {child.pid for child in psutil.Process().children(recursive=True)},
            {str(path) for path in Path(tempfile.gettempdir()).glob("vllm_mp-*")},
        )


@contextlib.contextmanager
def nothing_left_behind(problems: list[str]) -> Iterator[None]:
    """Note in `problems` what the block has left: descriptors, processes, runtime folders.

    The folder for temporary files must be used by nobody else meanwhile.
    """
    before = Holdings.now()
    yield
    after = Holdings.now()
    if after.descriptors > before.descriptors:
        problems.append(f"{after.descriptors - before.descriptors} file descriptors are left open")
    if children := after.children - before.children:
        problems.append(f"processes {sorted(children)} are left")
    if folders := after.folders - before.folders:
        problems.append(f"folders {sorted(folders)} are left")


def resident_mib(pid: int | None = None) -> float:
    """Resident memory of a process, this one by default, in MiB."""
    return float(psutil.Process(pid).memory_info().rss) / 2**20
