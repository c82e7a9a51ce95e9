"""Loading a tokenizer by the name of its model, where programs for vLLM import it from."""

from vllm_mp.client.prompts.tokenizer import get_tokenizer

__all__ = ["get_tokenizer"]
