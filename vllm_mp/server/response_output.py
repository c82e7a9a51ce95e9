"""The output of a response while it grows: pieces of the answer become items, and the events that announce them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

from vllm_mp.client.answer_pieces import CallArguments, CallEnd, CallStart, ContentPiece, Piece, ReasoningPiece
from vllm_mp.server.logprobs import TokenLogprob
from vllm_mp.server.response_events import (
    END_EVENTS,
    ArgumentsDelta,
    ArgumentsDone,
    Created,
    Event,
    Failed,
    InProgress,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from vllm_mp.server.response_object import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    Status,
    Usage,
    end_status,
)

_Item = TypeVar("_Item", bound=OutputItem)


class _Growing(ABC, Generic[_Item]):
    """An item that is not whole yet. The events of its begin and its end hold separate objects."""

    def __init__(self, item_id: str, output_index: int) -> None:
        self.id = item_id
        self.index = output_index
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @abstractmethod
    def item(self, status: Status) -> _Item:
        """Return the item as it is so far."""

    @abstractmethod
    def begin(self) -> list[Event]:
        """Return the events before the first text."""

    @abstractmethod
    def end(self, item: _Item) -> list[Event]:
        """Return the events after the last text; `item` is whole."""


class _GrowingMessage(_Growing[OutputMessage]):
    def __init__(self, item_id: str, output_index: int) -> None:
        super().__init__(item_id, output_index)
        self._logprobs: list[TokenLogprob] = []

    def item(self, status: Status) -> OutputMessage:
        return OutputMessage(self.id, status, [OutputText(self.text, logprobs=self._logprobs)])

    def begin(self) -> list[Event]:
        return [
            ItemAdded(item=OutputMessage(self.id, "in_progress", []), output_index=self.index),
            PartAdded(item_id=self.id, output_index=self.index, part=OutputText()),
        ]

    def add(self, text: str, logprobs: list[TokenLogprob]) -> Event:
        self._texts.append(text)
        self._logprobs += logprobs
        return TextDelta(item_id=self.id, output_index=self.index, delta=text, logprobs=logprobs)

    def end(self, item: OutputMessage) -> list[Event]:
        [part] = item.content
        return [
            TextDone(item_id=self.id, output_index=self.index, text=part.text, logprobs=part.logprobs),
            PartDone(item_id=self.id, output_index=self.index, part=part),
        ]


class _GrowingReasoning(_Growing[ReasoningItem]):
    def item(self, status: Status) -> ReasoningItem:
        return ReasoningItem(self.id, status, [ReasoningText(self.text)])

    def begin(self) -> list[Event]:
        return [
            ItemAdded(item=ReasoningItem(self.id, "in_progress", []), output_index=self.index),
            PartAdded(item_id=self.id, output_index=self.index, part=ReasoningText()),
        ]

    def add(self, text: str) -> Event:
        self._texts.append(text)
        return ReasoningDelta(item_id=self.id, output_index=self.index, delta=text)

    def end(self, item: ReasoningItem) -> list[Event]:
        [part] = item.content
        return [
            ReasoningDone(item_id=self.id, output_index=self.index, text=part.text),
            PartDone(item_id=self.id, output_index=self.index, part=part),
        ]


class _GrowingCall(_Growing[FunctionCallItem]):
    def __init__(self, item_id: str, output_index: int, call_id: str, name: str) -> None:
        super().__init__(item_id, output_index)
        self._call_id = call_id
        self._name = name

    def item(self, status: Status) -> FunctionCallItem:
        return FunctionCallItem(self.id, self._call_id, self._name, status, self.text)

    def begin(self) -> list[Event]:
        return [ItemAdded(item=self.item("in_progress"), output_index=self.index)]

    def add(self, text: str) -> Event:
        self._texts.append(text)
        return ArgumentsDelta(item_id=self.id, output_index=self.index, delta=text)

    def end(self, item: FunctionCallItem) -> list[Event]:
        return [
            ArgumentsDone(item_id=self.id, output_index=self.index, name=item.name, arguments=item.arguments),
        ]


class ResponseOutput:
    """Makes the items of one response from the pieces of its answer, and returns the events of a stream of them."""

    def __init__(self, response: ResponseObject, request_id: str) -> None:
        self._response = response
        self._request_id = request_id
        self._items: list[OutputItem] = []
        self._growing: _GrowingMessage | _GrowingReasoning | _GrowingCall | None = None

    def begin(self) -> list[Event]:
        """Return the events before the first piece."""
        return [Created(response=self._response), InProgress(response=self._response)]

    def add(self, pieces: Iterable[Piece], logprobs: list[TokenLogprob]) -> list[Event]:
        """Add `pieces`; `logprobs` belong to the content among them. Return the events that tell of them."""
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case ContentPiece(text):
                    if text or logprobs:
                        message = self._message(events)
                        events.append(message.add(text, logprobs))
                        logprobs = []
                case ReasoningPiece(text):
                    if not isinstance(self._growing, _GrowingReasoning):
                        self._begin(_GrowingReasoning(self._item_id("rs"), len(self._items)), events)
                    assert isinstance(self._growing, _GrowingReasoning)
                    events.append(self._growing.add(text))
                case CallStart(_, name):
                    pass
                case CallArguments(_, text):
                    assert isinstance(self._growing, _GrowingCall)
                    events.append(self._growing.add(text))
                case CallEnd(_, complete):
                    self._close("completed" if complete else "incomplete", events)
        return events
