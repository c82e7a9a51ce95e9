"""The forms of a prompt, where programs for vLLM import them from."""

from vllm_mp import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
