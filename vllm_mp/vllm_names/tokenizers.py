"""Loading a tokenizer by the name of its model, where programs for vLLM import it from."""

import functools
from typing import Any

from vllm_mp.client.prompts.tokenizer import get_tokenizer

__all__ = ["TokenizerLike", "cached_get_tokenizer", "get_tokenizer"]

TokenizerLike = Any
"""A tokenizer of transformers, for type hints."""
cached_get_tokenizer = functools.lru_cache(get_tokenizer)
"""The same tokenizer for the same arguments."""
