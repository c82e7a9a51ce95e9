"""Loading a tokenizer, where programs for older versions of vLLM import it from."""

from vllm_mp.tokenizers import get_tokenizer

__all__ = ["get_tokenizer"]
