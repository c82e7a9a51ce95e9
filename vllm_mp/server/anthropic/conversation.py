"""The turns of a request to /v1/messages as chat messages, and its tools as functions."""

import msgspec

from vllm_mp.server.anthropic.body import ContentBlock, Message, TokensBody
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.openai.chat_messages import ChatMessage, FunctionCall, ToolCall
from vllm_mp.server.openai.tools import FunctionDefinition


def chat_messages(body: TokensBody) -> list[ChatMessage]:
    """Return the messages that the chat template reads. Raises ApiError, naming the block, for what is not served."""
    if not body.messages:
        raise ApiError(400, "messages is empty; add a message of the user", param="messages")
    messages: list[ChatMessage] = []
    if body.system and (text := _text(body.system, "system")):
        messages.append(ChatMessage(role="system", content=text))
    for index, message in enumerate(body.messages):
        messages += _of_turn(message, f"messages[{index}].content")
    return messages


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


def _of_turn(message: Message, path: str) -> list[ChatMessage]:
    """Return a turn as chat messages; results of tools come before the text of the user."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    results: list[ChatMessage] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(message.content):
        where = f"{path}[{index}]"
        match block.type:
            case "text":
                texts.append(_given(block.text, f"{where}.text"))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "tool_use" if message.role == "assistant":
                arguments = msgspec.json.encode(block.input or {}).decode()
                function = FunctionCall(name=_given(block.name, f"{where}.name"), arguments=arguments)
                calls.append(ToolCall(id=_given(block.id, f"{where}.id"), function=function))
            case "tool_result" if message.role == "user":
                text = _text(block.content or "", f"{where}.content")
                call_id = _given(block.tool_use_id, f"{where}.tool_use_id")
                results.append(ChatMessage(role="tool", tool_call_id=call_id, content=text))
            case "redacted_thinking":
                pass  # this server writes none
            case kind:
                raise ApiError(400, f"{where}.type must not be {kind!r} in a turn of the {message.role}", param=where)
    if texts or thoughts or calls or not results:
        own = ChatMessage(role=message.role, content="\n\n".join(texts) if texts or not calls else None)
        own.tool_calls = calls or None
        own.reasoning_content = "".join(thoughts) or None
        results.append(own)
    return results


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
