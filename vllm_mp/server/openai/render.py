"""The endpoints that show what the engine would read: requests with token ids, as /inference/v1/generate takes them."""

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response

from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.server.http.endpoint import Call, json_response, post
from vllm_mp.server.http.errors import as_refusal
from vllm_mp.server.openai.chat import ChatBody, chat_request
from vllm_mp.server.openai.chat_prompt import prompt_tokens
from vllm_mp.server.openai.completions import CompletionBody, completion_params, completion_prompts
from vllm_mp.server.openai.generation import GenerationBody
from vllm_mp.server.openai.models import check_model
from vllm_mp.server.openai.sampling_fields import SamplingFields


class RenderedRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request as token ids."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    """Those that have a value."""
    model: str
    stream: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None


async def render_chat(call: Call, body: ChatBody) -> Response:
    """Return a conversation as the tokens that the model reads, without an answer."""
    request = await chat_request(call, body)
    tokens = await prompt_tokens(
        call,
        request.prompt,
        field="messages",
        image_paths=request.image_paths,
        add_special_tokens=bool(body.add_special_tokens),
    )
    rendered = _rendered(f"chatcmpl-{call.request_id}", request.model.name, tokens, request.params, body)
    return json_response(rendered)


async def render_completion(call: Call, body: CompletionBody) -> Response:
    """Return a request for each prompt, with the tokens that the model reads, without an answer."""
    model = check_model(call.server, body.model, generates=True)
    params = completion_params(body, call.server.engine.model_config.default_sampling_params)
    rendered = []
    for index, prompt in enumerate(completion_prompts(call, body)):
        given: Any = prompt
        tokens = given.get("prompt_token_ids")
        if tokens is None:
            tokens = await _tokens(call, given["prompt"], body.add_special_tokens is not False)
        rendered.append(_rendered(f"cmpl-{call.request_id}-{index}", model.name, tokens, params, body))
        await asyncio.sleep(0)
    return json_response(rendered)


async def _tokens(call: Call, text: str, add_special_tokens: bool) -> list[int]:
    try:
        return await call.server.engine.tokenize(text, add_special_tokens=add_special_tokens)
    except ValueError as error:
        raise as_refusal(error) from error


def _rendered(
    request_id: str, model: str, tokens: list[int], params: SamplingParams, body: GenerationBody
) -> RenderedRequest:
    fields = msgspec.to_builtins(params)
    known = SamplingFields.__struct_fields__
    return RenderedRequest(
        request_id=request_id,
        token_ids=tokens,
        sampling_params={name: value for name, value in fields.items() if name in known and value is not None},
        model=model,
        stream=body.stream,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )


ROUTES = [
    post("/v1/chat/completions/render", render_chat, ChatBody, RenderedRequest),
    post("/v1/completions/render", render_completion, CompletionBody, RenderedRequest),
]
