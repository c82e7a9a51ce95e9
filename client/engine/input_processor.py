"""The input of a client: a caller's request is tokenized, completed with defaults, and validated."""

import asyncio
import copy
import random
import secrets
from typing import Any, Final

import msgspec
import numpy as np

from vllm_mp import wire
from vllm_mp.client.engine.prompt_images import PromptImages
from vllm_mp.client.engine.tokenization_options import tokenization_options
from vllm_mp.client.images.placement import cut
from vllm_mp.client.outputs.completion import Completion
from vllm_mp.client.outputs.detokenizer import IncrementalDetokenizer, token_texts
from vllm_mp.client.outputs.logprob_columns import TokenText
from vllm_mp.client.outputs.pooling_stream import PoolingStream
from vllm_mp.client.outputs.stream import GenerationStream
from vllm_mp.client.prompts.embeddings import pack_prompt_embeds
from vllm_mp.client.prompts.prompt import TooManyTokensError, parse_prompt
from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer
from vllm_mp.client.prompts.request import CallerRequest, GenerationRequest, PoolingRequest
from vllm_mp.config import VllmConfig
from vllm_mp.requests.images import PlacedImage, ProcessedImage
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.prompt_embeds import PromptEmbeds
from vllm_mp.requests.sampling_params import EXTRA_ARGS, SEED_LIMIT, SamplingParams
from vllm_mp.requests.structured_outputs import Constraint
from vllm_mp.validation.request_validation import (
    generation_prompt_too_long,
    pooling_prompt_too_long,
    validate_generation,
    validate_pooling,
)


def check_priority(priority: Any, config: VllmConfig) -> None:
    """Raise ValueError, naming the value, unless requests to an engine of this configuration may have the priority."""
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise ValueError(f"priority must be a 32-bit integer, got {priority!r}")
    if priority and config.scheduler_config.policy != "priority":
        raise ValueError(
            f"priority={priority} needs an engine with scheduling_policy='priority'; leave it 0, or start the "
            "engine with that policy"
        )


def check_sampling_params(params: Any) -> None:
    """Raise TypeError, with the remedy, unless `params` are SamplingParams or None."""
    if params is None or isinstance(params, SamplingParams):
        return
    remedy = "pass SamplingParams(temperature=..., max_tokens=...)"
    if isinstance(params, PoolingParams):
        remedy = "call encode() for a vector"
    elif isinstance(params, dict):
        remedy = "pass SamplingParams(**the_dict)"
    raise TypeError(f"sampling_params must be SamplingParams, got {type(params).__name__}; {remedy}")


