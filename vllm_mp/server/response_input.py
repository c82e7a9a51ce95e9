"""The `input` of /v1/responses: items with the turns of a conversation, turned into the messages of a chat template."""

from collections.abc import Iterator
from typing import Any

import msgspec

from vllm_mp.server.errors import ApiError

ChatMessage = dict[str, Any]
"""A message of a chat template: `role` and `content`, a string."""

_SYSTEM = "system"
_ROLES = {"user": "user", "assistant": "assistant", "system": _SYSTEM, "developer": _SYSTEM}
"""Roles of items, and of the messages that they become: chat templates know no developer."""
_TEXT_PARTS = ("input_text", "output_text", "text")


class ContentPart(msgspec.Struct, forbid_unknown_fields=False):
    """A part of an item's content: text, or the text of a refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, forbid_unknown_fields=False):
    """A turn of the conversation, or another item of a response that the client sends back."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None


def chat_messages(input: str | list[InputItem], instructions: str | None) -> list[ChatMessage]:
    """Return the messages of a request; `instructions` are the first system message.

    System messages that begin the conversation become one message, because many chat templates accept one only.
    Items with a model's reasoning are left out: a chat template gets the answers of earlier turns alone.
    Raises ApiError, naming the path of the field, for items that are not served.
    """
    messages: list[ChatMessage] = []
    if instructions:
        messages.append({"role": _SYSTEM, "content": instructions})
    for message in _messages(input):
        if message["role"] == _SYSTEM and len(messages) == 1 and messages[0]["role"] == _SYSTEM:
            messages[0]["content"] += "\n\n" + message["content"]
        else:
            messages.append(message)
    if all(message["role"] == _SYSTEM for message in messages):
        raise ApiError(
            400, "input must have at least one message of a user; add an item with role 'user'", param="input"
        )
    return messages


def _messages(input: str | list[InputItem]) -> Iterator[ChatMessage]:
    """Yield the messages of `input` in their order."""
    if isinstance(input, str):
        yield {"role": "user", "content": input}
        return
    for index, item in enumerate(input):
        path = f"input[{index}]"
        if item.type == "reasoning":
            continue
        if item.type != "message":
            raise ApiError(400, _refusal_of_item(path, item.type), param=f"{path}.type")
        if item.role not in _ROLES:
            raise ApiError(
                400, f"{path}.role must be one of {', '.join(_ROLES)}, got {item.role!r:.100}", param=f"{path}.role"
            )
        yield {"role": _ROLES[item.role], "content": _text(item.content, f"{path}.content")}


def _text(content: str | list[ContentPart] | None, path: str) -> str:
    """Return the text of an item's content."""
    if isinstance(content, str):
        return content
    if content is None:
        raise ApiError(400, f"{path} is missing; give a string or a list of parts", param=path)
    texts: list[str] = []
    for index, part in enumerate(content):
        text, field = (part.refusal, "refusal") if part.type == "refusal" else (part.text, "text")
        if part.type not in (*_TEXT_PARTS, "refusal"):
            raise ApiError(
                400,
                f"{path}[{index}].type {part.type!r:.100} is not served; give text, as a part of type 'input_text'",
                param=f"{path}[{index}].type",
            )
        if text is None:
            raise ApiError(400, f"{path}[{index}].{field} is missing; give a string", param=f"{path}[{index}].{field}")
        texts.append(text)
    return "\n".join(texts)


def _refusal_of_item(path: str, type: str) -> str:
    if type == "item_reference":
        return f"{path} refers to a stored item, and this server stores none; send the item itself"
    return f"{path}.type {type!r:.100} is not served; give items of type 'message'"
