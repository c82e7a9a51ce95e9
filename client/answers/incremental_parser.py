"""The base of the parsers that split the text of an answer into pieces."""

from abc import ABC, abstractmethod
from typing import ClassVar

from vllm_mp.client.answers.pieces import Piece
from vllm_mp.client.answers.reader import AnswerReader, Reading


class IncrementalParser(ABC):
    """Splits the text of one answer into pieces.

    The pieces, joined, do not depend on the parts in which the text arrives.
    """

    name: ClassVar[str]
    """The name by which an option chooses the parser."""
    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that the parser must see. The detokenizer must not skip those that are special tokens of the model."""

    def __init__(self) -> None:
        self.answer = AnswerReader()
        self._parsing: Reading[None] | None = self.parse()

    @classmethod
    def detect(cls, chat_template: str) -> bool:
        """Return whether a model with this chat template writes this format."""
        return False

    @abstractmethod
    def parse(self) -> Reading[None]:
        """Read `self.answer` and make pieces of it, as a generator. Text that is left when it returns is content."""

    def feed(self, text: str) -> list[Piece]:
        """Add text of the answer. Return the pieces that it continues or completes."""
        self.answer.add(text)
        self._read()
        return self.answer.take_pieces()

    def finish(self) -> list[Piece]:
        """End the answer. Return the last pieces."""
        self.answer.ended = True
        self._read()
        self._parsing = None
        self.answer.release_all()
        return self.answer.take_pieces()

    def _read(self) -> None:
        """Read what has arrived, until the parser needs more text."""
        if self._parsing is not None:
            try:
                next(self._parsing)
                return
            except StopIteration:
                self._parsing = None
        self.answer.release_rest()
