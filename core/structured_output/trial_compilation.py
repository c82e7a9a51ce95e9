"""Compiling of constraints in the core, each after a trial in another process."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from vllm_mp.core.structured_output.grammar import Grammar, GrammarError
from vllm_mp.core.structured_output.grammar_tokenizer import TokenizerSource
from vllm_mp.core.structured_output.llguidance_library import LLGuidanceLibrary, PreparedConstraint
from vllm_mp.core.structured_output.trial_process import QUICK, SLOW, TrialProcess
from vllm_mp.requests.structured_outputs import Constraint

logger = logging.getLogger(__name__)


class Trial(NamedTuple):
    """A constraint to compile where a crash or a limit harms nothing."""

    constraint: Constraint
    is_replay: bool
    is_needed: Callable[[], bool]
    """Returns False as soon as `TrialCompilation.cancel` may be called for this trial."""


class TrialCompilation:
    """Compiles constraints, after each was compiled in a process of its own.

    There are two such processes, so that a constraint that takes long keeps no other waiting. A constraint without a
    text of a client needs none.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._library = LLGuidanceLibrary(source)
        self._quick_trials = TrialProcess(source, QUICK)
        self._slow_trials = TrialProcess(source, SLOW)

    def load(self) -> None:
        """Load what compiling needs."""
        try:
            self._library.load()
        except GrammarError as error:
            logger.info("%s", error)

    def try_out(self, trial: Trial, is_quick: bool) -> PreparedConstraint | None:
        """Compile a constraint where it harms nothing, and return it in the form in which that succeeded.

        None, only with `is_quick`: it must be tried with `is_quick` false, which may take long.

        Raises GrammarError if it cannot be compiled, and TrialUnavailableError if it cannot be tried now.
        """
        constraint = trial.constraint
        if constraint.kind == "json_object" and not constraint.whitespace_pattern:
            return self._library.prepare(constraint)  # it has no text of a client
        return self._trials(is_quick).run(*trial)

    def cancel(self, is_quick: bool) -> None:
        """End the trial that runs if it is no longer needed; it then raises an error. Any thread may call this."""
        self._trials(is_quick).cancel()

    def prepare(self, constraint: Constraint) -> PreparedConstraint:
        """Return what `try_out` returned for a constraint that has passed its trial before. Raises GrammarError."""
        return self._library.prepare(constraint)

    def compile(self, prepared: PreparedConstraint) -> Grammar:
        """Return the grammar of what `try_out` returned. Raises GrammarError."""
        return self._library.compile(prepared)

    def stop(self) -> None:
        """Let trials fail from now on, also those that run."""
        self._quick_trials.stop()
        self._slow_trials.stop()

    def _trials(self, is_quick: bool) -> TrialProcess:
        return self._quick_trials if is_quick else self._slow_trials
