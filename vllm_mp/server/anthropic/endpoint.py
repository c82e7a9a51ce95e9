"""The endpoints /v1/messages and /v1/messages/count_tokens."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Send

from vllm_mp.requests.structured_outputs import StructuredOutputsParams
from vllm_mp.server.anthropic.answer import MessageContent, MessageObject, Usage
from vllm_mp.server.anthropic.body import MessagesBody, TokensBody
from vllm_mp.server.anthropic.conversation import choice_of, continues_answer, conversation, functions
from vllm_mp.server.http.endpoint import Call, json_response, post
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.http.event_stream import EventStream
from vllm_mp.server.openai.answer_parts import read_answer_format
from vllm_mp.server.openai.chat_prompt import RenderedChat, chat_prompt, prompt_tokens
from vllm_mp.server.openai.generation import Generation, GenerationBody, start_generation
from vllm_mp.server.openai.models import check_model
from vllm_mp.server.openai.sampling_fields import sampling_params
from vllm_mp.server.openai.tools import ToolUse, read_tools

_COMMON_FIELDS = ("stream", "max_tokens", "temperature", "top_p", "top_k", "priority", "stop_sequences")
"""The fields that `_CommonBody` has too."""
_FORM = "output_config.format"


class _CommonBody(GenerationBody, kw_only=True):
    """The fields of a request that OpenAI's requests have too."""

    stop_sequences: list[str] | None = None
    """Another name of `stop`."""


class TokenCount(msgspec.Struct):
    """The number of tokens of a conversation."""

    input_tokens: int


async def create_message(call: Call, body: MessagesBody) -> Response | EventStream:
    """Answer a conversation."""
    model = check_model(call.server, body.model, generates=True)
    if body.thread is not None:
        raise ApiError(
            400,
            "thread is not served: this server stores no conversations; send all messages, without thread",
            param="thread",
            code="unsupported_field",
            anthropic_code="thread_unsupported_request",
        )
    common = _CommonBody(**{name: getattr(body, name) for name in _COMMON_FIELDS})
    params = sampling_params(common, call.server.engine.model_config.default_sampling_params)
    params.structured_outputs = _form(body)
    tools = _tools(call, body, params.structured_outputs)
    if tools is not None and tools.form is not None:
        params.structured_outputs = tools.form
    rendered = await _prompt(call, body, tools)
    template = call.server.engine.chat_template.source_for(has_tools=bool(body.tools))
    shows_thought = body.thinking is None or body.thinking.type != "disabled"
    answer_format = read_answer_format(
        call.server, params, template, rendered.text, tools, shows_thought, begun=rendered.begun
    )
    # The template has written the special tokens.
    generation = await start_generation(
        call,
        "msg",
        [rendered.prompt(call.tenant.cache_salt(body.cache_salt))],
        params,
        common,
        field="messages",
        add_special_tokens=False,
        lora=model.lora,
        form_field=_FORM,
        tools=tools,
        image_paths=rendered.image_paths,
    )
    # The engine has the prompt now. The answer may take long, and its endpoint keeps the body.
    body.messages = []
    del rendered
    message = MessageObject(id=f"msg_{call.request_id}", model=model.name, usage=Usage(0, 0, 0))
    content = MessageContent(message, answer_format)
    if body.stream:
        return _MessageStream(_events(generation, message, content), end=b"")
    [result] = await generation.results()
    [completion] = result.outputs
    content.add(completion.text)
    content.end(completion, Usage.of(generation.usage()))
    return json_response(message)


async def count_tokens(call: Call, body: TokensBody) -> Response:
    """Count the tokens of a conversation."""
    check_model(call.server, body.model, generates=True)
    rendered = await _prompt(call, body, _tools(call, body, _form(body)))
    tokens = await prompt_tokens(call, rendered.prompt(), field="messages", image_paths=rendered.image_paths)
    return json_response(TokenCount(len(tokens)))


class _MessageStream(EventStream):
    """A stream of events, which ends with an error event if it fails."""

    async def fail(self, error: ApiError, send: Send) -> None:
        event = b"event: error\ndata: %b\n\n" % error.anthropic_body()
        await send({"type": "http.response.body", "body": event})


def _form(body: TokensBody) -> StructuredOutputsParams | None:
    """Return the form that the answer must have. Raises ApiError if two fields demand one, or if it is none."""
    config = body.output_config and body.output_config.format
    if config is not None and body.output_format is not None:
        message = f"{_FORM} and output_format both demand a form of the answer; leave out one"
        raise ApiError(400, message, param="output_format")
    form = config or body.output_format
    if form is None:
        return None
    try:
        return StructuredOutputsParams(json=form.schema_)
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error), param=_FORM if config else "output_format") from None


def _tools(call: Call, body: TokensBody, form: StructuredOutputsParams | None) -> ToolUse | None:
    """Return how the answer uses the tools of a request."""
    return read_tools(
        functions(body),
        choice_of(body),
        is_parallel=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        form=form,
        chat_template=call.server.engine.chat_template.source_for(has_tools=bool(body.tools)),
        parser_name=call.server.options.tool_call_parser,
        tool_fallback=call.server.options.tool_fallback,
        path="tools[{}]",
        form_field=_FORM,
    )


async def _prompt(call: Call, body: TokensBody, tools: ToolUse | None) -> RenderedChat:
    """Return the conversation as a prompt."""
    variables: dict[str, Any] = {}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    messages, image_paths = conversation(body)
    return await chat_prompt(
        call,
        messages,
        continue_final_message=continues_answer(body),
        chat_template_kwargs={**variables, **(body.chat_template_kwargs or {})} or None,
        tools=None if tools is None else tools.definitions,
        image_paths=image_paths,
    )


async def _events(
    generation: Generation, message: MessageObject, content: MessageContent
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed answer; `content` makes those of `message`."""
    has_begun = False
    async for _, result in generation.outputs():
        [completion] = result.outputs
        events = b""
        if not has_begun:
            has_begun = True
            message.usage = Usage.of(generation.usage())
            events = content.begin()
        events += content.add(completion.text)
        if result.finished:
            events += content.end(completion, Usage.of(generation.usage()))
        if events:
            yield events


ROUTES = [
    post("/v1/messages", create_message, MessagesBody, MessageObject),
    post("/v1/messages/count_tokens", count_tokens, TokensBody, TokenCount),
]
