"""The endpoint /v1/completions: the completions of one or several prompts."""

import functools
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from vllm_mp.client.async_llm import AsyncLLM
from vllm_mp.client.outputs.detokenizer import IncrementalDetokenizer
from vllm_mp.client.prompts.prompt import PromptType, TextPrompt, TokensPrompt
from vllm_mp.outputs import CompletionOutput, RequestOutput
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.server.http.admission import too_many_completions
from vllm_mp.server.http.body import Refused, refused
from vllm_mp.server.http.endpoint import Call, json_response, post
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.http.event_stream import TEXT_MARK, EventStream, TextEvent, encode_event
from vllm_mp.server.http.protocol import WriteNow
from vllm_mp.server.openai.generation import Generation, GenerationBody, StreamOptions, Usage, start_generation
from vllm_mp.server.openai.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    TextOffsets,
    completion_logprobs,
    convert,
    joined,
    prompt_logprobs,
)
from vllm_mp.server.openai.models import check_model
from vllm_mp.server.openai.output_form import ResponseFormat
from vllm_mp.server.openai.sampling_fields import sampling_params

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens`."""


class CompletionBody(GenerationBody, kw_only=True):
    """A request for completions."""

    prompt: str | list[str | int | list[int]] | None = None
    """Needed. Text, token ids, or a list of texts or lists of token ids."""
    max_completion_tokens: int | None = None
    """Another name of `max_tokens`."""
    echo: bool | None = None
    """Repeat the prompt before the completion. With `max_tokens` 0 there is only the prompt, without it nothing."""
    suffix: Refused = None
    prompt_embeds: Annotated[
        None, refused("would be a pickle, which can run code; give text or token ids, or use the Python client")
    ] = None
    response_format: ResponseFormat | None = None
    """The form of each completion; default: any text."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or with a stream its next part."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the completion."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The completions, or with a stream their next parts."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


async def create_completion(call: Call, body: CompletionBody) -> Response | EventStream:
    """Complete each prompt."""
    engine = call.server.engine
    model = check_model(call.server, body.model, generates=True)
    prompts = completion_prompts(call, body)
    params = completion_params(body, engine.model_config.default_sampling_params)
    generation = await start_generation(
        call, "cmpl", prompts, params, body, field="prompt", add_special_tokens=True, lora=model.lora
    )
    # The engine has the prompts now. The completions may take long, and their stream keeps the body.
    body.prompt = ""
    del prompts
    head = CompletionResponse(id=generation.request_id, created=int(time.time()), model=model.name, choices=[])
    choices = _Choices(engine, body, params)
    if body.stream:
        return EventStream(_events(generation, head, choices, body.stream_options or StreamOptions(), call.write_now))
    for index, result in enumerate(await generation.results()):
        head.choices += [await choices.next(index, result, completion) for completion in result.outputs]
    head.usage = generation.usage()
    return json_response(head)


def completion_prompts(call: Call, body: CompletionBody) -> list[PromptType]:
    """Return the prompts. Raises ApiError if there is none or more than may be live, or if the list mixes kinds."""
    limit, salt = call.server.admission.max_live, call.tenant.cache_salt(body.cache_salt)
    given = body.prompt
    if given is None:
        raise ApiError(400, "the field prompt is missing; add it", param="prompt")
    kinds = set() if isinstance(given, str) else set(map(type, given))
    prompts: list[Any]
    if isinstance(given, str):
        prompts = [given]
    elif not given:
        raise ApiError(400, "prompt is empty; give at least one token or text", param="prompt")
    elif kinds == {int}:
        prompts = [given]
    elif int not in kinds:
        # Checked before anything is made for each of them: a body can hold millions of empty prompts.
        if len(given) > limit:
            raise too_many_completions(len(given), limit)
        prompts = list(given)
    else:
        raise ApiError(400, "prompt mixes token ids with other prompts; put the ids into a list", param="prompt")
    return [
        TextPrompt(prompt=prompt, cache_salt=salt)
        if isinstance(prompt, str)
        else TokensPrompt(prompt_token_ids=prompt, cache_salt=salt)
        for prompt in prompts
    ]


def completion_params(body: CompletionBody, defaults: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters."""
    params = sampling_params(body, {"max_tokens": _DEFAULT_MAX_TOKENS, **defaults})
    if body.echo and params.prompt_logprobs is None:
        params.prompt_logprobs = params.logprobs
    return params


async def _events(
    generation: Generation,
    head: CompletionResponse,
    choices: "_Choices",
    options: StreamOptions,
    write_now: WriteNow,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream that `write_now` does not write."""
    head.usage = None if options.include_usage else UNSET
    only_text = choices.is_only_text and not options.continuous_usage_stats
    text_events: dict[int, TextEvent] = {}

    def pass_on(prompt_index: int, output: RequestOutput) -> bool:
        if len(output.outputs) != 1:
            return False
        completion = output.outputs[0]
        text_event = text_events.get(choices.index(prompt_index, completion))
        if text_event is None or completion.finish_reason is not None:
            return False
        return not completion.text or write_now(text_event.encode(completion.text))

    async for prompt_index, output in generation.outputs(pass_on):
        events = []
        for completion in output.outputs:
            if only_text and completion.finish_reason is None:
                if not completion.text:
                    continue
                index = choices.index(prompt_index, completion)
                text_event = text_events.get(index)
                if text_event is None:
                    head.choices = [CompletionChoice(index=index, text=TEXT_MARK)]
                    text_event = text_events[index] = TextEvent(head)
                events.append(text_event.encode(completion.text))
                continue
            head.choices = [await choices.next(prompt_index, output, completion)]
            if options.continuous_usage_stats:
                head.usage = generation.usage()
            events.append(encode_event(head))
        if events:
            yield b"".join(events)
    if options.include_usage:
        head.choices, head.usage = [], generation.usage()
        yield encode_event(head)


class _Choices:
    """Makes the choices of a response from the outputs of the engine."""

    def __init__(self, engine: AsyncLLM, body: CompletionBody, params: SamplingParams) -> None:
        self._engine = engine
        self._body = body
        self._params = params
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._begun: set[int] = set()
        """Indices of the choices that have at least one part."""
        self._offsets: dict[int, TextOffsets] = {}
        """By index of the choice: where its next token begins."""
        self._prompt_logprobs: dict[int, Any] = {}
        """By index of the prompt; a stream contains them in its first output."""

    @property
    def is_only_text(self) -> bool:
        """Whether all parts of a choice but the last hold nothing but its text."""
        body = self._body
        return not (body.echo or body.return_token_ids) and (self._params.logprobs, self._params.prompt_logprobs) == (
            None,
            None,
        )

    def index(self, prompt_index: int, completion: CompletionOutput) -> int:
        """Return the index of the choice of a completion."""
        return prompt_index * self._params.n + completion.index

    async def next(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> CompletionChoice:
        """Return the choice of `completion`, or with a stream its next part."""
        index = self.index(prompt_index, completion)
        choice = CompletionChoice(
            index=index, text="", finish_reason=completion.finish_reason, stop_reason=completion.stop_reason
        )
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        of_prompt: CompletionLogprobs | None = None
        if index not in self._begun:
            self._begun.add(index)
            known = self._prompt_logprobs.get(prompt_index)
            if self._body.return_token_ids:
                choice.prompt_token_ids = output.prompt_token_ids
            if known is not None and getattr(self._body, "prompt_logprobs", None) is not None:
                choice.prompt_logprobs = await convert(functools.partial(prompt_logprobs, known), known)
            if self._body.echo:
                choice.text = await self._prompt_text(output)
                if self._params.logprobs is not None and known is not None:
                    of_prompt = await self._prompt_logprobs_of(output, known)
            self._offsets[index] = TextOffsets(self._detokenizer(output.prompt_token_ids), len(choice.text))
        if self._body.return_token_ids:
            choice.token_ids = completion.token_ids
        choice.text += completion.text
        if self._params.logprobs is not None:
            positions = completion.logprobs or []
            make = functools.partial(completion_logprobs, positions, self._offsets[index], as_ids=self._as_ids)
            choice.logprobs = await convert(make, positions)
            if of_prompt is not None:
                choice.logprobs = joined(of_prompt, choice.logprobs)
        return choice

    async def _prompt_logprobs_of(self, output: RequestOutput, positions: list[Any]) -> CompletionLogprobs:
        """Return the log-probabilities of the tokens of a prompt that is repeated."""
        [first_id] = output.prompt_token_ids[:1]
        # The prompt's own text has no special tokens.
        offsets = TextOffsets(self._detokenizer((), skips_special=self._repeats_text(output)))
        first_text = await self._text([first_id])
        make = functools.partial(completion_logprobs, positions, offsets, first_id, first_text, as_ids=self._as_ids)
        return await convert(make, positions)

    def _detokenizer(self, context: Sequence[int], skips_special: bool = False) -> IncrementalDetokenizer | None:
        """Return what finds the texts of tokens that follow `context`; None unless log-probabilities are wanted."""
        params, tokenizer = self._params, self._engine.model_tokenizer
        if params.logprobs is None or not params.detokenize or tokenizer is None:
            return None
        return IncrementalDetokenizer(
            tokenizer,
            context,
            skip_special_tokens=params.skip_special_tokens or skips_special,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )

    def _repeats_text(self, output: RequestOutput) -> bool:
        """Return whether the text of the prompt is repeated as it was given."""
        return output.prompt is not None and self._params.truncate_prompt_tokens is None

    async def _prompt_text(self, output: RequestOutput) -> str:
        """Return the text of the prompt as the model saw it. Raises ApiError if there is none."""
        if self._repeats_text(output):
            return output.prompt or ""
        return await self._text(output.prompt_token_ids, skip_special_tokens=self._params.skip_special_tokens)

    async def _text(self, token_ids: list[int], **options: bool) -> str:
        """Return the text of a part of the prompt. Raises ApiError if the tokenizer has none for it."""
        try:
            return await self._engine.detokenize(token_ids, **options)
        except ValueError as error:
            raise ApiError(400, f"echo cannot repeat the prompt as text: {error}", param="echo") from error


ROUTES = [post("/v1/completions", create_completion, CompletionBody, CompletionResponse)]
