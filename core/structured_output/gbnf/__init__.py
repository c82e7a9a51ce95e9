"""Grammars in GBNF, the notation of llama.cpp, as grammars in Lark's notation."""

import re

from vllm_mp.core.structured_output.gbnf.lark_rules import to_lark
from vllm_mp.core.structured_output.gbnf.reader import read_rules


def is_gbnf(text: str) -> bool:
    """Return whether a grammar defines a rule as GBNF does."""
    return re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE) is not None


def gbnf_to_lark(text: str) -> str:
    """Return a grammar in GBNF in Lark's notation.

    Raises GrammarError, which names the rule and the line, if the grammar cannot be read.
    """
    return to_lark(read_rules(text))
