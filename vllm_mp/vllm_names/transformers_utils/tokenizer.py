"""Loading a tokenizer, where programs for older versions of vLLM import it from."""

from typing import Any

from ..tokenizers import get_tokenizer

__all__ = ["AnyTokenizer", "get_tokenizer"]

AnyTokenizer = Any
"""A tokenizer of transformers, for type hints."""
