"""Compare outcomes of disturbed requests with undisturbed ones. A fault must not have changed any output."""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_mp.testing.differential import Case, FinalCompletion, Judge, Outcome
from vllm_mp.testing.faults.baseline import Baseline
from vllm_mp.testing.faults.load import AnyCase, AnyOutcome, PoolingCase

ROUNDING = 1e-4
"""How far log-probabilities and vectors may differ, since resumed requests share their steps with other requests."""


class _Mismatch(NamedTuple):
    """An outcome that differs from the undisturbed one, perhaps by rounding only."""

    case: Case
    got: Outcome
    expected: Outcome


class Comparison:
    """Compares disturbed outcomes with undisturbed ones."""

    def __init__(self) -> None:
        self.num_answers = 0
        """Completions and vectors."""
        self.num_tokens = 0
        self.num_excused = 0
        self.broken: list[str] = []
        self._mismatches: list[_Mismatch] = []

    def compare(self, case: AnyCase, got: AnyOutcome, expected: AnyOutcome) -> None:
        """Count an outcome. If it differs from the expected one, `settle` judges it."""
        if isinstance(case, PoolingCase) or isinstance(got, str | np.ndarray) or isinstance(expected, np.ndarray):
            self.num_answers += 1
            if not _is_same_vector(got, expected):
                self.broken.append(f"{case}: {_shown(got)}, undisturbed {_shown(expected)}")
            return
        self.num_answers += len(got)
        self.num_tokens += sum(len(completion.token_ids) for completion in got)
        if case.adapter is not None or "structured_outputs" in case.params or isinstance(case.prompt, dict):
            # The model of `settle` has no adapters, constraints or images.
            if isinstance(expected, str) or len(got) != len(expected) or not all(map(_is_same, got, expected)):
                self.broken.append(f"{case}: {got}, undisturbed {expected}")
            return
        if isinstance(expected, str) or len(got) != len(expected) or not all(map(_is_same, got, expected)):
            self._mismatches.append(_Mismatch(case, got, expected))

    def settle(self, folder: Path, eos_token_ids: list[int]) -> list[str]:
        """Return all differences that transformers' model in `folder` does not show to be rounding."""
        if self._mismatches:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer

            from vllm_mp.testing.random_models import with_soft_cap

            model = with_soft_cap(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
            judge = Judge(model, AutoTokenizer.from_pretrained(folder), eos_token_ids)
            for mismatch in self._mismatches:
                before = len(judge.differences)
                judge.compare(*mismatch)
                self.num_excused += len(judge.differences) == before
            self.broken += [
                f"completion {difference.completion_index} of {difference.case}: {difference.what}"
                for difference in judge.differences
            ]
            self._mismatches.clear()
        return self.broken


@dataclasses.dataclass
class ComparedAnswers:
    """What a comparison found, and the promises that were broken. Times are in seconds."""

    answers: int = 0
    """Completions and vectors that were compared."""
    tokens: int = 0
    excused: int = 0
    """Requests whose outcome differs by rounding only."""
    broken: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def settle(self, comparison: Comparison, baseline: Baseline, problems: list[str], began: float) -> None:
        """Take over what the comparison found, the `problems` at the end, and the time since `began`."""
        self.broken += comparison.settle(baseline.folder, baseline.eos_token_ids) + problems
        self.answers, self.tokens = comparison.num_answers, comparison.num_tokens
        self.excused = comparison.num_excused
        self.seconds = time.monotonic() - began


def _is_same(got: FinalCompletion, expected: FinalCompletion) -> bool:
    """Return whether two completions are the same; an aborted one must be a beginning of the expected one."""
    if got.finish_reason == "abort":
        count = len(got.token_ids)
        return (
            got.token_ids == expected.token_ids[:count]
            and expected.text.startswith(got.text.rstrip("\ufffd"))
            and _are_same_logprobs(got.logprobs, expected.logprobs and expected.logprobs[:count])
        )
    return (
        got[:3] == expected[:3]
        and (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
        and _are_same_logprobs(got.logprobs, expected.logprobs)
        and _are_same_logprobs(got.prompt_logprobs, expected.prompt_logprobs)
        and (got.cumulative_logprob is None) == (expected.cumulative_logprob is None)
        and math.isclose(
            got.cumulative_logprob or 0, expected.cumulative_logprob or 0, abs_tol=ROUNDING * (1 + len(got.token_ids))
        )
    )


def _are_same_logprobs(got: Any, expected: Any) -> bool:
    if got is None or expected is None:
        return got is expected
    return len(got) == len(expected) and all(
        (mine is None and theirs is None)
        or (
            mine.keys() == theirs.keys()
            and all(
                abs(mine[token].logprob - theirs[token].logprob) <= ROUNDING
                and (mine[token].rank, mine[token].decoded_token) == (theirs[token].rank, theirs[token].decoded_token)
                for token in mine
            )
        )
        for mine, theirs in zip(got, expected, strict=True)
    )


def _is_same_vector(got: AnyOutcome, expected: AnyOutcome) -> bool:
    if isinstance(got, np.ndarray) and isinstance(expected, np.ndarray):
        return got.shape == expected.shape and bool(np.abs(got - expected).max() <= ROUNDING)
    return isinstance(got, str) and got == expected


def _shown(outcome: AnyOutcome) -> str:
    if isinstance(outcome, np.ndarray):
        return f"a vector {outcome[:3]}…"
    return outcome if isinstance(outcome, str) else "completions"
