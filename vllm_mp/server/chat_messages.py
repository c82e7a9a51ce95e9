"""The messages of a conversation, as OpenAI's API writes them and as chat templates read them."""

from typing import Annotated, Any, Literal

import msgspec

from vllm_mp.server.body import Ignored, Refused, RequestBody, refused
from vllm_mp.server.errors import ApiError

_PART = refused("must be 'text': images, audio and files are not served yet")


class TextPart(RequestBody):
    """A part of a message. Only text is served."""

    type: Annotated[Literal["text"], _PART]
    text: str
    image_url: Refused = None
    input_audio: Refused = None
    file: Refused = None
    cache_control: Ignored = None


class FunctionCall(RequestBody):
    """The function that an earlier answer of the assistant called."""

    name: str
    arguments: str
    """A JSON object."""


class ToolCall(RequestBody):
    """A call in an earlier answer of the assistant."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(RequestBody):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    """The calls of an answer of the assistant."""
    tool_call_id: str | None = None
    """The call that a message of the role "tool" answers."""
    reasoning_content: str | None = None
    refusal: str | None = None
    """What the assistant said when it refused; it stands for the content."""
    type: Literal["text", "message"] | None = None
    """Written by some clients; it has no effect."""
    audio: Refused = None
    function_call: Refused = None
    annotations: Ignored = None


def template_messages(messages: list[ChatMessage], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Return `messages` as a chat template expects them: texts in one piece, arguments of calls as objects.

    The role "developer" becomes "system", unless the template `knows_developer`. Raises ApiError, naming the field, for
    a message that no template can use.
    """
    if not messages:
        raise ApiError(400, "messages is empty; give at least one message", param="messages")
    return [_template_message(message, index, knows_developer) for index, message in enumerate(messages)]


def _template_message(message: ChatMessage, index: int, knows_developer: bool) -> dict[str, Any]:
    path = f"messages[{index}]"
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    if content is None:
        content = message.refusal
    if message.tool_calls and message.role != "assistant":
        raise ApiError(400, f"{path}.tool_calls needs the role 'assistant', got {message.role!r}", param=path)
    if content is None and not message.tool_calls:
        raise ApiError(400, f"{path}.content is missing; give a text", param=f"{path}.content")
    role = "system" if message.role == "developer" and not knows_developer else message.role
    # A template may add a text to the content, so there always is one.
    result: dict[str, Any] = {"role": role, "content": content or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call, f"{path}.tool_calls[{number}].function.arguments"),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return result


def _arguments(call: ToolCall, path: str) -> dict[str, Any]:
    """Return the arguments of a call. Raises ApiError unless they are a JSON object."""
    if not call.function.arguments:
        return {}
    try:
        return msgspec.json.decode(call.function.arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ApiError(400, f"{path} must be a JSON object: {error}", param=path) from None
