"""The forms of a prompt, where programs for vLLM import them from."""

from vllm_mp import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt

__all__ = ["EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
