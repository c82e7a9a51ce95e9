"""The prompt of a conversation: what the endpoints that take messages share."""

from typing import Any, Protocol

from vllm_mp.server.chat_messages import ChatMessage, template_messages
from vllm_mp.server.chat_template import ChatTemplateError
from vllm_mp.server.endpoint import Call
from vllm_mp.server.errors import ApiError


class TemplateFields(Protocol):
    """The fields of a body that say how its conversation becomes a prompt."""

    add_generation_prompt: bool | None
    """Let the prompt end where the assistant's answer begins; by default it does, unless the last message continues."""
    continue_final_message: bool | None
    """Continue the last message, in place of an answer to it."""
    chat_template: str | None
    """A template in place of the model's; refused unless the server runs with --trust-request-chat-template."""
    chat_template_kwargs: dict[str, Any] | None
    """Variables for the template."""


async def chat_prompt(call: Call, messages: list[ChatMessage], fields: TemplateFields) -> str:
    """Return the conversation as the text of a prompt, which holds the special tokens.

    Raises ApiError if the template refuses the messages, or if the request may not bring a template.
    """
    template = call.server.chat_template
    if fields.chat_template is not None and not call.server.options.trust_request_chat_template:
        message = "chat_template is code, which this server does not run; leave it out, or start the server with "
        raise ApiError(400, message + "--trust-request-chat-template", param="chat_template")
    source = fields.chat_template or template.source
    continues = bool(fields.continue_final_message)
    begins = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    try:
        return await template.render(
            template_messages(messages, knows_developer="developer" in source),
            template=fields.chat_template,
            add_generation_prompt=begins,
            continue_final_message=continues,
            variables=fields.chat_template_kwargs,
        )
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages", code="chat_template_failed") from error
