"""The choice of the library that compiles a constraint, and the start of both for a model."""

from vllm_mp.config import ModelConfig
from vllm_mp.core.structured_output.compiler import GrammarCompiler
from vllm_mp.core.structured_output.grammar import Grammar
from vllm_mp.core.structured_output.llguidance_backend import LLGuidanceBackend
from vllm_mp.core.structured_output.tokenizer import GrammarTokenizer, TokenizerSource
from vllm_mp.core.structured_output.trial_process import TrialProcess
from vllm_mp.structured_outputs import Backend, Constraint


class Backends:
    """Compiles a constraint with the library that it names, or with the engine's choice."""

    def __init__(self, source: TokenizerSource, default: Backend = "auto") -> None:
        self.vocab_size = source.vocab_size
        self._default = default
        self._tokenizer = GrammarTokenizer(source)
        self._llguidance = LLGuidanceBackend(self._tokenizer)

    def load(self) -> None:
        """Load the tokenizer, which the first compilation does otherwise. Raises GrammarError if that fails."""
        self._tokenizer.llguidance()

    def compile(self, constraint: Constraint) -> Grammar:
        """Return the grammar of a constraint; called in any thread. Raises GrammarError if it cannot be compiled."""
        return self._llguidance.compile(constraint)


def grammar_compiler(config: ModelConfig, default: Backend = "auto") -> GrammarCompiler:
    """Return the compiler of constraints for a model; `default` is the library for those that name none."""
    source = TokenizerSource.of(config)
    backends = Backends(source, default)
    trials = TrialProcess(source)

    def compile_suspicious(constraint: Constraint) -> Grammar:
        trials.run(constraint)
        return backends.compile(constraint)

    return GrammarCompiler(backends.compile, compile_suspicious)
