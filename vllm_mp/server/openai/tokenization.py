"""The endpoints /tokenize, /detokenize and /tokenizer_info: text to token ids as the engine sees them, and back."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from vllm_mp.client.prompts.prompt import TextPrompt
from vllm_mp.client.threads.background_call import call_in_thread
from vllm_mp.server.http.body import RequestBody
from vllm_mp.server.http.endpoint import Call, json_response, post
from vllm_mp.server.http.errors import ApiError, as_refusal
from vllm_mp.server.http.state import ServerState
from vllm_mp.server.openai.chat_messages import ChatMessage
from vllm_mp.server.openai.chat_prompt import chat_prompt, prompt_tokens
from vllm_mp.server.openai.models import check_model
from vllm_mp.server.openai.tools import ToolDefinition, template_tools


class TokenizeBody(RequestBody, kw_only=True):
    """A text, or a conversation, to tokenize."""

    prompt: str | None = None
    """The text; not together with `messages`."""
    messages: list[ChatMessage] | None = None
    """The conversation, which the chat template turns into a text."""
    add_generation_prompt: bool | None = None
    """Let the prompt end where the assistant's answer begins; default: unless the last message is continued."""
    continue_final_message: bool | None = None
    """Continue the last message, instead of an answer to it."""
    chat_template: str | None = None
    """A template instead of the model's; refused unless the server runs with --trust-request-chat-template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the template."""
    tools: list[ToolDefinition] | None = None
    """Functions that the chat template describes to the model."""
    model: str | None = None
    add_special_tokens: bool | None = None
    """Put the tokenizer's special tokens around the text; default: true for `prompt`, false for `messages`."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the model's image processor for the images of `messages`."""
    return_token_strs: bool | None = None
    """Return the text of each token too."""


class TokenizeResponse(msgspec.Struct):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(RequestBody, kw_only=True):
    """Token ids to turn into text."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(msgspec.Struct):
    """The text of token ids."""

    prompt: str


async def tokenize(call: Call, body: TokenizeBody) -> Response:
    """Return the tokens of a text or of a conversation."""
    check_model(call.server, body.model)
    paths: list[str] = []
    if body.prompt is not None and body.messages is None:
        prompt, add_special_tokens, field = TextPrompt(prompt=body.prompt), True, "prompt"
    elif body.messages is not None and body.prompt is None:
        add_special_tokens = False
        rendered = await chat_prompt(
            call,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=template_tools([tool.function for tool in body.tools]) if body.tools else None,
        )
        prompt, field, paths = rendered.prompt("", body.mm_processor_kwargs), "messages", rendered.image_paths
    else:
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.add_special_tokens is not None:
        add_special_tokens = body.add_special_tokens
    engine = call.server.engine
    tokens = await prompt_tokens(call, prompt, field=field, image_paths=paths, add_special_tokens=add_special_tokens)
    texts: list[str] | None = None
    if body.return_token_strs:
        # The tokenizer makes one call for each token.
        texts = await call_in_thread(lambda: engine.model_tokenizer.convert_ids_to_tokens(tokens))
    response = TokenizeResponse(len(tokens), engine.model_config.max_model_len, tokens, texts)
    return json_response(response)


async def detokenize(call: Call, body: DetokenizeBody) -> Response:
    """Return the text of token ids."""
    check_model(call.server, body.model)
    try:
        text = await call.server.engine.detokenize(body.tokens)
    except ValueError as error:
        raise as_refusal(error) from error
    return json_response(DetokenizeResponse(text))


async def tokenizer_info(request: Request) -> Response:
    """Return what clients need that tokenize by this server: special tokens, the chat template, the vocabulary."""
    server: ServerState = request.app.state.server
    try:
        tokenizer = await call_in_thread(server.engine.get_tokenizer)  # which may load it
    except ValueError as error:
        raise as_refusal(error) from error
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    info = {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "model_max_length": server.engine.model_config.max_model_len,
        "chat_template": server.engine.chat_template.source or None,
        **special,
    }
    return json_response(info)


ROUTES = [
    Route("/tokenizer_info", tokenizer_info),
    post("/tokenize", tokenize, TokenizeBody, TokenizeResponse),
    post("/detokenize", detokenize, DetokenizeBody, DetokenizeResponse),
]
