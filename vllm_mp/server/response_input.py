"""The `input` of /v1/responses: items with the turns of a conversation, turned into chat messages."""

from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from vllm_mp.server.chat_messages import ChatMessage
from vllm_mp.server.errors import ApiError

_Role = Literal["system", "developer", "user", "assistant"]
_SYSTEM_ROLES = ("system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


class ContentPart(msgspec.Struct):
    """A part of an item's content: text, or the text of a refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """A turn of the conversation, or another item of a response that the client sends back."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None


def chat_messages(given: str | list[InputItem], instructions: str | None) -> list[ChatMessage]:
    """Return the messages of a request; `instructions` are the first system message.

    System messages that begin the conversation become one message, because many chat templates accept one only.
    Items with a model's reasoning are left out: the answers of earlier turns stand without it. Raises ApiError, naming
    the path of the field, for items that are not served.
    """
    leading = [instructions] if instructions else []
    messages: list[ChatMessage] = []
    for role, text in _turns(given):
        if role in _SYSTEM_ROLES and not messages:
            leading.append(text)
        else:
            messages.append(ChatMessage(role=role, content=text))
    if not messages:
        raise ApiError(400, "input has no message of a user; add an item with the role 'user'", param="input")
    if leading:
        messages.insert(0, ChatMessage(role="system", content="\n\n".join(leading)))
    return messages


def turn_starts(messages: list[ChatMessage]) -> list[int]:
    """Return where a conversation may begin, as indices of `messages`: at its begin, and at each later user message."""
    return [0, *[index for index, message in enumerate(messages) if message.role == "user"][1:]]


def without_older_turns(messages: list[ChatMessage], start: int) -> list[ChatMessage]:
    """Return the messages from the index `start` on, and the messages of the system before it."""
    return [message for message in messages[:start] if message.role in _SYSTEM_ROLES] + messages[start:]


def _turns(given: str | list[InputItem]) -> Iterator[tuple[_Role, str]]:
    """Yield the role and the text of each message."""
    if isinstance(given, str):
        yield "user", given
        return
    for index, item in enumerate(given):
        path = f"input[{index}]"
        if item.type == "reasoning":
            continue
        if item.type == "item_reference":
            message = f"{path} refers to a stored item, and this server stores none; send the item itself"
            raise ApiError(400, message, param=f"{path}.type", code="unsupported_field")
        if item.type != "message":
            message = f"{path}.type {item.type!r:.100} is not served yet; send items of the type 'message'"
            raise ApiError(400, message, param=f"{path}.type", code="unsupported_field")
        yield _role(item.role, f"{path}.role"), _text(item.content, f"{path}.content")


def _role(given: str | None, path: str) -> _Role:
    role: _Role
    for role in get_args(_Role):
        if given == role:
            return role
    raise ApiError(400, f"{path} must be one of {', '.join(get_args(_Role))}, got {given!r:.100}", param=path)


def _text(content: str | list[ContentPart] | None, path: str) -> str:
    """Return the text of an item's content."""
    if isinstance(content, str):
        return content
    if content is None:
        raise ApiError(400, f"{path} is missing; give a text or a list of parts", param=path)
    texts: list[str] = []
    for index, part in enumerate(content):
        part_path = f"{path}[{index}]"
        if part.type == "refusal":
            text, field = part.refusal, "refusal"
        elif part.type in _TEXT_PARTS:
            text, field = part.text, "text"
        else:
            message = f"{part_path}.type {part.type!r:.100} is not served yet; send parts of the type 'input_text'"
            raise ApiError(400, message, param=f"{part_path}.type", code="unsupported_field")
        if text is None:
            raise ApiError(400, f"{part_path}.{field} is missing; add it", param=f"{part_path}.{field}")
        texts.append(text)
    return "\n".join(texts)
