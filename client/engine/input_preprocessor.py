"""The first step of a request by itself: a prompt becomes token ids."""

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm_mp.arguments.unserved_arguments import check_unserved
from vllm_mp.client.engine.adapters import checked_adapter
from vllm_mp.client.engine.tokenization_options import tokenization_options
from vllm_mp.client.prompts.prompt import ParsedPrompt, PromptType, TokensPrompt, TooManyTokensError, parse_prompt
from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer
from vllm_mp.config import VllmConfig
from vllm_mp.validation.request_validation import pooling_prompt_too_long


class InputPreprocessor:
    """Turns a prompt into token ids as `AsyncLLM.generate` does; `generate` and `encode` take the result as prompt."""

    def __init__(self, config: VllmConfig, prompt_tokenizer: PromptTokenizer | None) -> None:
        """`prompt_tokenizer` is None with skip_tokenizer_init."""
        self._config = config
        self._prompt_tokenizer = prompt_tokenizer

    def preprocess(
        self,
        prompt: PromptType,
        tokenization_kwargs: dict[str, Any] | None = None,
        lora_request: Any = None,
        *,
        prompt_adapter_request: Any = None,
    ) -> TokensPrompt:
        """Return the token ids of `prompt`, with its text and `cache_salt` if it has them; the caller's thread works.

        `tokenization_kwargs` are as in `generate`, without `truncate_prompt_tokens`. Adapters use the model's
        tokenizer, so a `lora_request` changes nothing. Raises ValueError or TypeError for a prompt that no request can
        have and for a `lora_request` without LoRA, and NotImplementedError for parts of a prompt that are not served.
        """
        check_unserved(prompt_adapter_request=prompt_adapter_request)
        options = _options(tokenization_kwargs)
        with self._limit_errors():
            parsed = self._parse(prompt, lora_request)
            token_ids = parsed.token_ids
            if token_ids is None:
                token_ids = self._tokenizer().ids_now(parsed.text or "", options, self._max_tokens)
            return _tokens_prompt(parsed, token_ids)

    async def preprocess_async(
        self,
        prompt: PromptType,
        tokenization_kwargs: dict[str, Any] | None = None,
        lora_request: Any = None,
        *,
        prompt_adapter_request: Any = None,
    ) -> TokensPrompt:
        """Do what `preprocess` does, beside the event loop."""
        check_unserved(prompt_adapter_request=prompt_adapter_request)
        options = _options(tokenization_kwargs)
        with self._limit_errors():
            parsed = self._parse(prompt, lora_request)
            token_ids = parsed.token_ids
            if token_ids is None:
                token_ids = await self._tokenizer().ids(parsed.text or "", options, self._max_tokens)
            return _tokens_prompt(parsed, token_ids)

    @property
    def _max_tokens(self) -> int:
        return self._config.model_config.max_model_len

    def _parse(self, prompt: PromptType, lora_request: Any) -> ParsedPrompt:
        checked_adapter(lora_request, self._config)
        parsed = parse_prompt(prompt, None, self._max_tokens)
        if parsed.embeds is not None:
            raise ValueError("prompt_embeds have no token ids: give them to generate(), or a text here")
        if parsed.images:
            raise ValueError("images are placed among the token ids by generate(): give it the prompt as it is")
        return parsed

    def _tokenizer(self) -> PromptTokenizer:
        if self._prompt_tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer: give token ids, or leave skip_tokenizer_init off")
        return self._prompt_tokenizer

    @contextlib.contextmanager
    def _limit_errors(self) -> Iterator[None]:
        """Raise ValueError for a prompt with more tokens than the context."""
        try:
            yield
        except TooManyTokensError as error:
            raise pooling_prompt_too_long(error.size, self._config.model_config) from None


def _options(tokenization_kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of the tokenizer. Raises ValueError for a truncation, which depends on the parameters."""
    options = tokenization_options(tokenization_kwargs)
    if options.truncate_prompt_tokens is not None:
        raise ValueError(
            f"truncate_prompt_tokens={options.truncate_prompt_tokens!r:.100} is for generate() and encode(): give it "
            "there, or give truncation=True and max_length here"
        )
    return options.of_tokenizer


def _tokens_prompt(parsed: ParsedPrompt, token_ids: list[int]) -> TokensPrompt:
    prompt = TokensPrompt(type="token", prompt_token_ids=token_ids)
    if parsed.text is not None:
        prompt["prompt"] = parsed.text
    if parsed.cache_salt:
        prompt["cache_salt"] = parsed.cache_salt
    return prompt
