"""The turns of a request to /v1/messages as chat messages, and its tools as functions."""

from typing import NamedTuple

import msgspec

from vllm_mp.server.anthropic.body import ContentBlock, ImageSource, Message, TokensBody
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.openai.chat_messages import ChatMessage, ContentPart, FunctionCall, ImageUrl, ToolCall
from vllm_mp.server.openai.tools import FunctionDefinition


class Conversation(NamedTuple):
    """The turns of a request as the chat template reads them."""

    messages: list[ChatMessage]
    image_paths: list[str]
    """The fields of the request that have the images of `messages`, in order."""


def conversation(body: TokensBody) -> Conversation:
    """Return the conversation of a request. Raises ApiError, naming the block, for what is not served."""
    if not body.messages:
        raise ApiError(400, "messages is empty; add a message of the user", param="messages")
    messages: list[ChatMessage] = []
    image_paths: list[str] = []
    if body.system and (text := _text(body.system, "system")):
        messages.append(ChatMessage(role="system", content=text))
    for index, message in enumerate(body.messages):
        messages += _of_turn(message, f"messages[{index}].content", image_paths)
    return Conversation(messages, image_paths)


def continues_answer(body: TokensBody) -> bool:
    """Return whether the conversation ends with the begin of the answer, which the model continues."""
    last = body.messages[-1]
    if last.role != "assistant":
        return False
    return isinstance(last.content, str) or all(block.type != "tool_use" for block in last.content)


def functions(body: TokensBody) -> list[FunctionDefinition]:
    """Return the tools of a request as functions."""
    return [
        FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        for tool in body.tools or ()
    ]


def choice_of(body: TokensBody) -> str:
    """Return the choice of tools as `read_tools` takes it. Raises ApiError if the tool to use has no name."""
    choice = body.tool_choice
    if choice is None:
        return "auto"
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "tool_choice.name is missing; name a tool", param="tool_choice.name")
        return f"={choice.name}"
    return "required" if choice.type == "any" else choice.type


class _Content:
    """The texts and images of a message."""

    def __init__(self) -> None:
        self.parts: list[ContentPart] = []
        self.image_paths: list[str] = []
        """The fields of the images among `parts`."""

    def add(self, block: ContentBlock, path: str) -> None:
        """Add a block with a text or an image. Raises ApiError if it has neither."""
        if block.type == "image":
            self.parts.append(ContentPart(type="image_url", image_url=ImageUrl(url=_url(block.source, path))))
            self.image_paths.append(path)
        else:
            self.parts.append(ContentPart(type="text", text=_given(block.text, f"{path}.text")))

    def content(self) -> str | list[ContentPart]:
        """Return the parts as a message has them: a text, unless there are images."""
        if self.image_paths:
            return self.parts
        return "\n\n".join(part.text or "" for part in self.parts)


def _of_turn(message: Message, path: str, image_paths: list[str]) -> list[ChatMessage]:
    """Return a turn as chat messages; results of tools come before the text of the user.

    The fields of its images are added to `image_paths`.
    """
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    results: list[ChatMessage] = []
    own_content = _Content()
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(message.content):
        where = f"{path}[{index}]"
        match block.type:
            case "text":
                own_content.add(block, where)
            case "image" if message.role == "user":
                own_content.add(block, where)
            case "thinking":
                thoughts.append(block.thinking or "")
            case "tool_use" if message.role == "assistant":
                arguments = msgspec.json.encode(block.input or {}).decode()
                function = FunctionCall(name=_given(block.name, f"{where}.name"), arguments=arguments)
                calls.append(ToolCall(id=_given(block.id, f"{where}.id"), function=function))
            case "tool_result" if message.role == "user":
                result = _result(block.content or "", f"{where}.content")
                call_id = _given(block.tool_use_id, f"{where}.tool_use_id")
                results.append(ChatMessage(role="tool", tool_call_id=call_id, content=result.content()))
                image_paths += result.image_paths
            case "redacted_thinking":
                pass  # this server writes none
            case kind:
                raise ApiError(400, f"{where}.type must not be {kind!r} in a turn of the {message.role}", param=where)
    if own_content.parts or thoughts or calls or not results:
        own = ChatMessage(role=message.role, content=own_content.content() if own_content.parts or not calls else None)
        own.tool_calls = calls or None
        own.reasoning_content = "".join(thoughts) or None
        results.append(own)
        image_paths += own_content.image_paths
    return results


def _result(content: str | list[ContentBlock], path: str) -> _Content:
    """Return the result of a tool. Raises ApiError, naming the block, if it has other blocks than texts and images."""
    result = _Content()
    blocks = [ContentBlock(type="text", text=content)] if isinstance(content, str) else content
    for index, block in enumerate(blocks):
        where = f"{path}[{index}]"
        if block.type not in ("text", "image"):
            field = f"{where}.type"
            raise ApiError(400, f"{field} must be 'text' or 'image' here, got {block.type!r}", param=field)
        result.add(block, where)
    return result


def _url(source: ImageSource | None, path: str) -> str:
    """Return the URL of an image. Raises ApiError, naming the field, if it has none."""
    path = f"{path}.source"
    if source is None:
        raise ApiError(400, f"the field {path} is missing; add it", param=path)
    if source.type == "url":
        return _given(source.url, f"{path}.url")
    media_type = _given(source.media_type, f"{path}.media_type")
    if not media_type.startswith("image/") or not media_type.removeprefix("image/").isalnum():
        field = f"{path}.media_type"
        message = f"{field} must be the type of an image, such as 'image/png', got {media_type!r:.100}"
        raise ApiError(400, message, param=field)
    return f"data:{media_type};base64,{_given(source.data, f'{path}.data')}"


def _text(content: str | list[ContentBlock], path: str) -> str:
    """Return the text of `content`. Raises ApiError, naming the block, if it has other blocks."""
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        if block.type != "text":
            where = f"{path}[{index}].type"
            raise ApiError(400, f"{where} must be 'text' here, got {block.type!r}", param=where)
    return "\n\n".join(_given(block.text, f"{path}[{index}].text") for index, block in enumerate(content))


def _given(value: str | None, path: str) -> str:
    if value is None:
        raise ApiError(400, f"the field {path} is missing; add it", param=path)
    return value
