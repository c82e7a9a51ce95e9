"""The prompt of a conversation: what the endpoints that take messages share."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from vllm_mp.client.prompts.chat_images import ChatImage
from vllm_mp.client.prompts.chat_messages import ChatMessageError
from vllm_mp.client.prompts.chat_template import ChatTemplateError
from vllm_mp.client.prompts.prompt import TextPrompt, text_prompt
from vllm_mp.server.http.endpoint import Call
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.openai.chat_messages import ChatMessage
from vllm_mp.server.openai.sampling_fields import refused_parameters
from vllm_mp.wire import MAX_TENANTS

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much the model thinks: OpenAI's words, which the chat template reads as they are."""


class RenderedChat(NamedTuple):
    """A conversation as a prompt."""

    text: str
    """It holds the special tokens, and a placeholder for each image."""
    images: list[ChatImage]
    """With values as `multi_modal_data` takes them."""
    begun: str
    """The text of the final message if the answer continues it."""

    @property
    def image_paths(self) -> list[str]:
        """The fields of the request that have the images."""
        return [image.path for image in self.images]

    def prompt(self, cache_salt: str = "", mm_processor_kwargs: dict[str, Any] | None = None) -> TextPrompt:
        """Return what the engine takes."""
        return text_prompt(self.text, self.images, mm_processor_kwargs, cache_salt)


async def chat_prompt(
    call: Call,
    messages: list[ChatMessage],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
    image_paths: Sequence[str] | None = None,
) -> RenderedChat:
    """Return a conversation as a prompt.

    The keywords are fields of the request; `tools` are as the template reads them. The prompt ends where the answer
    begins (`add_generation_prompt`), or with `continue_final_message` inside of the last message. `image_paths` are the
    fields that have the images, if they are not parts of `messages`. Raises ApiError if the template refuses the
    messages, or if the request must not contain a template.
    """
    if chat_template is not None and not call.server.options.trust_request_chat_template:
        message = "chat_template is code, which this server does not run; leave it out, or start the server with "
        raise ApiError(400, message + "--trust-request-chat-template", param="chat_template")
    continues = bool(continue_final_message)
    variables = {**(call.server.options.default_chat_template_kwargs or {}), **(chat_template_kwargs or {})}
    try:
        tenant = call.tenant.number % MAX_TENANTS
        messages_with_marks, images = await call.server.engine.take_images(messages, image_paths, tenant)
        text = await call.server.engine.chat_template.render(
            messages_with_marks,
            template=chat_template,
            add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=continues,
            variables=variables or None,
            tools=tools,
            tool_fallback=call.server.options.tool_fallback,
            has_images=bool(images),
        )
        return RenderedChat(text, images, _text_of(messages[-1]) if continues else "")
    except ChatMessageError as error:
        raise ApiError(400, str(error), param=error.path) from error
    except ChatTemplateError as error:
        raise ApiError(400, str(error), param="messages", code="chat_template_failed") from error


def _text_of(message: ChatMessage) -> str:
    content = message.content
    return "\n".join(part.text or "" for part in content) if isinstance(content, list) else content or ""


async def prompt_tokens(
    call: Call,
    prompt: TextPrompt,
    *,
    field: str,
    image_paths: Sequence[str] = (),
    add_special_tokens: bool = False,
) -> list[int]:
    """Return the token ids of a prompt, those of its images included; `field` is the field of the prompt.

    `image_paths` are the fields of its images. Raises ApiError, naming the field at fault, for a prompt that no request
    can have.
    """
    try:
        tenant = call.tenant.number % MAX_TENANTS
        return await call.server.engine.prompt_tokens(prompt, tenant=tenant, add_special_tokens=add_special_tokens)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise refused_parameters(error, field, image_paths) from None


def template_variables(reasoning_effort: str | None, variables: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what the chat template reads beside messages and tools: `variables`, and how much the model thinks."""
    if reasoning_effort is None:
        return variables
    effort: dict[str, Any] = {"reasoning_effort": reasoning_effort}
    if reasoning_effort == "none":
        effort["enable_thinking"] = False
    return effort | (variables or {})
