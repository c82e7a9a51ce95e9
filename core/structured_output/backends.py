"""The choice of the library that compiles a constraint, and the compiler for a model."""

import contextlib
import importlib.util
import logging
from collections.abc import Callable, Sequence

from vllm_mp.config import ModelConfig
from vllm_mp.core.outside_work import OutsideWork
from vllm_mp.core.structured_output.compiler import GrammarCompiler, Trial
from vllm_mp.core.structured_output.grammar import Backend, Grammar, GrammarError, PreparedConstraint
from vllm_mp.core.structured_output.grammar_tokenizer import GrammarTokenizer, TokenizerSource
from vllm_mp.core.structured_output.libraries.llguidance_backend import LLGuidanceBackend
from vllm_mp.core.structured_output.libraries.xgrammar_backend import XGrammarBackend
from vllm_mp.core.structured_output.schema.schema_place import with_place
from vllm_mp.core.structured_output.trial_process import QUICK, SLOW, TrialProcess
from vllm_mp.core_link.core_status import TriedConstraint
from vllm_mp.requests.structured_outputs import Backend as BackendName
from vllm_mp.requests.structured_outputs import Constraint

logger = logging.getLogger(__name__)

_SIGNS_OF_LACKS = ("upported", "Unknown", "too ", "limit", "fuel", "Unable", "Failed to", "not disjoint")
"""Parts of llguidance's errors for what it does not have or refuses to compute, rather than for what is wrong."""


class Backends:
    """Compiles constraints with the library that they name, or with the first that does not refuse them."""

    def __init__(self, source: TokenizerSource, default: BackendName = "auto") -> None:
        """`default` is the library for constraints that name none; "auto": llguidance, then xgrammar if installed."""
        self.vocab_size = source.vocab_size
        self._default = default
        self._tokenizer = GrammarTokenizer(source)
        self._backends: dict[str, Backend] = {"llguidance": LLGuidanceBackend(self._tokenizer)}
        if importlib.util.find_spec("xgrammar") is not None:
            self._backends["xgrammar"] = XGrammarBackend(self._tokenizer)

    def load(self, name: str = "llguidance") -> None:
        """Load a library and its tokenizer, which the first compilation does otherwise.

        Raises GrammarError if that fails.
        """
        self._backends[name].load()

    def names(self, constraint: Constraint) -> list[str]:
        """Return the libraries that may compile a constraint, in the order in which they are tried.

        Raises GrammarError if the library that is named is not installed.
        """
        name = self._default if constraint.backend == "auto" else constraint.backend
        if name == "auto":
            return list(self._backends)
        if name not in self._backends:
            raise GrammarError(f"the backend {name!r} is not installed: pip install 'vllm-mp[{name}]'")
        return [name]

    def prepare(
        self, constraint: Constraint, names: Sequence[str], before: Callable[[str], None] = lambda name: None
    ) -> tuple[PreparedConstraint, Grammar]:
        """Compile a constraint with the first of the libraries `names` that does not refuse it.

        `before` is called with the name of a library before it compiles. Raises GrammarError, with the error of each
        library and the place in a JSON schema if it is known.
        """
        errors: list[str] = []
        for name in names:
            if errors and not self.may_fall_back(constraint, name, errors[-1]):
                continue
            try:
                prepared = self._backends[name].prepare(constraint)
                before(name)
                return prepared, self.compile(prepared)
            except GrammarError as error:
                errors.append(with_place(str(error), constraint))
        if len(errors) == 1:
            raise GrammarError(errors[0])
        raise GrammarError("; ".join(f"{name}: {error}" for name, error in zip(names, errors, strict=True)))

    def may_fall_back(self, constraint: Constraint, name: str, error: str) -> bool:
        """Whether the library `name` may take a constraint that another has refused, as far as is known unloaded."""
        if not any(sign in error for sign in _SIGNS_OF_LACKS):
            return False
        with contextlib.suppress(GrammarError):
            self._backends[name].prepare(constraint)
            return True
        return False

    def form(self, constraint: Constraint, name: str) -> PreparedConstraint:
        """Return a constraint in the form of the library `name`. Raises GrammarError if the library has none."""
        return self._backends[name].prepare(constraint)

    def compile(self, prepared: PreparedConstraint) -> Grammar:
        """Return the grammar of what `prepare` returned. Raises GrammarError if it cannot be compiled."""
        return self._backends[prepared.backend].compile(prepared)


class TrialCompilation:
    """Compiles constraints, after each was compiled in a process of its own.

    There are two such processes. So a constraint that takes long, or needs a library that loads slowly, keeps no other
    waiting. A constraint without a text of a client needs none.
    """

    def __init__(self, source: TokenizerSource, default: BackendName) -> None:
        self._backends = Backends(source, default)
        self._quick_trials = TrialProcess(source, default, QUICK)
        self._slow_trials = TrialProcess(source, default, SLOW)

    def load(self) -> None:
        try:
            self._backends.load()
        except GrammarError as error:
            logger.info("%s", error)

    def try_out(self, trial: Trial, is_quick: bool) -> PreparedConstraint | None:
        constraint = trial.constraint
        first = self._backends.names(constraint)[0]
        if constraint.kind == "json_object" and not constraint.whitespace_pattern and first == "llguidance":
            return self._backends.form(constraint, first)  # it has no text of a client
        return self._trials(is_quick).run(*trial)

    def cancel(self, is_quick: bool) -> None:
        self._trials(is_quick).cancel()

    def form(self, constraint: Constraint, backend: str) -> PreparedConstraint:
        return self._backends.form(constraint, backend)

    def compile(self, prepared: PreparedConstraint) -> Grammar:
        return self._backends.compile(prepared)

    def stop(self) -> None:
        self._quick_trials.stop()
        self._slow_trials.stop()

    def _trials(self, is_quick: bool) -> TrialProcess:
        return self._quick_trials if is_quick else self._slow_trials


def grammar_compiler(
    config: ModelConfig,
    default: BackendName = "auto",
    outside: OutsideWork | None = None,
    note_tried: Callable[[TriedConstraint], None] = lambda tried: None,
) -> GrammarCompiler:
    """Return the compiler of constraints for a model; `default` is the library for those that name none.

    `outside` publishes what is compiled, and for which requests.
    """
    return GrammarCompiler(TrialCompilation(TokenizerSource.of(config), default), outside, note_tried)
