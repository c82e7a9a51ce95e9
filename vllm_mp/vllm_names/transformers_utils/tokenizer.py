"""Loading a tokenizer, where programs for older versions of vLLM import it from."""

from ..tokenizers import TokenizerLike, get_tokenizer

__all__ = ["AnyTokenizer", "get_tokenizer"]

AnyTokenizer = TokenizerLike
