"""A helper of logits processors, where programs for vLLM import it from."""

from vllm_mp.logits_processor import process_dict_updates

__all__ = ["process_dict_updates"]
