"""The room of a conversation in the model's context."""

from typing import TYPE_CHECKING

from vllm_mp.cli.chat.conversation import Conversation
from vllm_mp.cli.chat.screen import Screen
from vllm_mp.cli.generate import chat_prompt

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM


def fitting_prompt(llm: "AsyncLLM", conversation: Conversation, screen: Screen) -> list[int]:
    """Return the conversation as token ids. If it fills the context, its oldest turns are removed from it."""
    limit = llm.model_config.max_model_len
    prompt = chat_prompt(llm, conversation.to_send())
    while len(prompt) >= limit and len(conversation.messages) > 1:
        del conversation.messages[:2]
        screen.note("(the conversation is longer than the context; its oldest turn is forgotten)")
        prompt = chat_prompt(llm, conversation.to_send())
    return prompt
