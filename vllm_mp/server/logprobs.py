"""Log-probabilities in the shapes of OpenAI's endpoints."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from vllm_mp.client.background_call import call_in_thread
from vllm_mp.outputs import Logprob, LogprobsOnePosition

_MAX_INLINE: Final = 256
"""Number of positions up to which log-probabilities are converted on the event loop, in about a millisecond."""
_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot express."""

Converted = TypeVar("Converted")


class CompletionLogprobs(msgspec.Struct):
    """The log-probabilities of a choice of /v1/completions; an entry of each list for each token."""

    text_offset: list[int]
    """Where the token begins in the text of the choice, in characters."""
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """Of the most likely tokens, and of the chosen one."""


class TopLogprob(msgspec.Struct):
    """The log-probability of a token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]
    """`token` in UTF-8."""


class TokenLogprob(TopLogprob):
    """The log-probability of a token of a message, and the log-probabilities of the most likely tokens in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log-probabilities of a choice of /v1/chat/completions."""

    content: list[TokenLogprob]


class PromptLogprob(msgspec.Struct):
    """The log-probability of a token in the place of a prompt token."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each prompt token the log-probabilities by token id; None for the first token."""


async def convert(call: Callable[[], Converted], positions: Sequence[Any] | None) -> Converted:
    """Return `call()`, which converts `positions`; many of them in a thread, because the event loop must go on."""
    return await call_in_thread(call) if positions is not None and len(positions) > _MAX_INLINE else call()


def completion_logprobs(
    positions: Sequence[LogprobsOnePosition | None], offset: int, first_text: str = ""
) -> CompletionLogprobs:
    """Return the log-probabilities of tokens whose text begins at `offset`.

    None stands for the first token of a prompt, whose text is `first_text`.
    """
    result = CompletionLogprobs([], [], [], [])
    for position in positions:
        chosen = next(iter(position.values())) if position else None
        text = _text(chosen) if chosen else first_text
        result.text_offset.append(offset)
        result.tokens.append(text)
        result.token_logprobs.append(_finite(chosen) if chosen else None)
        result.top_logprobs.append(_by_text(position) if position else None)
        offset += len(text)
    return result


def chat_logprobs(positions: Sequence[LogprobsOnePosition], num_top: int) -> ChatLogprobs:
    """Return the log-probabilities of tokens, with the `num_top` most likely ones in the place of each."""
    return ChatLogprobs([_token_logprob(list(position.values()), num_top) for position in positions])


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


def _token_logprob(entries: list[Logprob], num_top: int) -> TokenLogprob:
    likely = sorted((entry for entry in entries if entry.rank and entry.rank <= num_top), key=_rank)
    chosen, top = _top_logprob(entries[0]), [_top_logprob(entry) for entry in likely]
    return TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top)


def _top_logprob(entry: Logprob) -> TopLogprob:
    text = _text(entry)
    return TopLogprob(text, _finite(entry), list(text.encode()))


def _by_text(position: LogprobsOnePosition) -> dict[str, float]:
    """Return the log-probabilities by text; of tokens with the same text, the most likely one counts."""
    result: dict[str, float] = {}
    for entry in sorted(position.values(), key=_rank):
        result.setdefault(_text(entry), _finite(entry))
    return result


def _rank(entry: Logprob) -> int:
    return entry.rank or 0


def _text(entry: Logprob) -> str:
    return entry.decoded_token or ""


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)
