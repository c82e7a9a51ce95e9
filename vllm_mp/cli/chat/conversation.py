"""A conversation: its messages, what makes its answers, and the file that keeps it."""

import contextlib
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from vllm_mp.requests.sampling_params import SamplingParams


class SavedChat(msgspec.Struct):
    """The content of a file that `/save` writes."""

    vllm_mp_chat: int
    """Version of the format."""
    model: str
    system: str | None
    parameters: dict[str, Any]
    """The sampling parameters that were set in the chat, or by flags."""
    messages: list[dict[str, str]]
    """With "role" and "content", without the system message."""


_VERSION = 1


@dataclasses.dataclass
class Conversation:
    """The messages so far, without the system message, and the parameters of the next answer."""

    system: str | None
    parameters: dict[str, Any]
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def to_send(self, first: int = 0) -> list[dict[str, str]]:
        """Return the messages from the number `first` on, after the system message if there is one."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        return start + self.messages[first:]

    def save(self, path: Path, model: str) -> None:
        """Write the conversation to `path`; other content than a saved chat is not overwritten.

        Raises ValueError if the file cannot be written or holds something else.
        """
        if path.exists():
            self._read(path)  # refuses what is not a saved chat
        chat = SavedChat(_VERSION, model, self.system, self.parameters, self.messages)
        try:
            _replace(path, json.dumps(msgspec.to_builtins(chat), indent=1, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}; choose another file") from error

    def load(self, path: Path) -> str:
        """Continue the conversation in the file at `path`, and return the name of the model that wrote its answers.

        Raises ValueError, and changes nothing, if it is not a chat.
        """
        chat = self._read(path)
        try:
            SamplingParams(**chat.parameters)
        except (TypeError, ValueError) as error:
            raise ValueError(f"cannot use the parameters in {path}: {error}") from None
        if any(message.keys() != {"role", "content"} for message in chat.messages):
            raise ValueError(f"{path} has a message without role or content; it was not written by /save")
        self.system, self.parameters, self.messages = chat.system, chat.parameters, chat.messages
        return chat.model

    @staticmethod
    def _read(path: Path) -> SavedChat:
        try:
            chat = msgspec.json.decode(path.read_bytes(), type=SavedChat)
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}; give a file that /save has written") from error
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ValueError(f"{path} is not a saved chat; give a file that /save has written, or a new name") from None
        if chat.vllm_mp_chat != _VERSION:
            raise ValueError(f"{path} has version {chat.vllm_mp_chat} of the format, this program knows {_VERSION}")
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
