"""Room for the answer in the context: the oldest turns of a conversation that has become too long are dropped."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Message = dict[str, str]


@dataclass(frozen=True)
class FittedConversation:
    """A conversation that leaves room for the answer."""

    messages: list[Message]
    token_ids: list[int]
    """`messages` in the chat template."""
    notice: str
    """What was dropped, in a line for the user; "" if nothing was dropped."""


def fit_conversation(
    messages: Sequence[Message],
    tokenize: Callable[[Sequence[Message]], list[int]],
    max_model_len: int,
    max_tokens: int | None,
) -> FittedConversation:
    """Return `messages`, without their oldest turns if the answer would have too little room.

    The room is a quarter of the context, or `max_tokens` if that is less. System messages stay. A turn is a user
    message with all that follows it up to the next user message, and the last turn stays. If turns must be dropped, as
    many are dropped that half of the context is free: the conversation then begins with the same tokens for several
    turns, which the prefix cache holds.

    Raises ValueError with the length and the limit if the last turn alone leaves too little room.
    """
    limit = max_model_len - min(max_model_len // 4, max_tokens or max_model_len)
    token_ids = tokenize(messages)
    if len(token_ids) <= limit:
        return FittedConversation(list(messages), token_ids, "")

    first_of_turn = _first_of_turn(messages)
    last_turn = len(first_of_turn) - 1

    def without(num_dropped: int) -> list[Message]:
        start = first_of_turn[num_dropped]
        return [message for place, message in enumerate(messages) if place >= start or message["role"] == "system"]

    def length_without(num_dropped: int) -> int:
        return len(tokenize(without(num_dropped)))

    length_of_last = length_without(last_turn)
    if length_of_last > limit:
        raise ValueError(
            f"the message is too long: {length_of_last} tokens with the system message, and the limit is {limit}, as "
            f"{max_model_len - limit} of the context's {max_model_len} tokens are kept for the answer; shorten it"
        )
    half = max_model_len // 2
    target = half if length_of_last <= half else limit
    num_dropped = bisect_left(range(last_turn), True, lo=1, key=lambda num: length_without(num) <= target)
    turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
    notice = f"the oldest {turns} dropped: the conversation left too little of the context for an answer"
    kept = without(num_dropped)
    return FittedConversation(kept, tokenize(kept), notice)


def _first_of_turn(messages: Sequence[Message]) -> list[int]:
    """Return the place of the first message of each turn; messages before the first turn belong to it."""
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    return [0, *places[1:]]
