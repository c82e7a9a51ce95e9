"""The images of a chat: files that the user names, and the messages that have them."""

import base64
import mimetypes
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM

Message = dict[str, Any]
"""A message with a "role" and a "content": a text, or a list of parts of the types "image_url" and "text"."""


def content_with_images(text: str, urls: Sequence[str]) -> str | list[dict[str, Any]]:
    """Return the content of a message with the images in `urls`, data URLs, before its text."""
    if not urls:
        return text
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]


def num_images(messages: Sequence[Message]) -> int:
    """Return how many images the messages have."""
    contents = [message["content"] for message in messages]
    return sum(part["type"] == "image_url" for content in contents if isinstance(content, list) for part in content)


def image_file(text: str) -> Path:
    """Return the file that a user names. Quotes, and backslashes before spaces, may be as terminals paste them."""
    path = Path(os.path.expanduser(text))
    if os.path.exists(path):
        return path
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation mark is a part of the name
        return path
    return Path(os.path.expanduser(words[0])) if len(words) == 1 else path


def read_image_file(path: Path) -> bytes:
    """Return the content of a file. Raises ValueError, with the remedy, if it cannot be read or is too large."""
    from vllm_mp.client.images.messages import MAX_FILE_BYTES

    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a file; name the file of an image")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}; name the file of an image") from error
    if not 0 < len(content) <= MAX_FILE_BYTES:
        size = "is empty" if not content else f"has more than {MAX_FILE_BYTES} bytes, the limit"
        raise ValueError(f"{path} {size}; name another file")
    return content


def data_url(path: Path, content: bytes) -> str:
    """Return the file of an image as a data URL."""
    kind = mimetypes.guess_type(path.name)[0] or ""
    # The client's decoder looks at the content of the file alone.
    kind = kind if kind.startswith("image/") else "image/png"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


async def num_image_tokens(llm: "AsyncLLM", path: Path, content: bytes) -> int:
    """Return how many tokens an image takes in a prompt.

    Raises ValueError, naming its file, if the model takes no images, or not this one.
    """
    from vllm_mp.client.images.media import image_number, renamed
    from vllm_mp.client.prompts.prompt import TokensPrompt

    images = llm.model_config.images
    if images is None:
        raise ValueError(
            f"{llm.model_config.served_model_name} takes no images; chat with a model that does, such as SmolVLM"
        )
    prompt = TokensPrompt(prompt_token_ids=[images.token_id], multi_modal_data={"image": [content]})
    try:
        return len(await llm.prompt_tokens(prompt, add_special_tokens=False))
    except ValueError as error:
        message = str(error)
        raise ValueError(message if image_number(message) is None else renamed(message, str(path))) from None
