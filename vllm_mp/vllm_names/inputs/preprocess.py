"""The input preprocessor, where programs for vLLM import it from."""

from vllm_mp import InputPreprocessor

__all__ = ["InputPreprocessor"]
