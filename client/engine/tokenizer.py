"""The tokenizer of an engine: token ids of a text, and the text of token ids, beside the event loop."""

import functools
from collections.abc import Callable
from typing import Any

from vllm_mp.client.engine.adapters import checked_adapter
from vllm_mp.client.engine.input_preprocessor import InputPreprocessor
from vllm_mp.client.engine.lifecycle import EngineLifecycle
from vllm_mp.client.outputs.detokenizer import token_bytes
from vllm_mp.client.prompts.chat_template import ChatTemplate
from vllm_mp.client.prompts.prompt import TooManyTokensError, parse_prompt
from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer


class EngineTokenizer(EngineLifecycle):
    """The part of `AsyncLLM` that turns text into token ids, and back, without a request."""

    def get_tokenizer(self, lora_request: Any = None) -> Any:
        """Return the Hugging Face tokenizer; `await` on the result gives the same object.

        Adapters use the model's tokenizer, so a `lora_request` changes nothing. Raises ValueError for one without LoRA,
        and if the engine has no tokenizer.
        """
        checked_adapter(lora_request, self.vllm_config)
        return self._tokenizes().tokenizer

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer; None with skip_tokenizer_init."""
        return None if self._prompt_tokenizer is None else self._prompt_tokenizer.tokenizer

    async def get_input_preprocessor(self) -> InputPreprocessor:
        """Return what turns a prompt into token ids as `generate` does."""
        self._check_process()
        return InputPreprocessor(self.vllm_config, self._prompt_tokenizer)

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, which is rendered beside the event loop."""
        return ChatTemplate(None if self._prompt_tokenizer is None else self._prompt_tokenizer.tokenizer)

    @functools.cached_property
    def token_bytes(self) -> Callable[[int], bytes] | None:
        """What returns the bytes of a single token, which may be a part of a character; None without a tokenizer."""
        return None if self.tokenizer is None else token_bytes(self.tokenizer)

    async def tokenize(self, text: str, **options: Any) -> list[int]:
        """Return the token ids of `text`, as the tokenizer called with `options` gives them.

        Raises ValueError for text that is not valid Unicode, and if the engine has no tokenizer.
        """
        prompt_tokenizer = self._tokenizes()
        parsed = parse_prompt(text).text
        assert parsed is not None
        return await prompt_tokenizer.ids(parsed, options)

    async def has_room(self, text: str, num_output_tokens: int, **options: Any) -> bool:
        """Return whether the context has room for `text`, tokenized with `options`, and for that many output tokens.

        A text that cannot fit, by its size, is not tokenized. Raises what `tokenize` raises.
        """
        prompt_tokenizer = self._tokenizes()
        parsed = parse_prompt(text).text
        assert parsed is not None
        try:
            await prompt_tokenizer.ids(parsed, options, self.model_config.max_model_len - num_output_tokens)
        except TooManyTokensError:
            return False
        return True

    async def detokenize(self, token_ids: list[int], **options: Any) -> str:
        """Return the text of `token_ids`, as the tokenizer's `decode` with `options` gives it.

        Raises ValueError for ids outside the vocabulary, and if the engine has no tokenizer.
        """
        prompt_tokenizer = self._tokenizes()
        vocab_size = len(prompt_tokenizer.tokenizer)
        for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"token ids must be in [0, {vocab_size}), the tokenizer's vocabulary, got {token_id}")
        return await prompt_tokenizer.decode(token_ids, options)

    def _tokenizes(self) -> PromptTokenizer:
        """Return the tokenizer. Raises ValueError if the engine has none, and RuntimeError in a forked child."""
        self._check_process()
        if self._prompt_tokenizer is None:
            raise ValueError("the engine has no tokenizer, because of skip_tokenizer_init=True; leave it False")
        return self._prompt_tokenizer
