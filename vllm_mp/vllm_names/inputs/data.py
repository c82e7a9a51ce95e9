"""The forms of a prompt, where programs for older versions of vLLM import them from."""

from ..inputs import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt

__all__ = ["EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
