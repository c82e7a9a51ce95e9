"""The images of a conversation: taken out of its messages, and marked in the text for the chat template."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from vllm_mp.client.images.media import check_image_name, is_pillow_image
from vllm_mp.client.prompts.chat_messages import ChatMessageError

_MARK: Final = f"\ue000image {secrets.token_hex(16)}\ue000"
"""Stands for an image in the text of a message until the template is rendered. No caller can know it.

Its characters are the same in JSON, into which results of tools are put for templates that know no tools.
"""
_PART_TYPES: Final = ("image_url", "image_pil", "input_image", "image")
_READS_PARTS: Final = re.compile(r"""(\[|\bget\(|\b(select|reject)attr\(|\bgroupby\()\s*['"]type['"]|\.type\b""")
"""How a template reads the type of a part of a content."""


class ChatImage(NamedTuple):
    """An image of a conversation."""

    path: str
    """The field that has it, such as `messages[0].content[1]`."""
    value: Any
    """A URL, or an object as `multi_modal_data` takes it; None: the image that was last given under `name`."""
    name: str | None = None


class ContentForm(NamedTuple):
    """How a chat template reads the content of messages with images."""

    reads_parts: bool
    """It reads lists of parts, of the types "text" and "image"."""
    reads_texts: bool
    """It reads texts."""


def content_form(template: str) -> ContentForm:
    """Return how `template` reads contents."""
    reads_parts = "image" in template and _READS_PARTS.search(template) is not None
    return ContentForm(reads_parts, not reads_parts or "is string" in template)


def take_images(messages: Sequence[Any]) -> tuple[Sequence[Any], list[ChatImage]]:
    """Return `messages`, dicts or structs, with marks in place of their images, and these images in order.

    Raises ChatMessageError for a part of a message that names no image.
    """
    images: list[ChatImage] = []
    taken: list[Any] = []
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else getattr(message, "content", None)
        if not isinstance(content, list | tuple) or not any(map(_is_image, content)):
            taken.append(message)
            continue
        if isinstance(message, Mapping):
            fields = dict(message)
        else:
            fields = {name: getattr(message, name) for name in message.__struct_fields__}
        path = f"messages[{index}].content"
        fields["content"] = _marked(content, path, images)
        taken.append({name: value for name, value in fields.items() if value is not None})
    return taken, images


def with_images(
    messages: Sequence[dict[str, Any]], form: ContentForm, image_token: str, has_images: bool
) -> list[dict[str, Any]]:
    """Return `messages`, as templates read them, with images in place of their marks, in the form of the template.

    A template that reads texts alone gets `image_token` for an image, on a line of its own.
    """
    if not has_images and form.reads_texts:
        return list(messages)

    def content(text: str) -> str | list[dict[str, Any]]:
        return _parts(text) if form.reads_parts else _lines(text, image_token)

    return [{**message, "content": content(message["content"])} for message in messages]


def _marked(content: Sequence[Any], path: str, images: list[ChatImage]) -> str:
    """Return the text of a content with marks, and add its images to `images`."""
    text, follows_text = "", False
    for number, part in enumerate(content):
        where = f"{path}[{number}]"
        if _is_image(part):
            images.append(_image(part, where))
            text, follows_text = text + _MARK, False
            continue
        given = _field(part, "text")
        if not isinstance(given, str):
            raise ChatMessageError(f"{where} must be a part of type 'text' or 'image_url', got {part!r:.100}", where)
        text, follows_text = f"{text}\n{given}" if follows_text else text + given, True
    return text


def _is_image(part: Any) -> bool:
    return _field(part, "type") in _PART_TYPES


def _field(part: Any, name: str) -> Any:
    value = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
    return None if value is msgspec.UNSET else value


def _image(part: Any, path: str) -> ChatImage:
    """Return the image of a part. Raises ChatMessageError if it has none, and no name of one."""
    kind, name = _field(part, "type"), _field(part, "uuid")
    try:
        check_image_name(f"{path}.uuid", name)
    except (TypeError, ValueError) as error:
        raise ChatMessageError(str(error), f"{path}.uuid") from None
    value = _field(part, "image_url" if kind == "input_image" else kind)
    if kind in ("image_url", "input_image") and not isinstance(value, str):
        value = _field(value, "url")
    if name is not None and not value:
        return ChatImage(path, None, name)
    if kind in ("image_url", "input_image"):
        if not isinstance(value, str) or not value:
            raise ChatMessageError(f"{path}.image_url must hold a URL, got {value!r:.100}", f"{path}.image_url")
    elif not is_pillow_image(value):
        raise ChatMessageError(
            f"{path}.{kind} must be an image of Pillow, got {type(value).__name__}; send a URL as 'image_url'",
            f"{path}.{kind}",
        )
    return ChatImage(path, value, name)


def _parts(content: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(_MARK)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts or [{"type": "text", "text": ""}]


def _lines(content: str, image_token: str) -> str:
    pieces = re.split(f"({re.escape(_MARK)})", content)
    return "\n".join(image_token if piece == _MARK else piece for piece in pieces if piece)