class InputProcessor:
    """Turns a caller's request into a stream that holds its record; the event loop never waits for the tokenizer."""

    def __init__(
        self, config: VllmConfig, prompt_tokenizer: PromptTokenizer | None, images: PromptImages | None = None
    ) -> None:
        """`prompt_tokenizer` is None with skip_tokenizer_init; `images` are those of the engine's prompts."""
        self._config = config
        self._images = PromptImages(config, prompt_tokenizer, dict) if images is None else images
        self._tokenizer = None if prompt_tokenizer is None else prompt_tokenizer.tokenizer
        self._prompt_tokenizer = prompt_tokenizer
        self._token_texts: TokenText | None = None
        engine_seed = config.model_config.seed
        self._drawn_seeds = random.SystemRandom() if engine_seed is None else random.Random(engine_seed)
        """Draws the seeds of requests that have none, in the order in which they arrive."""

    async def generation(self, given: CallerRequest, params: SamplingParams | None) -> GenerationStream:
        """Return the stream of a request for text.

        Raises what `AsyncLLM.generate` raises for a request that cannot run.
        """
        defaults = self._config.model_config.default_sampling_params
        options = tokenization_options(given.tokenization_kwargs)
        params = options.truncated(SamplingParams(**defaults) if params is None else params.clone())
        seed_is_drawn = params.seed is None
        if params.seed is None:
            # The client draws it, so that another core can continue the request. It does so before it awaits anything,
            # so that the draws of an engine with a seed do not depend on how long a tokenizer takes.
            params.seed = self._drawn_seeds.getrandbits(63)
        limit = self._truncation_limit(params)
        max_tokens = self._config.model_config.max_model_len - 1 if limit is None else None
        packed_embeds: PromptEmbeds | None = None
        placed: list[PlacedImage] = []
        images: list[ProcessedImage] = []
        try:
            parsed = parse_prompt(given.prompt, given.prompt_token_ids, max_tokens)
            text, token_ids, cache_salt, embeds = parsed[:4]
            if parsed.images:
                with_images = await self._images.prompt(
                    parsed.images,
                    dict(parsed.mm_processor_kwargs),
                    text,
                    token_ids,
                    options.of_tokenizer,
                    max_tokens,
                    cache_salt,
                    given.tenant,
                )
                token_ids = with_images.token_ids
                placed, images = with_images.placed, with_images.images
            elif embeds is not None:
                model = self._config.model_config
                packed_embeds = await pack_prompt_embeds(embeds, limit, max_tokens, params, model)
                token_ids = [0] * packed_embeds.num_tokens
            elif token_ids is None:
                token_ids = await self._tokenize(text, options.of_tokenizer, max_tokens)
        except TooManyTokensError as error:
            raise generation_prompt_too_long(error.size, self._config.model_config) from None
        if embeds is None and not placed:
            self._images.check_without_images(token_ids)
        if limit is not None and options.truncation_side == "right":
            if parsed.images or embeds is not None:
                raise ValueError("truncation_side must be 'left' for a prompt with images or embeddings, got 'right'")
            token_ids = token_ids[:limit]
        elif limit is not None:
            placed = cut(placed, max(0, len(token_ids) - limit))
            token_ids = token_ids[-limit:]
        bad_words = await self._spell_bad_words(params.bad_words or [])
        if params.stop and self._tokenizer is None:
            raise ValueError("stop needs a tokenizer: give stop_token_ids, or leave skip_tokenizer_init off")
        ids = np.asarray(token_ids, wire.TOKEN_IDS)
        validate_generation(given.request_id, ids, ids[:0], params, bad_words, self._config)
        request = GenerationRequest(
            request_id=given.request_id,
            prompt=given.text_to_repeat(text),
            prompt_token_ids=token_ids,
            packed_prompt=ids.tobytes() if packed_embeds is None else b"",
            params=params,
            arrival_time=given.arrival_time,
            priority=given.priority,
            cache_salt=cache_salt,
            lora=given.lora,
            tenant=given.tenant,
            # No other request can guess this name.
            group=secrets.token_hex(16) if params.n > 1 else "",
            bad_words=bad_words,
            seed_is_drawn=seed_is_drawn,
            prompt_embeds=packed_embeds,
            extra_args=EXTRA_ARGS.packed("extra_args", params.extra_args) if params.extra_args else b"",
            constraint=self._constraint(params),
            placed_images=placed,
            images={image.digest: image for image in images},
        )
        completions = [self._completion(index, params.seed, request) for index in range(params.n)]
        interval = self._config.scheduler_config.stream_interval
        return GenerationStream(request, completions, interval, self._token_text(params))

    async def prompt_tokens(self, prompt: Any, tokenization_kwargs: dict[str, Any], tenant: int) -> list[int]:
        """Return the token ids of `prompt` as a request has them, with those of its images, however many they are.

        Raises what `generation` raises for the prompt, ValueError for embeddings too.
        """
        parsed = parse_prompt(prompt)
        if parsed.embeds is not None:
            raise ValueError("prompt_embeds have no token ids: give a text or token ids")
        if parsed.images:
            options = dict(parsed.mm_processor_kwargs)
            with_images = await self._images.prompt(
                parsed.images,
                options,
                parsed.text,
                parsed.token_ids,
                tokenization_kwargs,
                None,
                parsed.cache_salt,
                tenant,
            )
            return with_images.token_ids
        if parsed.token_ids is not None:
            return parsed.token_ids
        return await self._tokenize(parsed.text, tokenization_kwargs)

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        """Return what the output must match, with the engine's defaults for what the request leaves open."""
        if params.structured_outputs is None:
            return None
        constraint: Constraint = params.structured_outputs.constraint()
        config = self._config.decoding_config
        if constraint.any_whitespace and not constraint.whitespace_pattern:
            constraint = msgspec.structs.replace(
                constraint,
                any_whitespace=not config.disable_any_whitespace,
                whitespace_pattern="" if config.disable_any_whitespace else config.whitespace_pattern,
            )
        if config.disable_additional_properties and constraint.additional_properties:
            constraint = msgspec.structs.replace(constraint, additional_properties=False)
        return constraint

    async def pooling(self, given: CallerRequest, params: PoolingParams) -> PoolingStream:
        """Return the stream of a request for the vector that `params` describe.

        Raises what `AsyncLLM.encode` raises for a request that cannot run.
        """
        options = tokenization_options(given.tokenization_kwargs)
        params = options.truncated(msgspec.structs.replace(params))
        limit = params.truncate_prompt_tokens
        if limit == -1:
            limit = self._config.model_config.max_model_len
        max_tokens = self._config.model_config.max_model_len if limit is None else None
        try:
            parsed = parse_prompt(given.prompt, given.prompt_token_ids, max_tokens)
            text, token_ids, cache_salt, embeds = parsed[:4]
            if parsed.images:
                raise ValueError("vectors are made of text: leave multi_modal_data out, or call generate()")
            if embeds is not None:
                raise ValueError("prompt_embeds makes text, not vectors: call generate(), or give text or token ids")
            keeps_end = limit is not None and options.truncation_side == "left"
            if token_ids is None and (limit is None or keeps_end):
                token_ids = await self._tokenize(text, options.of_tokenizer, max_tokens)
            elif token_ids is None:
                # The tokenizer truncates, because it knows which tokens must stand at the ends.
                truncating = {**options.of_tokenizer, "truncation": True, "max_length": limit}
                token_ids = await self._tokenize(text, truncating)
            elif not keeps_end:
                token_ids = token_ids[:limit]
            if limit is not None and keeps_end:
                token_ids = token_ids[-limit:]
        except TooManyTokensError as error:
            raise pooling_prompt_too_long(error.size, self._config.model_config) from None
        if limit is not None and len(token_ids) > limit:
            raise ValueError(
                f"truncate_prompt_tokens must leave room for the tokens that the tokenizer adds, got {limit}"
            )
        ids = np.asarray(token_ids, wire.TOKEN_IDS)
        validate_pooling(given.request_id, ids, params, self._config)
        return PoolingStream(
            PoolingRequest(
                request_id=given.request_id,
                prompt=given.text_to_repeat(text),
                prompt_token_ids=token_ids,
                packed_prompt=ids.tobytes(),
                params=params,
                arrival_time=given.arrival_time,
                priority=given.priority,
                cache_salt=cache_salt,
                lora=given.lora,
                tenant=given.tenant,
            )
        )

    def check(self, params: Any, priority: Any) -> None:
        """Raise TypeError or ValueError if a request with these arguments cannot run on any engine of this kind."""
        if params is not None and not isinstance(params, SamplingParams | PoolingParams):
            raise TypeError(f"params must be SamplingParams or PoolingParams, got {type(params).__name__}")
        check_priority(priority, self._config)

    def _truncation_limit(self, params: SamplingParams) -> int | None:
        """Return how many of the prompt's last tokens to keep; None means all."""
        limit = params.truncate_prompt_tokens
        if limit != -1:
            return limit
        # If max_tokens alone fills the context, leave room for one token only.
        max_model_len, room = self._config.model_config.max_model_len, params.max_tokens or 1
        return max_model_len - (room if room < max_model_len else 1)

    def _completion(self, index: int, seed: int, request: GenerationRequest) -> Completion:
        params = copy.copy(request.params)  # which is not validated a second time
        params.n, params.best_of, params.extra_args = 1, None, None
        params.structured_outputs = params.guided_decoding = None
        params.seed = (seed + index + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT
        if index:
            params.prompt_logprobs = None  # the first completion brings them for all
        detokenizer = None
        if params.detokenize and self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                request.prompt_token_ids if request.prompt_embeds is None else (),
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        return Completion(index, params, detokenizer, self._token_text(params))

    def _token_text(self, params: SamplingParams) -> TokenText | None:
        """Return the function that gives log-probabilities their text; None if the request has no use for it."""
        wanted = params.logprobs is not None or params.prompt_logprobs is not None
        if not wanted or not params.detokenize or self._tokenizer is None:
            return None
        if self._token_texts is None:
            self._token_texts = token_texts(self._tokenizer)
        return self._token_texts

    async def _tokenize(self, text: str | None, options: dict[str, Any], max_tokens: int | None = None) -> list[int]:
        if self._prompt_tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer: give token ids, or leave skip_tokenizer_init off")
        assert text is not None
        return await self._prompt_tokenizer.ids(text, options, max_tokens)

    async def _spell_bad_words(self, words: list[str]) -> list[list[int]]:
        """Return the token ids of each spelling of each word, without duplicates; see `_spellings`."""
        if not words:
            return []
        if self._prompt_tokenizer is None:
            raise ValueError("bad_words needs a tokenizer: leave skip_tokenizer_init off")
        try:
            ids = await asyncio.gather(
                *[self._ids_after(before, text) for word in words for before, text in _spellings(word)]
            )
        except TooManyTokensError as error:
            raise ValueError(
                f"bad_words must be of at most {wire.MAX_BAD_WORD_TOKENS} tokens each, got {error.size}; shorten them"
            ) from None
        distinct = {tuple(spelling): None for spelling in ids if spelling}
        return [list(spelling) for spelling in distinct]

    async def _ids_after(self, before: str, text: str) -> list[int]:
        """Return the token ids of `text` behind `before`; none if a token spans both."""
        options, limit = {"add_special_tokens": False}, wire.MAX_BAD_WORD_TOKENS
        whole = await self._tokenize(before + text, options, limit)
        if not before:
            return whole
        first = await self._tokenize(before, options, limit)
        return whole[len(first) :] if whole[: len(first)] == first else []


_BEFORE: Final = "a"
"""A text before white space. Some tokenizers spell white space at the beginning of a text with a token more."""


def _spellings(word: str) -> list[tuple[str, str]]:
    """Return (text before, word) of both spellings of a bad word: at the beginning of a text, and after a space.

    White space other than one leading space is part of the word; such a word is spelled as it is, also after a text.
    """
    bare = word.removeprefix(" ")
    if bare and not bare[0].isspace():
        return [("", bare), ("", f" {bare}")]
    return [("", word), (_BEFORE, word)]
