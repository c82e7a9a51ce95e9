"""The answer of /v1/messages: a message of content blocks, whole or as the events of a stream."""

from collections.abc import Iterator
from typing import Any

import msgspec

from vllm_mp.client.answers.pieces import CallArguments, CallEnd, CallStart, ContentPiece, Piece, ReasoningPiece
from vllm_mp.client.answers.surrogates import without_half_surrogates
from vllm_mp.outputs import CompletionOutput
from vllm_mp.server.openai.answer_parts import AnswerFormat
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


class MessageContent:
    """Makes the blocks of a message from the text of its answer, and returns the events of a stream of them.

    Clients run a tool with what its block holds, and take no block back. So a call that no grammar holds becomes a
    block when it is whole, and text if its arguments are malformed.
    """

    def __init__(self, message: MessageObject, answer_format: AnswerFormat) -> None:
        """`message` has no content yet; `answer_format` says how the text is split into blocks."""
        self._message = message
        self._format = answer_format
        self._parser = answer_format.new_parser()
        self._holds_calls = answer_format.tools is not None and answer_format.tools.form is None
        self._block: TextBlock | ThinkingBlock | ToolUseBlock | None = None
        """The block that grows."""
        self._num_blocks = 0
        self._texts: list[str] = []
        """The parts of the text or the thought in the block that grows."""
        self._call = ToolUseBlock("", "", {})
        """The last call."""
        self._arguments: list[str] = []
        """The parts of its arguments."""
        self._has_calls = False

    def begin(self) -> bytes:
        """Return the first events."""
        return _event("message_start", message=self._message) + _event("ping")

    def add(self, text: str) -> bytes:
        """Return the events of more text."""
        return b"".join(self._add(self._parser.feed(text)))

    def end(self, completion: CompletionOutput, usage: Usage) -> bytes:
        """End the message; `completion` is the whole answer, or its last part. Return the last events."""
        added = b"".join(self._add(self._parser.finish(), is_cut_off=completion.finish_reason == "length"))
        ended = self._end_block()
        reason, sequence = _end(completion, has_calls=self._has_calls)
        self._message.stop_reason, self._message.stop_sequence, self._message.usage = reason, sequence, usage
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return added + ended + _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def _add(self, pieces: list[Piece], *, is_cut_off: bool = False) -> Iterator[bytes]:
        """Yield the events of `pieces`. `is_cut_off`: the limit of tokens has ended the answer."""
        tools = self._format.tools
        for piece in pieces:
            match piece:
                case ContentPiece(text):
                    yield self._text(text)
                case ReasoningPiece(text) if self._format.shows_reasoning:
                    yield self._enter(ThinkingBlock)
                    self._texts.append(text)
                    yield self._delta(type="thinking_delta", thinking=text)
                case CallStart(index, name) if tools is not None and self._format.keeps_call(index):
                    self._call, self._arguments = ToolUseBlock(tools.new_call_id(), name, {}), []
                    if not self._holds_calls:
                        yield self._begin_block(self._call)
                case CallArguments(index, text) if self._format.keeps_call(index):
                    self._arguments.append(text)
                    # While a call is held, pings keep the connection alive.
                    yield _event("ping") if self._holds_calls else self._arguments_delta(text)
                case CallEnd(index, complete) if self._format.keeps_call(index):
                    yield self._end_call(complete=complete, is_cut_off=is_cut_off)

    def _text(self, text: str) -> bytes:
        entered = self._enter(TextBlock)
        self._texts.append(text)
        return entered + self._delta(type="text_delta", text=text)

    def _end_call(self, *, complete: bool, is_cut_off: bool) -> bytes:
        """Return the events that end the last call, and those that begin it if it was held."""
        text = without_half_surrogates("".join(self._arguments))
        arguments = _object(text) if complete else None
        events = b""
        if self._holds_calls:
            if arguments is None and not is_cut_off:
                return self._text(f'{{"name": {msgspec.json.encode(self._call.name).decode()}, "arguments": {text}')
            events = self._begin_block(self._call) + (self._arguments_delta(text) if text else b"")
        if arguments is not None:
            self._call.input = arguments
            self._has_calls = True
        return events + self._end_block()

    def _enter(self, kind: type[TextBlock] | type[ThinkingBlock]) -> bytes:
        """Return the events that begin a block of this kind; none within one."""
        return b"" if isinstance(self._block, kind) else self._begin_block(kind())

    def _begin_block(self, block: TextBlock | ThinkingBlock | ToolUseBlock) -> bytes:
        """Return the events that end the block that grows, if there is one, and begin `block`."""
        ended = self._end_block()
        self._block = block
        self._num_blocks += 1
        return ended + _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _end_block(self) -> bytes:
        """Return the events that end the block that grows, if there is one."""
        block, self._block = self._block, None
        if block is None:
            return b""
        events = b""
        match block:
            case TextBlock():
                block.text = "".join(self._texts)
            case ThinkingBlock():
                block.thinking = "".join(self._texts)
                events = self._delta(type="signature_delta", signature="")
        self._texts = []
        self._message.content.append(block)
        return events + _event("content_block_stop", index=self._num_blocks - 1)

    def _arguments_delta(self, text: str) -> bytes:
        return self._delta(type="input_json_delta", partial_json=text)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)


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


def _object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that `text` is; None if it is none, or has a number that is too large."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return None
