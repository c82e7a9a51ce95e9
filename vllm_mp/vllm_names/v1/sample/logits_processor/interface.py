"""The interface of logits processors, where programs for vLLM import it from."""

from vllm_mp.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

__all__ = ["BatchUpdate", "LogitsProcessor", "MoveDirectionality"]
