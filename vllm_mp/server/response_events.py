"""The events of a streamed response: what /v1/responses sends while the text grows."""

from typing import ClassVar

import msgspec

from vllm_mp.server.logprobs import TokenLogprob
from vllm_mp.server.response_object import (
    OutputMessage,
    OutputText,
    ResponseError,
    ResponseObject,
    Usage,
)


class _Event(msgspec.Struct, tag_field="type", kw_only=True):
    """An event; its place in the stream makes lost events visible."""

    sequence_number: int = 0
    """Set when the event is sent."""


class _ResponseEvent(_Event, kw_only=True):
    response: ResponseObject


class Created(_ResponseEvent, tag="response.created"):
    """The request was accepted."""


class InProgress(_ResponseEvent, tag="response.in_progress"):
    """The generation begins."""


class Completed(_ResponseEvent, tag="response.completed"):
    """The last event of an answer that the model ended."""


class Incomplete(_ResponseEvent, tag="response.incomplete"):
    """The last event of an answer that reached its limit of tokens."""


class Failed(_ResponseEvent, tag="response.failed"):
    """The last event of an answer that could not be finished."""


class _ItemEvent(_Event, kw_only=True):
    item: OutputMessage
    output_index: int = 0


class ItemAdded(_ItemEvent, tag="response.output_item.added"):
    """The answer begins."""


class ItemDone(_ItemEvent, tag="response.output_item.done"):
    """The answer is whole."""


class _ContentEvent(_Event, kw_only=True):
    item_id: str
    output_index: int = 0
    content_index: int = 0


class PartAdded(_ContentEvent, tag="response.content_part.added", kw_only=True):
    """The text begins."""

    part: OutputText


class PartDone(_ContentEvent, tag="response.content_part.done", kw_only=True):
    """The text is whole."""

    part: OutputText


class TextDelta(_ContentEvent, tag="response.output_text.delta", kw_only=True):
    """More text."""

    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_ContentEvent, tag="response.output_text.done", kw_only=True):
    """The whole text."""

    text: str
    logprobs: list[TokenLogprob]


_END_EVENTS: dict[str, type[_ResponseEvent]] = {"completed": Completed, "incomplete": Incomplete, "failed": Failed}
"""The last event by the status of the response."""


class ResponseEvents:
    """The events of one response, as server-sent events; counts them and collects the text."""

    _encoder: ClassVar = msgspec.json.Encoder()

    def __init__(self, response: ResponseObject, message_id: str) -> None:
        self._response = response
        self._message_id = message_id
        self._num_sent = 0
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> bytes:
        """Return the events before the first text."""
        message = OutputMessage(self._message_id, "in_progress", [])
        return b"".join(
            (
                self._event(Created(response=self._response)),
                self._event(InProgress(response=self._response)),
                self._event(ItemAdded(item=message)),
                self._event(PartAdded(item_id=self._message_id, part=OutputText())),
            )
        )

    def delta(self, text: str, logprobs: list[TokenLogprob]) -> bytes:
        """Return the event of more text, or nothing if there is none."""
        if not text and not logprobs:
            return b""
        self._texts.append(text)
        self._logprobs += logprobs
        return self._event(TextDelta(item_id=self._message_id, delta=text, logprobs=logprobs))

    def end(self, finish_reason: str | None, usage: Usage) -> bytes:
        """Return the events after the last text; `finish_reason` is that of the `CompletionOutput`."""
        text = OutputText("".join(self._texts), logprobs=self._logprobs)
        message = OutputMessage(self._message_id, "completed", [text])
        self._response.end(message, finish_reason, usage)
        return b"".join(
            (
                self._event(TextDone(item_id=self._message_id, text=text.text, logprobs=text.logprobs)),
                self._event(PartDone(item_id=self._message_id, part=text)),
                self._event(ItemDone(item=message)),
                self._event(_END_EVENTS[self._response.status](response=self._response)),
            )
        )

    def fail(self, message: str) -> bytes:
        """Return the last event after an error of the engine, which `message` describes."""
        self._response.status = "failed"
        self._response.error = ResponseError("server_error", message)
        return self._event(Failed(response=self._response))

    def _event(self, event: _Event) -> bytes:
        event.sequence_number = self._num_sent
        self._num_sent += 1
        name = type(event).__struct_config__.tag
        assert isinstance(name, str)
        return b"event: %b\ndata: %b\n\n" % (name.encode(), self._encoder.encode(event))
