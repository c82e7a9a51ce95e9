"""The inputs of requests for vectors and classes: texts, token ids, or a conversation."""

from typing import Annotated, Any

import msgspec

from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.server.http.endpoint import Call
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.openai.chat_messages import ChatMessage
from vllm_mp.server.openai.chat_prompt import chat_prompt
from vllm_mp.server.pooling.running import MAX_INPUTS, Inputs, PoolingBody, read_inputs

_Input = Annotated[
    str | list[str | int | list[int]],
    msgspec.Meta(description=f"A text, its token ids, or a list of at most {MAX_INPUTS} texts or lists of ids."),
]


class InputBody(PoolingBody, kw_only=True):
    """The fields of requests for vectors and classes."""

    input: _Input | None = None
    messages: list[ChatMessage] | None = None
    """A conversation instead of `input`: the chat template makes one text of it."""
    add_generation_prompt: bool | None = None
    """Let the text of `messages` end where an answer begins; default: false."""
    continue_final_message: bool | None = None
    """Let the text of `messages` end inside of the last message."""
    chat_template: str | None = None
    """A template instead of the model's; refused unless the server runs with --trust-request-chat-template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the template."""
    add_special_tokens: bool | None = None
    """Put the tokenizer's special tokens, such as the begin of the sequence, around a text; default: true for `input`,
    false for `messages`."""


async def input_prompts(call: Call, body: InputBody, params: PoolingParams) -> Inputs:
    """Return the inputs of `body`, of which `params` say what is made.

    Raises ApiError, naming the field at fault, unless there are either inputs or messages that can be read.
    """
    cache_salt = call.tenant.cache_salt(body.cache_salt)
    if body.messages is None:
        if body.input is None:
            raise ApiError(400, "the field input is missing; add it, or messages", param="input")
        return read_inputs(body.input, cache_salt, params)
    if body.input is not None:
        raise ApiError(400, "the request has input and messages; give one of them", param="messages")
    rendered = await chat_prompt(
        call,
        body.messages,
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    if rendered.images:
        path = rendered.image_paths[0]
        raise ApiError(400, f"{path} is an image, and only text is read here; leave it out", param=path)
    return Inputs([rendered.prompt(cache_salt)], [params], ["messages"])


def adds_special_tokens(body: InputBody) -> bool | None:
    """Return whether the tokenizer adds its special tokens; None: it decides. A chat template has written them."""
    if body.add_special_tokens is None and body.messages is not None:
        return False
    return body.add_special_tokens
