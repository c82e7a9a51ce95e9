"""The messages of a conversation, as OpenAI's API writes them."""

from typing import Annotated, Any, Literal

from vllm_mp.server.http.body import Ignored, Refused, RequestBody, refused

_PART = refused(
    "must be 'text' or 'image_url': audio and files are not served yet, and prompt_embeds would be a pickle, which can "
    "run code"
)


class ImageUrl(RequestBody):
    """Where an image is: a data URL, or the address of a file on a host that the operator allows."""

    url: str = ""
    detail: Ignored = None


class ContentPart(RequestBody):
    """A part of a message: a text or an image."""

    type: Annotated[Literal["text", "image_url"], _PART]
    text: str | None = None
    image_url: ImageUrl | None = None
    """It may be left out if an image was sent with the same `uuid` before."""
    uuid: str | None = None
    """A name for the image, by which later requests may have it."""
    input_audio: Refused = None
    file: Refused = None
    cache_control: Ignored = None


class FunctionCall(RequestBody):
    """The function that an earlier answer of the assistant called."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """A JSON object, as text or as it is; default: it has no arguments. Other text, as of a call that `max_tokens` cut
    off, is read as the empty object."""


class ToolCall(RequestBody):
    """A call in an earlier answer of the assistant."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(RequestBody):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    """The calls of an answer of the assistant."""
    tool_call_id: str | None = None
    """The call that a message of the role "tool" answers."""
    reasoning: str | None = None
    """The thought of an answer of the assistant."""
    reasoning_content: str | None = None
    """The same as `reasoning`, under its older name."""
    refusal: str | None = None
    """What the assistant said when it refused; it stands for the content."""
    type: Literal["text", "message"] | None = None
    """Written by some clients; it has no effect."""
    audio: Refused = None
    function_call: Refused = None
    annotations: Ignored = None
