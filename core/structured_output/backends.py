"""The choice of the library that compiles a constraint, and the compiler for a model."""

import contextlib
import importlib.util
import logging

from vllm_mp.config import ModelConfig
from vllm_mp.core.structured_output.compiler import GrammarCompiler
from vllm_mp.core.structured_output.grammar import Backend, Grammar, GrammarError, PreparedConstraint
from vllm_mp.core.structured_output.llguidance_backend import LLGuidanceBackend
from vllm_mp.core.structured_output.schema_place import with_place
from vllm_mp.core.structured_output.tokenizer import GrammarTokenizer, TokenizerSource
from vllm_mp.core.structured_output.trial_process import TrialProcess
from vllm_mp.core.structured_output.xgrammar_backend import XGrammarBackend
from vllm_mp.structured_outputs import Backend as BackendName
from vllm_mp.structured_outputs import Constraint

logger = logging.getLogger(__name__)


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

    def load(self) -> None:
        """Load the tokenizer, which the first compilation does otherwise. Raises GrammarError if that fails."""
        self._tokenizer.llguidance()

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

    def prepare(self, constraint: Constraint, names: list[str]) -> tuple[PreparedConstraint, Grammar]:
        """Compile a constraint with the first of the libraries `names` that does not refuse it.

        Raises GrammarError, with the error of each library and the place in a JSON schema if it is known.
        """
        errors = []
        for name in names:
            try:
                prepared = self._backends[name].prepare(constraint)
                return prepared, self.compile(prepared)
            except GrammarError as error:
                errors.append(with_place(str(error), constraint))
        if len(errors) == 1:
            raise GrammarError(errors[0])
        raise GrammarError("; ".join(f"{name}: {error}" for name, error in zip(names, errors, strict=True)))

    def may_take(self, constraint: Constraint, names: list[str]) -> bool:
        """Whether one of the libraries `names` may compile a constraint, as far as it can say without being loaded."""
        for name in names:
            with contextlib.suppress(GrammarError):
                self._backends[name].prepare(constraint)
                return True
        return False

    def compile(self, prepared: PreparedConstraint) -> Grammar:
        """Return the grammar of what `prepare` returned. Raises GrammarError if it cannot be compiled."""
        return self._backends[prepared.backend].compile(prepared)


class TrialCompilation:
    """Compiles constraints, suspicious ones in a process of their own first."""

    def __init__(self, source: TokenizerSource, default: BackendName) -> None:
        self._backends = Backends(source, default)
        self._trials = TrialProcess(source, default)

    def load(self) -> None:
        try:
            self._backends.load()
        except GrammarError as error:
            logger.info("%s", error)

    def compile_plain(self, constraint: Constraint) -> Grammar | None:
        first, *others = self._backends.names(constraint)
        try:
            return self._backends.prepare(constraint, [first])[1]
        except GrammarError:
            if self._backends.may_take(constraint, others):
                return None
            raise

    def compile_suspicious(self, constraint: Constraint) -> Grammar:
        self._backends.names(constraint)
        return self._backends.compile(self._trials.run(constraint))

    def stop(self) -> None:
        self._trials.stop()


def grammar_compiler(config: ModelConfig, default: BackendName = "auto") -> GrammarCompiler:
    """Return the compiler of constraints for a model; `default` is the library for those that name none."""
    return GrammarCompiler(TrialCompilation(TokenizerSource.of(config), default))
