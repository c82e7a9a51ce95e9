"""Log-probabilities in the shapes of OpenAI's endpoints."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from vllm_mp.client.outputs.detokenizer import IncrementalDetokenizer
from vllm_mp.client.threads.background_call import call_in_thread
from vllm_mp.outputs import Logprob, LogprobsOnePosition

_MAX_INLINE: Final = 256
"""Number of positions up to which log-probabilities are converted on the event loop, in about a millisecond."""
_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot express."""

_REPLACEMENT = "\ufffd"
"""Stands in a text for a part of a character."""
TokenBytes = Callable[[int], bytes]
"""Returns the bytes of a token."""
Converted = TypeVar("Converted")


class CompletionLogprobs(msgspec.Struct):
    """The log-probabilities of a choice of /v1/completions; an entry of each list for each token."""

    text_offset: list[int]
    """Where the token begins in the text of the choice, in characters."""
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """The log-probabilities of the most likely tokens, and of the chosen one."""


class TopLogprob(msgspec.Struct):
    """The log-probability of a token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]
    """The token's own bytes. A token may be a part of a character, which `token` cannot show."""


class TokenLogprob(TopLogprob):
    """The log-probability of a token of a message, and those of the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log-probabilities of a choice of /v1/chat/completions."""

    content: list[TokenLogprob]


class PromptLogprob(msgspec.Struct):
    """The log-probability of a token at the position of a prompt token."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each prompt token the log-probabilities by token id; None for the first token."""


async def convert(call: Callable[[], Converted], positions: Sequence[Any] | None) -> Converted:
    """Return `call()`, which converts `positions`; many of them in a thread, because the event loop must go on."""
    return await call_in_thread(call) if positions is not None and len(positions) > _MAX_INLINE else call()


class TextOffsets:
    """Where the tokens of a text begin in it; a token that is a part of a character begins where the character does."""

    def __init__(self, detokenizer: IncrementalDetokenizer | None, start: int = 0) -> None:
        """`start` is where the first token begins. Without a `detokenizer` all tokens begin there."""
        self._detokenizer = detokenizer
        self._end = start

    def next(self, token_id: int) -> int:
        """Return where the next token begins, in characters."""
        begin = self._end
        if self._detokenizer is not None:
            self._end += len(self._detokenizer.append((token_id,)))
        return begin


def completion_logprobs(
    positions: Sequence[LogprobsOnePosition | None],
    offsets: TextOffsets,
    first_id: int = -1,
    first_text: str = "",
    *,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Return the log-probabilities of tokens whose text begins at `offsets`.

    None stands for the first token of a prompt, whose id is `first_id` and whose text is `first_text`. With `as_ids`
    tokens are written as their ids.
    """
    result = CompletionLogprobs([], [], [], [])
    for position in positions:
        token_id, chosen = next(iter(position.items())) if position else (first_id, None)
        result.text_offset.append(offsets.next(token_id))
        text = _text(chosen) if chosen else first_text
        result.tokens.append(_id_text(token_id) if as_ids else text)
        result.token_logprobs.append(_finite(chosen) if chosen else None)
        result.top_logprobs.append(_by_text(position, as_ids) if position else None)
    return result


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Return the log-probabilities of `first`, followed by those of `second`."""
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def chat_logprobs(
    positions: Sequence[LogprobsOnePosition],
    num_top: int,
    bytes_of: TokenBytes | None = None,
    *,
    as_ids: bool = False,
) -> ChatLogprobs:
    """Return the log-probabilities of tokens, with the `num_top` most likely ones at the position of each.

    `bytes_of` returns the bytes of a token; None: tokens have no text. With `as_ids` tokens are written as their ids.
    """
    return ChatLogprobs([_token_logprob(position, num_top, bytes_of, as_ids) for position in positions])


def prompt_logprobs(positions: Sequence[LogprobsOnePosition | None]) -> PromptLogprobs:
    """Return the log-probabilities of a prompt's tokens."""
    return [
        None
        if position is None
        else {
            token_id: PromptLogprob(_finite(entry), entry.rank, entry.decoded_token)
            for token_id, entry in position.items()
        }
        for position in positions
    ]


def _token_logprob(
    position: LogprobsOnePosition, num_top: int, bytes_of: TokenBytes | None, as_ids: bool
) -> TokenLogprob:
    entries = list(position.items())
    likely = sorted(
        (entry for entry in entries if entry[1].rank and entry[1].rank <= num_top), key=lambda entry: _rank(entry[1])
    )
    chosen = _top_logprob(*entries[0], bytes_of, as_ids)
    top = [_top_logprob(*entry, bytes_of, as_ids) for entry in likely]
    return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)


def _top_logprob(token_id: int, entry: Logprob, bytes_of: TokenBytes | None, as_ids: bool) -> TopLogprob:
    text = _text(entry)
    own = bytes_of(token_id) if bytes_of is not None and _REPLACEMENT in text else text.encode()
    return TopLogprob(_id_text(token_id) if as_ids else text, _finite(entry), list(own))


def _by_text(position: LogprobsOnePosition, as_ids: bool) -> dict[str, float]:
    """Return the log-probabilities by text; of tokens with the same text, the most likely one counts."""
    result: dict[str, float] = {}
    for token_id, entry in sorted(position.items(), key=lambda item: _rank(item[1])):
        result.setdefault(_id_text(token_id) if as_ids else _text(entry), _finite(entry))
    return result


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


def _rank(entry: Logprob) -> int:
    return entry.rank or 0


def _text(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)
