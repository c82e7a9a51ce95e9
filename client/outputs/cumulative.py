"""Outputs that repeat the whole completion so far, without copying it for each token."""

from collections.abc import Sequence
from typing import Any

from vllm_mp.outputs import CompletionOutput, LogprobsOnePosition


class GrowingText:
    """A text that grows by pieces, and whose earlier states can be read."""

    __slots__ = ("_joined", "_num_joined", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._joined = ""
        """The first `_num_joined` pieces."""
        self._num_joined = 0

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self._pieces)

    def append(self, piece: str) -> None:
        """Add a piece, unless it is empty."""
        if piece:
            self._pieces.append(piece)

    def until(self, num_pieces: int) -> str:
        """Return the text of the first `num_pieces` pieces."""
        if num_pieces < self._num_joined:
            return "".join(self._pieces[:num_pieces])
        if num_pieces > self._num_joined:
            self._joined += "".join(self._pieces[self._num_joined : num_pieces])
            self._num_joined = num_pieces
        return self._joined

    def take(self) -> str:
        """Return the whole text, and begin again with an empty one; for a text that is never read with `until`."""
        pieces, self._pieces = self._pieces, []
        return "".join(pieces)


class CumulativeOutput(CompletionOutput, gc=False):
    """A completion so far, whose text, token ids and log-probabilities are made when they are first read.

    So a consumer that reads only some outputs, or only some fields, does not pay for copies of the whole completion.
    """

    _text: GrowingText | None = None
    """The text of the completion, whose first `_num_pieces` pieces belong to this output. The stream appends to
    it and to the two lists that follow; it never changes what they have."""
    _num_pieces: int = 0
    _all_token_ids: Sequence[int] = ()
    _num_tokens: int = 0
    _all_logprobs: list[LogprobsOnePosition] | None = None

    def __post_init__(self) -> None:
        if isinstance(self._all_token_ids, tuple):
            return  # `dataclasses.replace` gives the values
        # `__getattr__` is asked for fields without a value.
        del self.text
        del self.token_ids
        del self.logprobs

    def __getattr__(self, name: str) -> Any:
        """Make the value of a field that is read for the first time."""
        value: Any
        if name == "text":
            value = "" if self._text is None else self._text.until(self._num_pieces)
        elif name == "token_ids":
            value = self._all_token_ids[: self._num_tokens]
        elif name == "logprobs":
            value = None if self._all_logprobs is None else self._all_logprobs[: self._num_tokens]
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        setattr(self, name, value)
        return value

    def __eq__(self, other: object) -> bool:
        return self._plain() == (other._plain() if isinstance(other, CumulativeOutput) else other)

    def __repr__(self) -> str:
        return repr(self._plain())

    def __copy__(self) -> CompletionOutput:
        return self._plain()

    def __reduce__(self) -> Any:
        return self._plain().__reduce__()

    def _plain(self) -> CompletionOutput:
        """Return the same output with all its values."""
        return CompletionOutput(*[getattr(self, name) for name in CompletionOutput.__struct_fields__])
