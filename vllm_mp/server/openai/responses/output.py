"""The output of a response while it grows: the text of the answer becomes items, and the events that tell of them."""

from collections.abc import Sequence
from typing import TypeVar

from vllm_mp.client.answers.pieces import CallArguments, CallEnd, CallStart, ContentPiece, Piece, ReasoningPiece
from vllm_mp.server.openai.answer_parts import AnswerFormat
from vllm_mp.server.openai.logprobs import TokenLogprob
from vllm_mp.server.openai.responses.events import END_EVENTS, Created, Event, Failed, InProgress
from vllm_mp.server.openai.responses.items import GrowingCall, GrowingItem, GrowingMessage, GrowingReasoning
from vllm_mp.server.openai.responses.object import OutputItem, ResponseError, ResponseObject, Status, Usage, end_status

_Item = TypeVar("_Item", bound=GrowingItem)


class ResponseOutput:
    """Makes the items of a response from the text of its answer, and returns the events of a stream of them."""

    def __init__(self, response: ResponseObject, request_id: str, answer_format: AnswerFormat) -> None:
        """`answer_format` says how the text is split into items."""
        self._response = response
        self._request_id = request_id
        self._format = answer_format
        self._parser = answer_format.new_parser()
        self._items: list[OutputItem] = []
        self._growing: GrowingItem | None = None
        self._has_thought = False
        self._reasoning_counter = answer_format.new_counter()
        self._events: list[Event] = []
        """Events that were not returned yet."""

    def begin(self) -> list[Event]:
        """Return the events before the first text."""
        return [Created(response=self._response), InProgress(response=self._response)]

    def add(self, text: str, token_ids: Sequence[int], logprobs: list[TokenLogprob]) -> list[Event]:
        """Return the events of more text; `logprobs` belong to its tokens, for an answer that is all content."""
        if self._reasoning_counter is not None:
            self._reasoning_counter.add(token_ids)
        if logprobs:
            self._events += self._message().add_with_logprobs(text, logprobs)
        else:
            self._add(self._parser.feed(text))
        return self._take_events()

    def end(self, finish_reason: str | None, usage: Usage) -> list[Event]:
        """Return the events after the last text; `finish_reason` is that of the `CompletionOutput`."""
        self._add(self._parser.finish())
        if not self._items and self._growing is None:
            self._message()
        self._close("completed" if end_status(finish_reason) == "completed" else "incomplete")
        if self._has_thought and self._reasoning_counter is not None:
            usage.output_tokens_details.reasoning_tokens = self._reasoning_counter.count
        self._response.end(self._items, finish_reason, usage)
        return [*self._take_events(), END_EVENTS[self._response.status](response=self._response)]

    def fail(self, message: str) -> list[Event]:
        """Return the last event after an error of the engine, which `message` describes."""
        self._response.status = "failed"
        self._response.error = ResponseError("server_error", message)
        return [Failed(response=self._response)]

    def _add(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            match piece:
                case ContentPiece(text):
                    self._events += self._message().add(text)
                case ReasoningPiece(text):
                    self._has_thought = True
                    if self._format.shows_reasoning:
                        self._events += self._reasoning().add(text)
                case CallStart(index, name) if self._format.tools is not None and self._format.keeps_call(index):
                    self._close("completed")
                    call_id = self._format.tools.new_call_id()
                    self._begin(GrowingCall(self._new_id("fc"), len(self._items), call_id, name))
                case CallArguments(index, text) if self._growing is not None and self._format.keeps_call(index):
                    self._events += self._growing.add(text)
                case CallEnd(index, complete) if self._format.keeps_call(index):
                    self._close("completed" if complete else "incomplete")

    def _message(self) -> GrowingMessage:
        """Return the message that grows; begin it if another item grows, or none."""
        if isinstance(self._growing, GrowingMessage):
            return self._growing
        self._close("completed")
        return self._begin(GrowingMessage(self._new_id("msg"), len(self._items)))

    def _reasoning(self) -> GrowingReasoning:
        """Return the thought that grows; begin it if none grows."""
        if isinstance(self._growing, GrowingReasoning):
            return self._growing
        self._close("completed")
        return self._begin(GrowingReasoning(self._new_id("rs"), len(self._items)))

    def _begin(self, item: _Item) -> _Item:
        self._growing = item
        self._events += item.begin()
        return item

    def _close(self, status: Status) -> None:
        """End the item that grows, if there is one."""
        if self._growing is not None:
            item, events = self._growing.end(status)
            self._items.append(item)
            self._events += events
            self._growing = None

    def _new_id(self, kind: str) -> str:
        """Return the id of the next item; `kind` begins it."""
        return f"{kind}_{self._request_id}" + (f"_{len(self._items)}" if self._items else "")

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
