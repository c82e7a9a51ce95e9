"""The items of a response that grow with its answer, and the events that tell of their growth."""

from abc import ABC, abstractmethod

from vllm_mp.server.openai.logprobs import TokenLogprob
from vllm_mp.server.openai.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from vllm_mp.server.openai.responses.object import (
    FunctionCallItem,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
)


class GrowingItem(ABC):
    """An item that is not whole yet. Its events hold objects that do not change later."""

    def __init__(self, item_id: str, output_index: int) -> None:
        self.id = item_id
        self.index = output_index
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def add(self, text: str) -> list[Event]:
        """Return the events of more text."""
        self._texts.append(text)
        return [self._delta(text)]

    @abstractmethod
    def begin(self) -> list[Event]:
        """Return the events before the first text."""

    @abstractmethod
    def end(self, status: Status) -> tuple[OutputItem, list[Event]]:
        """Return the whole item and the events after its last text."""

    @abstractmethod
    def _delta(self, text: str) -> Event:
        """Return the event of more text."""


class GrowingMessage(GrowingItem):
    """The text of the answer."""

    def __init__(self, item_id: str, output_index: int) -> None:
        super().__init__(item_id, output_index)
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> list[Event]:
        return [
            ItemAdded(item=OutputMessage(self.id, "in_progress", []), output_index=self.index),
            PartAdded(item_id=self.id, output_index=self.index, part=OutputText()),
        ]

    def add_with_logprobs(self, text: str, logprobs: list[TokenLogprob]) -> list[Event]:
        """Return the events of more text, with the log-probabilities of its tokens."""
        self._texts.append(text)
        self._logprobs += logprobs
        return [TextDelta(item_id=self.id, output_index=self.index, delta=text, logprobs=logprobs)]

    def end(self, status: Status) -> tuple[OutputMessage, list[Event]]:
        part = OutputText(self.text, logprobs=self._logprobs)
        item = OutputMessage(self.id, status, [part])
        return item, [
            TextDone(item_id=self.id, output_index=self.index, text=part.text, logprobs=part.logprobs),
            PartDone(item_id=self.id, output_index=self.index, part=part),
            ItemDone(item=item, output_index=self.index),
        ]

    def _delta(self, text: str) -> Event:
        return TextDelta(item_id=self.id, output_index=self.index, delta=text, logprobs=[])


class GrowingReasoning(GrowingItem):
    """The thought before the answer."""

    def begin(self) -> list[Event]:
        return [
            ItemAdded(item=ReasoningItem(self.id, "in_progress", []), output_index=self.index),
            PartAdded(item_id=self.id, output_index=self.index, part=ReasoningText()),
        ]

    def end(self, status: Status) -> tuple[ReasoningItem, list[Event]]:
        part = ReasoningText(self.text)
        item = ReasoningItem(self.id, status, [part])
        return item, [
            ReasoningDone(item_id=self.id, output_index=self.index, text=part.text),
            PartDone(item_id=self.id, output_index=self.index, part=part),
            ItemDone(item=item, output_index=self.index),
        ]

    def _delta(self, text: str) -> Event:
        return ReasoningDelta(item_id=self.id, output_index=self.index, delta=text)


class GrowingCall(GrowingItem):
    """A call of a tool; its text are the arguments."""

    def __init__(self, item_id: str, output_index: int, call_id: str, name: str) -> None:
        super().__init__(item_id, output_index)
        self._call_id = call_id
        self._name = name

    def begin(self) -> list[Event]:
        return [ItemAdded(item=self._item("in_progress"), output_index=self.index)]

    def end(self, status: Status) -> tuple[FunctionCallItem, list[Event]]:
        item = self._item(status)
        return item, [
            ArgumentsDone(item_id=self.id, output_index=self.index, name=item.name, arguments=item.arguments),
            ItemDone(item=item, output_index=self.index),
        ]

    def _delta(self, text: str) -> Event:
        return ArgumentsDelta(item_id=self.id, output_index=self.index, delta=text)

    def _item(self, status: Status) -> FunctionCallItem:
        return FunctionCallItem(self.id, self._call_id, self._name, status, self.text)
