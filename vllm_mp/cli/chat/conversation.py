"""A conversation: its messages, what makes its answers, and the file that keeps it."""

import contextlib
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from vllm_mp.arguments.counted import counted
from vllm_mp.cli.chat.images import Message, num_images
from vllm_mp.client.images.sources import data_of
from vllm_mp.client.prompts.chat_images import take_images
from vllm_mp.requests.sampling_params import SamplingParams


class ImageUrl(msgspec.Struct):
    """Where an image is."""

    url: str
    """A data URL."""


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """An image of a message."""

    image_url: ImageUrl


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """The text of a message with images."""

    text: str


class SavedChat(msgspec.Struct):
    """The content of a file that `/save` writes."""

    vllm_mp_chat: int
    """Version of the format: 2 if a message has images, which earlier programs do not know, else 1."""
    model: str
    system: str | None
    parameters: dict[str, Any]
    """The sampling parameters that were set in the chat, or by flags."""
    messages: list[dict[str, str | list[ImagePart | TextPart]]]
    """With "role" and "content", without the system message."""


_WITHOUT_IMAGES, _WITH_IMAGES = 1, 2


@dataclasses.dataclass
class Conversation:
    """The messages so far, without the system message, and the parameters of the next answer."""

    system: str | None
    parameters: dict[str, Any]
    messages: list[Message] = dataclasses.field(default_factory=list)

    def to_send(self, first: int = 0) -> list[Message]:
        """Return the messages from the number `first` on, after the system message if there is one."""
        start: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return start + self.messages[first:]

    def save(self, path: Path, model: str) -> None:
        """Write the conversation to `path`; other content than a saved chat is not overwritten.

        Raises ValueError if the file cannot be written or holds something else.
        """
        if os.path.exists(path):  # what cannot be looked at cannot be written either
            self._read(path)  # refuses what is not a saved chat
        chat = {
            "vllm_mp_chat": _WITH_IMAGES if num_images(self.messages) else _WITHOUT_IMAGES,
            "model": model,
            "system": self.system,
            "parameters": self.parameters,
            "messages": self.messages,
        }
        try:
            _replace(path, json.dumps(chat, indent=1, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}; choose another file") from error

    def load(self, path: Path, *, takes_images: bool = False) -> str:
        """Continue the conversation in the file at `path`, and return the name of the model that wrote its answers.

        Raises ValueError, and changes nothing, if it is not a chat, or if it has images and the model takes none.
        """
        chat = self._read(path)
        try:
            SamplingParams(**chat.parameters)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cannot use the parameters in {path}: {error}") from None
        messages: list[Message] = msgspec.to_builtins(chat.messages)
        for message in messages:
            if message.keys() != {"role", "content"} or not isinstance(message["role"], str):
                raise ValueError(f"{path} has a message without role or content; it was not written by /save")
        try:
            for image in take_images(messages)[1]:
                data_of(image.value)
        except ValueError as error:
            raise ValueError(f"{path} has an image that cannot be used: {error}") from None
        if num_images(messages) and not takes_images:
            raise ValueError(f"{path} has {counted(num_images(messages), 'image')}, and the model takes none")
        self.system, self.parameters, self.messages = chat.system, chat.parameters, messages
        return chat.model

    @staticmethod
    def _read(path: Path) -> SavedChat:
        try:
            if path.exists() and not path.is_file():
                raise ValueError(f"{path} is not a file; give a file that /save has written, or a new name")
            chat = msgspec.json.decode(path.read_bytes(), type=SavedChat)
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}; give a file that /save has written") from error
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ValueError(f"{path} is not a saved chat; give a file that /save has written, or a new name") from None
        if chat.vllm_mp_chat not in (_WITHOUT_IMAGES, _WITH_IMAGES):
            version = chat.vllm_mp_chat
            raise ValueError(f"{path} has version {version} of the format, this program knows 1 to {_WITH_IMAGES}")
        return chat


def _replace(path: Path, content: bytes) -> None:
    """Replace the file at `path` with one that has the content; leave nothing behind if that fails."""
    file = tempfile.NamedTemporaryFile(dir=path.parent, prefix=".chat-", delete=False)  # noqa: SIM115
    try:
        with file:
            file.write(content)
        os.replace(file.name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise
