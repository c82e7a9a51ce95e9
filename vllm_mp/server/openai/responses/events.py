"""The events of a streamed response: what /v1/responses sends while the output grows."""

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from vllm_mp.server.openai.logprobs import TokenLogprob
from vllm_mp.server.openai.responses.object import OutputItem, OutputText, ReasoningText, ResponseObject


class Event(msgspec.Struct, tag_field="type", kw_only=True):
    """An event; its number in the stream makes lost events visible."""

    sequence_number: int = 0
    """Set when the event is sent."""


class _ResponseEvent(Event, kw_only=True):
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


class _ItemEvent(Event, kw_only=True):
    item: OutputItem
    output_index: int


class ItemAdded(_ItemEvent, tag="response.output_item.added"):
    """A message, a thought or a call begins."""


class ItemDone(_ItemEvent, tag="response.output_item.done"):
    """A message, a thought or a call is whole."""


class _InItemEvent(Event, kw_only=True):
    item_id: str
    output_index: int


class _ContentEvent(_InItemEvent, kw_only=True):
    content_index: int = 0


class PartAdded(_ContentEvent, tag="response.content_part.added", kw_only=True):
    """The text of an item begins."""

    part: OutputText | ReasoningText


class PartDone(_ContentEvent, tag="response.content_part.done", kw_only=True):
    """The text of an item is whole."""

    part: OutputText | ReasoningText


class TextDelta(_ContentEvent, tag="response.output_text.delta", kw_only=True):
    """More text."""

    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_ContentEvent, tag="response.output_text.done", kw_only=True):
    """The whole text."""

    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_ContentEvent, tag="response.reasoning_text.delta", kw_only=True):
    """More of a thought."""

    delta: str


class ReasoningDone(_ContentEvent, tag="response.reasoning_text.done", kw_only=True):
    """The whole thought."""

    text: str


class ArgumentsDelta(_InItemEvent, tag="response.function_call_arguments.delta", kw_only=True):
    """More of the arguments of a call."""

    delta: str


class ArgumentsDone(_InItemEvent, tag="response.function_call_arguments.done", kw_only=True):
    """The whole arguments of a call."""

    name: str
    arguments: str


END_EVENTS: dict[str, type[_ResponseEvent]] = {"completed": Completed, "incomplete": Incomplete, "failed": Failed}
"""The last event by the status of the response."""


class EventEncoder:
    """Encodes the events of one response as server-sent events, and counts them."""

    _encode: ClassVar = msgspec.json.Encoder().encode

    def __init__(self) -> None:
        self._num_sent = 0

    def encode(self, events: Iterable[Event]) -> bytes:
        """Return the text of `events`, which come next in the stream."""
        return b"".join(map(self._encode_event, events))

    def _encode_event(self, event: Event) -> bytes:
        event.sequence_number = self._num_sent
        self._num_sent += 1
        name = type(event).__struct_config__.tag
        assert isinstance(name, str)
        return b"event: %b\ndata: %b\n\n" % (name.encode(), self._encode(event))
