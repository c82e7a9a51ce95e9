"""The forms of a prompt, where programs for older versions of vLLM import them from."""

from vllm_mp.inputs import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
