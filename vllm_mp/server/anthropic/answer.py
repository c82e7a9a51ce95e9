"""The answer of /v1/messages: a message of content blocks, whole or as the events of a stream."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from vllm_mp.outputs import CompletionOutput
from vllm_mp.server.openai.answer_parts import AnswerParts, Delta
from vllm_mp.server.openai.generation import Usage as TokenCounts


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """A text."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """The thought of a model that thinks."""

    thinking: str = ""
    signature: str = ""
    """Empty: thoughts are not signed."""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class Usage(msgspec.Struct):
    """The tokens that a request took."""

    input_tokens: int
    """Tokens of the prompt without those of `cache_read_input_tokens`."""
    output_tokens: int
    cache_read_input_tokens: int
    """Tokens of the prompt that the prefix cache held."""
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, counts: TokenCounts) -> "Usage":
        cached = counts.prompt_tokens_details.cached_tokens
        return cls(counts.prompt_tokens - cached, counts.completion_tokens, cached)


class MessageObject(msgspec.Struct, kw_only=True):
    """The answer to a conversation."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
    stop_reason: str | None = None
    """ "end_turn", "max_tokens", "stop_sequence" or "tool_use"."""
    stop_sequence: str | None = None
    """The text that ended the answer, if the reason is "stop_sequence"."""
    usage: Usage


def fill(message: MessageObject, parts: AnswerParts, completion: CompletionOutput) -> None:
    """Give `message` the content and the end of a whole answer."""
    answer = parts.message()
    if answer.reasoning_content is not UNSET:
        message.content.append(ThinkingBlock(answer.reasoning_content))
    if answer.content:
        message.content.append(TextBlock(answer.content))
    for call in answer.tool_calls or ():
        function = call.function
        message.content.append(ToolUseBlock(call.id, str(function.name), _arguments(str(function.arguments))))
    message.stop_reason, message.stop_sequence = _end(completion, has_calls=bool(answer.tool_calls))


class EventEncoder:
    """Makes the events of a streamed answer: a block ends where text, thought or a call of another kind begins."""

    def __init__(self, message: MessageObject) -> None:
        """`message` has no content yet."""
        self._message = message
        self._kind = ""
        self._index = -1
        self._has_calls = False

    def begin(self) -> bytes:
        """Return the first events."""
        return _event("message_start", message=self._message) + _event("ping")

    def add(self, delta: Delta) -> bytes:
        """Return the events of what is new."""
        return b"".join(self._added(delta))

    def end(self, completion: CompletionOutput, usage: Usage) -> bytes:
        """Return the last events."""
        reason, sequence = _end(completion, has_calls=self._has_calls)
        return (
            self._end_block()
            + _event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=usage)
            + _event("message_stop")
        )

    def _added(self, delta: Delta) -> Iterator[bytes]:
        if delta.reasoning_content is not UNSET:
            yield self._enter("thinking", ThinkingBlock())
            yield self._delta(type="thinking_delta", thinking=delta.reasoning_content)
        if delta.content is not UNSET and (delta.content or self._index >= 0):
            yield self._enter("text", TextBlock())
            yield self._delta(type="text_delta", text=delta.content)
        for call in delta.tool_calls or ():
            if call.id is not UNSET:
                self._has_calls = True
                yield self._end_block()
                yield self._enter(call.id, ToolUseBlock(call.id, str(call.function.name), {}))
            if call.function.arguments:
                yield self._delta(type="input_json_delta", partial_json=call.function.arguments)

    def _enter(self, kind: str, block: msgspec.Struct) -> bytes:
        """Return the events that end another block and begin `block`; nothing within a block of this kind."""
        if kind == self._kind:
            return b""
        ended = self._end_block()
        self._kind = kind
        self._index += 1
        return ended + _event("content_block_start", index=self._index, content_block=block)

    def _end_block(self) -> bytes:
        """Return the event that ends the block, if there is one."""
        if not self._kind:
            return b""
        ended = _event("content_block_stop", index=self._index)
        if self._kind == "thinking":
            ended = self._delta(type="signature_delta", signature="") + ended
        self._kind = ""
        return ended

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(name: str, **data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **data}))


def _end(completion: CompletionOutput, *, has_calls: bool) -> tuple[str, str | None]:
    """Return why the answer has ended, and the text that ended it."""
    if completion.finish_reason == "length":
        return "max_tokens", None
    if has_calls:
        return "tool_use", None
    if isinstance(completion.stop_reason, str):
        return "stop_sequence", completion.stop_reason
    return "end_turn", None


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none if the answer ended before they were complete."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
