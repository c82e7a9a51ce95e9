"""What a caller asks for, turned into what goes to the core."""

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vllm_mp import wire
from vllm_mp.client.microbatch_tokenizer import AsyncMicrobatchTokenizer
from vllm_mp.client.outputs.completion import Completion, TokenText
from vllm_mp.client.outputs.detokenizer import IncrementalDetokenizer, token_texts
from vllm_mp.client.outputs.pooling_stream import PoolingStream
from vllm_mp.client.outputs.stream import RequestStream
from vllm_mp.client.prompt import PromptType, parse_prompt
from vllm_mp.config import VllmConfig
from vllm_mp.pooling_params import PoolingParams
from vllm_mp.request_validation import validate_generation, validate_pooling
from vllm_mp.sampling_params import SEED_LIMIT, SamplingParams

_UNSENT = -1


class Prepared(NamedTuple):
    """A request that has been read and found good; the messages, one an answer, lack slot and incarnation."""

    stream: RequestStream
    messages: Sequence[wire.AddRequest | wire.AddPooling]


class InputProcessor:
    """Tokenizes, fills in what the caller left open, and checks; the event loop never waits for the tokenizer."""

    def __init__(self, config: VllmConfig, tokenizer: Any, microbatch: AsyncMicrobatchTokenizer | None) -> None:
        """Both tokenizers are None where there is none."""
        self._config = config
        self._tokenizer = tokenizer
        self._microbatch = microbatch
        self._texts: TokenText | None = None

    async def generation(
        self,
        request_id: str,
        prompt: PromptType | None,
        prompt_token_ids: list[int] | None,
        params: SamplingParams | None,
        priority: int,
        arrival_time: float,
        tokenization_kwargs: dict[str, Any],
    ) -> Prepared:
        """Read a request for text. Raises what `AsyncLLM.generate` raises for one that cannot run."""
        model = self._config.model_config
        params = SamplingParams(**model.default_sampling_params) if params is None else params.clone()
        text, token_ids, cache_salt = parse_prompt(prompt, prompt_token_ids)
        if token_ids is None:
            token_ids = await self._tokenize(text, tokenization_kwargs)
        keep = params.truncate_prompt_tokens
        if keep is not None:
            if keep == -1:
                # Room for an answer that would fill the context by itself cannot be left.
                room = params.max_tokens or 1
                keep = model.max_model_len - (room if room < model.max_model_len else 1)
            token_ids = token_ids[-keep:]
        bad_words = await self._bad_words(params.bad_words or [])
        if params.stop and self._tokenizer is None:
            raise ValueError("stop needs a tokenizer: give stop_token_ids, or leave skip_tokenizer_init off")
        ids = np.asarray(token_ids, np.int32)
        validate_generation(request_id, ids, np.zeros(0, np.int32), params, bad_words, self._config)
        if params.seed is None:
            # Drawn here, so that another core could go on with the request.
            params.seed = secrets.randbits(63)
        answers = [self._answer(i, params, token_ids) for i in range(params.n)]
        # Nobody else's request has this group.
        group = secrets.token_hex(16) if len(answers) > 1 else ""
        interval = self._config.scheduler_config.stream_interval
        texts = self._token_text(params)
        stream = RequestStream(request_id, text, token_ids, answers, arrival_time, interval, texts)
        packed = wire.pack_ids(token_ids)
        messages = [
            wire.AddRequest(
                _UNSENT,
                _UNSENT,
                request_id,
                packed,
                answer.params,
                priority,
                cache_salt=cache_salt,
                group=group,
                bad_words=bad_words,
            )
            for answer in answers
        ]
        return Prepared(stream, messages)

    async def pooling(
        self,
        request_id: str,
        prompt: PromptType | None,
        prompt_token_ids: list[int] | None,
        params: PoolingParams,
        priority: int,
        arrival_time: float,
        tokenization_kwargs: dict[str, Any],
    ) -> Prepared:
        """Read a request for a vector. Raises what `AsyncLLM.encode` raises for one that cannot run."""
        params = msgspec.structs.replace(params)
        text, token_ids, cache_salt = parse_prompt(prompt, prompt_token_ids)
        limit = params.truncate_prompt_tokens
        if limit == -1:
            limit = self._config.model_config.max_model_len
        if token_ids is not None:
            token_ids = token_ids[:limit]
        elif limit is None:
            token_ids = await self._tokenize(text, tokenization_kwargs)
        else:
            # By the tokenizer, which knows what tokens must stand at the ends.
            token_ids = await self._tokenize(text, {**tokenization_kwargs, "truncation": True, "max_length": limit})
            if len(token_ids) > limit:
                raise ValueError(
                    f"truncate_prompt_tokens must leave room for the tokens that the tokenizer adds, got {limit}"
                )
        validate_pooling(request_id, np.asarray(token_ids, np.int32), params, self._config)
        stream = PoolingStream(request_id, text, token_ids, params, arrival_time)
        packed = wire.pack_ids(token_ids)
        message = wire.AddPooling(_UNSENT, _UNSENT, request_id, packed, params, priority, cache_salt)
        return Prepared(stream, [message])

    def _answer(self, index: int, params: SamplingParams, prompt: list[int]) -> Completion:
        assert params.seed is not None
        own = params.clone()
        own.n, own.best_of = 1, None
        own.seed = (params.seed + index + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT
        if index:
            own.prompt_logprobs = None  # they are the same for all answers
        detokenizer = None
        if params.detokenize and self._tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                prompt,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        return Completion(index, own, detokenizer, self._token_text(params))

    def _token_text(self, params: SamplingParams) -> TokenText | None:
        """What gives log-probabilities their text, where a request has both."""
        wanted = params.logprobs is not None or params.prompt_logprobs is not None
        if not wanted or not params.detokenize or self._tokenizer is None:
            return None
        if self._texts is None:
            self._texts = token_texts(self._tokenizer)
        return self._texts

    async def _tokenize(self, text: str | None, options: dict[str, Any]) -> list[int]:
        if self._microbatch is None:
            raise ValueError("a text prompt needs a tokenizer: give token ids, or leave skip_tokenizer_init off")
        assert text is not None
        encoding = await self._microbatch(text, **options)
        token_ids = parse_prompt(encoding.input_ids).token_ids
        assert token_ids is not None
        return token_ids

    async def _bad_words(self, words: list[str]) -> list[list[int]]:
        """The token ids of each word, as it is written at the beginning of a text and behind a space."""
        if not words:
            return []
        if self._microbatch is None:
            raise ValueError("bad_words needs a tokenizer: leave skip_tokenizer_init off")
        spellings = [space + word.lstrip() for word in words for space in ("", " ")]
        ids = await asyncio.gather(*[self._tokenize(one, {"add_special_tokens": False}) for one in spellings])
        different = {tuple(one): None for one in ids if one}
        return [list(one) for one in different]
