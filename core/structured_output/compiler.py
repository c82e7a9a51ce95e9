"""Compiles constraints beside the core's loop."""

import os

from vllm_mp.config import VllmConfig
from vllm_mp.core.structured_output.grammar import Grammar, GrammarError
from vllm_mp.structured_outputs import Constraint


class GrammarCompiler:
    """Compiles constraints beside the core's loop, and keeps the grammars."""

    def __init__(self, config: VllmConfig) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def request(self, constraint: Constraint) -> Grammar | None:
        raise GrammarError("structured output needs llguidance, which is not installed")

    def take_compiled(self) -> list[tuple[Constraint, Grammar | GrammarError]]:
        return []
