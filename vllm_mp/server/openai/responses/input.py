"""The `input` of /v1/responses: items with the turns of a conversation, turned into chat messages."""

from typing import Literal, get_args

from vllm_mp.server.http.body import Ignored, RequestBody
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.openai.chat_messages import ChatMessage, FunctionCall, ImageUrl, ToolCall
from vllm_mp.server.openai.chat_messages import ContentPart as MessagePart

_Role = Literal["system", "developer", "user", "assistant"]
_SYSTEM_ROLES = ("system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "text")


class ContentPart(RequestBody):
    """A part of an item's content: text, or the text of a refusal."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Ignored = None
    logprobs: Ignored = None
    image_url: str | None = None
    """The image of a part of the type "input_image": a data URL, or a URL on a host that the operator allows."""
    detail: Ignored = None
    file_id: Ignored = None
    file_url: Ignored = None
    file_data: Ignored = None
    filename: Ignored = None
    input_audio: Ignored = None


class InputItem(RequestBody):
    """A turn of the conversation, or another item of a response that the client sends back."""

    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None
    """The content of a message, or the thought of an item with reasoning."""
    call_id: str | None = None
    """The id of a call, also in the item that has its output."""
    name: str | None = None
    arguments: str | None = None
    """The arguments of a call: a JSON object."""
    output: str | list[ContentPart] | None = None
    """The output of a call."""
    id: Ignored = None
    status: Ignored = None
    summary: Ignored = None
    encrypted_content: Ignored = None


def chat_messages(given: str | list[InputItem], instructions: str | None) -> list[ChatMessage]:
    """Return the messages of a request; `instructions` are the first system message.

    System messages that begin the conversation become one message, because many chat templates accept one only. The
    thought, the texts and the calls of an answer become one message. Raises ApiError, naming the path of the field, for
    items that are not served.
    """
    messages = [ChatMessage(role="user", content=given)] if isinstance(given, str) else _messages(given)
    leading = [instructions] if instructions else []
    while messages and messages[0].role in _SYSTEM_ROLES:
        leading.append(str(messages.pop(0).content))
    if not messages:
        raise ApiError(400, "input has no message of a user; add an item with the role 'user'", param="input")
    if leading:
        messages.insert(0, ChatMessage(role="system", content="\n\n".join(leading)))
    return messages


def image_paths(given: str | list[InputItem]) -> list[str]:
    """Return the fields of a request that have the images of its messages, in order."""
    if isinstance(given, str):
        return []
    lists = [
        (f"input[{index}].{field}", parts)
        for index, item in enumerate(given)
        for field, parts in (("content", item.content), ("output", item.output))
        if isinstance(parts, list)
    ]
    return [
        f"{path}[{index}]" for path, parts in lists for index, part in enumerate(parts) if part.type == "input_image"
    ]


def num_images(messages: list[ChatMessage]) -> int:
    """Return how many images `messages` have."""
    contents = [message.content for message in messages]
    return sum(part.type == "image_url" for content in contents if isinstance(content, list) for part in content)


def turn_starts(messages: list[ChatMessage]) -> list[int]:
    """Return where a conversation may begin, as indices of `messages`: at its begin, and at each later user message."""
    return [0, *[index for index, message in enumerate(messages) if message.role == "user"][1:]]


def without_older_turns(messages: list[ChatMessage], start: int) -> list[ChatMessage]:
    """Return the messages from the index `start` on, and the messages of the system before it."""
    return [message for message in messages[:start] if message.role in _SYSTEM_ROLES] + messages[start:]


def _messages(items: list[InputItem]) -> list[ChatMessage]:
    """Return the messages that `items` are."""
    messages: list[ChatMessage] = []
    for index, item in enumerate(items):
        path = f"input[{index}]"
        last = messages[-1] if messages and messages[-1].role == "assistant" else None
        match item.type:
            case "message":
                role = _role(item.role, f"{path}.role")
                text = _content(item.content, f"{path}.content", may_have_images=role == "user")
                if role == "assistant" and last is not None and (last.tool_calls or last.content is None):
                    last.content = f"{last.content}\n{text}" if last.content else text
                else:
                    messages.append(ChatMessage(role=role, content=text))
            case "reasoning":
                if thought := _text(item.content or "", f"{path}.content"):
                    messages.append(ChatMessage(role="assistant", reasoning_content=thought))
            case "function_call":
                if last is None:
                    last = ChatMessage(role="assistant")
                    messages.append(last)
                last.tool_calls = [*(last.tool_calls or []), _call(item, path)]
            case "function_call_output":
                output = _content(item.output, f"{path}.output", may_have_images=True)
                call_id = _given(item.call_id, f"{path}.call_id")
                messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=output))
            case "item_reference":
                message = f"{path} refers to a stored item, and this server stores none; send the item itself"
                raise ApiError(400, message, param=f"{path}.type", code="unsupported_field")
            case kind:
                message = (
                    f"{path}.type {kind!r:.100} is not served; send items of the type 'message', 'reasoning', "
                    "'function_call' or 'function_call_output'"
                )
                raise ApiError(400, message, param=f"{path}.type", code="unsupported_field")
    # A thought without an answer is not a turn.
    return [each for each in messages if each.role != "assistant" or each.content is not None or each.tool_calls]


def _call(item: InputItem, path: str) -> ToolCall:
    """Return the call that an item is."""
    name = _given(item.name, f"{path}.name")
    arguments = _given(item.arguments, f"{path}.arguments")
    return ToolCall(id=_given(item.call_id, f"{path}.call_id"), function=FunctionCall(name=name, arguments=arguments))


def _given(value: str | None, path: str) -> str:
    if value is None:
        raise ApiError(400, f"{path} is missing; add it", param=path)
    return value


def _role(given: str | None, path: str) -> _Role:
    role: _Role
    for role in get_args(_Role):
        if given == role:
            return role
    raise ApiError(400, f"{path} must be one of {', '.join(get_args(_Role))}, got {given!r:.100}", param=path)


def _content(content: str | list[ContentPart] | None, path: str, *, may_have_images: bool) -> str | list[MessagePart]:
    """Return the content of a message: its text, or its parts if it has images."""
    if not may_have_images or not isinstance(content, list) or all(part.type != "input_image" for part in content):
        return _text(content, path)
    parts: list[MessagePart] = []
    for index, part in enumerate(content):
        if part.type != "input_image":
            parts.append(MessagePart(type="text", text=_text([part], path)))
        elif part.image_url:
            parts.append(MessagePart(type="image_url", image_url=ImageUrl(url=part.image_url)))
        else:
            where = f"{path}[{index}].image_url"
            raise ApiError(400, f"{where} is missing; add a URL, because no files are stored here", param=where)
    return parts


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
