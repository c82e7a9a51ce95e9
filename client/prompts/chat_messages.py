"""The messages of a conversation, as OpenAI's API writes them, become what chat templates read."""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_mp.client.answers.surrogates import without_half_surrogates

logger = logging.getLogger(__name__)

_NOT_FOR_TEMPLATES = ("role", "content", "refusal", "tool_calls", "type", "audio", "function_call", "annotations")
"""Fields of a message that are converted, or that no template reads."""


class ChatMessageError(ValueError):
    """A message cannot be used by any chat template; `path` names the message or its field."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path

    def __reduce__(self) -> Any:  # so that it can be pickled
        return type(self), (str(self), self.path), self.__dict__


def template_messages(messages: Sequence[Any], *, knows_developer: bool) -> list[dict[str, Any]]:
    """Return `messages`, dicts or structs, as chat templates expect them.

    The parts of a text are joined, and the arguments of calls are objects, empty ones if they are malformed. The role
    "developer" becomes "system", unless the template `knows_developer`. Raises ChatMessageError for a message that no
    template can use.
    """
    if not messages:
        raise ChatMessageError("messages is empty; give at least one message", "messages")
    try:
        plain = msgspec.to_builtins(messages)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatMessageError(f"messages must consist of dicts, lists and plain values: {error}", "messages") from None
    return [_template_message(message, f"messages[{index}]", knows_developer) for index, message in enumerate(plain)]


def _template_message(message: Any, path: str, knows_developer: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ChatMessageError(f"{path} must be a dict with a 'role' and a 'content', got {message!r:.100}", path)
    role, calls = message["role"], message.get("tool_calls")
    if calls and role != "assistant":
        field = f"{path}.tool_calls"
        raise ChatMessageError(f"{field} needs the role 'assistant', got {role!r:.100}", field)
    content = _text(message.get("content"), f"{path}.content")
    if content is None:
        content = message.get("refusal")
    # Templates read the thought of an answer under one of two names.
    thought = message.get("reasoning_content") or message.get("reasoning")
    if content is None and not calls and not (thought and role == "assistant"):
        raise ChatMessageError(f"{path}.content is missing; give a text", f"{path}.content")
    # A template may add a text to the content, so there always is one.
    result = {"role": "system" if role == "developer" and not knows_developer else role, "content": content or ""}
    result |= {name: value for name, value in message.items() if name not in _NOT_FOR_TEMPLATES and value is not None}
    if thought is not None:
        result["reasoning_content"] = result["reasoning"] = thought
    if calls:
        result["tool_calls"] = [_call(call, f"{path}.tool_calls[{number}]") for number, call in enumerate(calls)]
    return result


def _text(content: Any, path: str) -> str | None:
    """Return the text of a content, whose parts are lines; None if there is none."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatMessageError(f"{path} must be a text or a list of parts, got {content!r:.100}", path)
    texts: list[str] = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            where = f"{path}[{number}]"
            raise ChatMessageError(f"{where} must be a part of type 'text', got {part!r:.100}", where)
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any, path: str) -> dict[str, Any]:
    """Return a call of the assistant with its arguments, a JSON object as text, as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        path = f"{path}.function.arguments"
        raise ChatMessageError(f"{path} is missing in {call!r:.100}; add it", path)
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments") or {})}}


def _arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call as the object that templates need; {} if they are no JSON object.

    A model wrote them, and `max_tokens` may have cut them off. Clients send the call back in each later request, so an
    error would end the conversation for good. vLLM gives templates {} too.
    """
    try:
        if isinstance(arguments, str):
            arguments = msgspec.json.decode(without_half_surrogates(arguments))
        return msgspec.convert(arguments, dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        _warn_of_malformed_arguments()
        return {}


@functools.cache  # a conversation may repeat many such calls, and would fill the log
def _warn_of_malformed_arguments() -> None:
    logger.warning(
        "the arguments of an earlier tool call are no JSON object; the chat template gets {} in their place "
        "(this warning is not repeated)"
    )
