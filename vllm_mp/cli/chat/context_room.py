"""The room of a conversation in the model's context; a part of it is kept for the answer."""

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_mp.arguments.counted import counted
from vllm_mp.cli.chat.conversation import Conversation
from vllm_mp.cli.chat.images import Message
from vllm_mp.cli.chat_text import chat_prompt, prompt_tokens
from vllm_mp.cli.terminal.screen import Screen

if TYPE_CHECKING:
    import asyncio

    from vllm_mp.client.async_llm import AsyncLLM
    from vllm_mp.client.prompts.prompt import TokensPrompt


def fitting_prompt(
    llm: "AsyncLLM", conversation: Conversation, screen: Screen, runner: "asyncio.Runner"
) -> "list[int] | TokensPrompt":
    """Return the conversation as a prompt, after `make_room`; a note says how many turns were dropped."""

    def tokenize(messages: list[Message]) -> list[int]:
        return runner.run(prompt_tokens(llm, chat_prompt(llm, messages)))

    if num_dropped := make_room(conversation, tokenize, llm.model_config.max_model_len):
        turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
        screen.note(f"(the oldest {turns} dropped, so that the context has room for the answer)")
    return chat_prompt(llm, conversation.to_send())


def make_room(conversation: Conversation, tokenize: Callable[[list[Message]], list[int]], max_model_len: int) -> int:
    """Drop the oldest turns if the answer would have too little room, and return their number.

    The room is a quarter of the context, or max_tokens if that is less. A turn is a user message with what follows it
    up to the next user message; the last turn stays. If turns must be dropped, as many are dropped that half of the
    context is free, so that the next prompts begin with the same tokens, which the prefix cache holds. If the last turn
    alone is longer than that, only the room for the answer is freed.

    Raises ValueError with the length and the limit, and drops nothing, if the last turn alone leaves too little room.
    """
    messages = conversation.messages
    room = min(max_model_len // 4, conversation.parameters.get("max_tokens") or max_model_len)
    limit = max_model_len - room
    starts = [0, *(index for index, message in enumerate(messages) if message["role"] == "user" and index > 0)]
    if messages[0]["role"] != "user":
        del starts[1:2]  # messages before the first user message belong to its turn

    def length_without(num_turns: int) -> int:
        return len(tokenize(conversation.to_send(first=starts[num_turns])))

    if length_without(0) <= limit:
        return 0
    last_turn = len(starts) - 1
    length_of_last = length_without(last_turn)
    if length_of_last > limit:
        raise ValueError(
            f"the message is too long: {length_of_last} tokens with the chat template, and the limit is {limit}, as "
            f"{counted(room, 'token')} of the context of {max_model_len} are kept for the answer; shorten it"
        )
    half = max_model_len // 2
    target = half if length_of_last <= half else limit
    num_dropped = bisect_left(range(last_turn), True, lo=1, key=lambda num_turns: length_without(num_turns) <= target)
    del messages[: starts[num_dropped]]
    return num_dropped
