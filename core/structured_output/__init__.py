"""Structured output: constraints compiled to grammars, and the masks of tokens that grammars allow."""
