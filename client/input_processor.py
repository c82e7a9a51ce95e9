"""What a caller asks for, turned into what goes to the core."""

import asyncio
import secrets
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_mp.admission import check_request
from vllm_mp.client.answer import Answer, TokenText
from vllm_mp.client.detokenizer import IncrementalDetokenizer, token_texts
from vllm_mp.client.microbatch_tokenizer import AsyncMicrobatchTokenizer
from vllm_mp.client.prompt import PromptType, parse_prompt
from vllm_mp.client.request_stream import RequestStream
from vllm_mp.config import VllmConfig
from vllm_mp.sampling_params import SEED_LIMIT, SamplingParams


class GenerationInput(NamedTuple):
    """A request that has been read and found good."""

    text: str | None
    token_ids: list[int]
    cache_salt: str
    params: SamplingParams
    bad_words: list[list[int]]

    @property
    def prompt(self) -> bytes:
        """The prompt as it goes over the wire."""
        return np.asarray(self.token_ids, "<i4").tobytes()


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
        tokenization_kwargs: dict[str, Any],
    ) -> GenerationInput:
        """Read a request for text. Raises what `AsyncLLM.generate` raises for one that cannot run."""
        model = self._config.model_config
        params = SamplingParams(**model.default_sampling_params) if params is None else params.clone()
        text, token_ids, cache_salt = parse_prompt(prompt, prompt_token_ids)
        if token_ids is None:
            assert text is not None
            token_ids = await self._tokenize(text, tokenization_kwargs)
        keep = params.truncate_prompt_tokens
        if keep is not None:
            keep = keep if keep > 0 else max(1, model.max_model_len - (params.max_tokens or 1))
            token_ids = token_ids[-keep:]
        bad_words = await self._bad_words(params.bad_words or [])
        if params.stop and self._tokenizer is None:
            raise ValueError("stop needs a tokenizer: give stop_token_ids, or leave skip_tokenizer_init off")
        prompt_ids: npt.NDArray[np.int32] = np.asarray(token_ids, np.int32)
        check_request(request_id, prompt_ids, np.zeros(0, np.int32), params, bad_words, self._config)
        if params.seed is None:
            # Drawn here, so that another core could go on with the request.
            params.seed = secrets.randbits(63)
        return GenerationInput(text, token_ids, cache_salt, params, bad_words)

    def stream(self, request_id: str, given: GenerationInput, arrival_time: float) -> RequestStream:
        """The stream of a request that has been read."""
        params = given.params
        answers = [self._answer(i, params, given.token_ids) for i in range(params.n)]
        return RequestStream(
            request_id,
            given.text,
            given.token_ids,
            answers,
            arrival_time,
            self._config.scheduler_config.stream_interval,
            self._token_text(params),
        )

    def _answer(self, index: int, params: SamplingParams, prompt: list[int]) -> Answer:
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
        return Answer(index, own, detokenizer, self._token_text(params))

    def _token_text(self, params: SamplingParams) -> TokenText | None:
        """What gives log-probabilities their text, where a request has both."""
        wanted = params.logprobs is not None or params.prompt_logprobs is not None
        if not wanted or not params.detokenize or self._tokenizer is None:
            return None
        if self._texts is None:
            self._texts = token_texts(self._tokenizer)
        return self._texts

    async def _tokenize(self, text: str, options: dict[str, Any]) -> list[int]:
        if self._microbatch is None:
            raise ValueError("a text prompt needs a tokenizer: give token ids, or leave skip_tokenizer_init off")
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
