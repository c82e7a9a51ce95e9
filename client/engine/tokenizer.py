"""The tokenizer of an engine: token ids of a text, and the text of token ids, beside the event loop."""

from typing import Any

from vllm_mp.client.engine.engine import Engine
from vllm_mp.client.prompts.prompt import TooManyTokensError, parse_prompt
from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer


class EngineTokenizer:
    """Turns text into token ids, and back, without a request. Its calls are those of `AsyncLLM`, which documents them.

    All raise ValueError if the engine has no tokenizer, EngineDeadError if it was shut down, and RuntimeError in a
    forked child.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def required(self) -> PromptTokenizer:
        """Return the tokenizer."""
        self._engine.check_process()
        if self._engine.prompt_tokenizer is None:
            raise ValueError("the engine has no tokenizer, because of skip_tokenizer_init=True; leave it False")
        return self._engine.prompt_tokenizer

    async def tokenize(self, text: str, options: dict[str, Any], max_tokens: int | None = None) -> list[int]:
        """Return the token ids of `text`.

        Raises ValueError for text that is not valid Unicode, and TooManyTokensError for one with more than `max_tokens`
        tokens, without tokenizing it if its size tells.
        """
        prompt_tokenizer = self.required()
        parsed = parse_prompt(text).text
        assert parsed is not None
        with self._engine.explaining_shutdown():
            return await prompt_tokenizer.ids(parsed, options, max_tokens)

    async def has_room(self, text: str, num_output_tokens: int, options: dict[str, Any]) -> bool:
        """Return whether the context has room for `text` and for that many output tokens."""
        max_tokens = self._engine.vllm_config.model_config.max_model_len - num_output_tokens
        try:
            await self.tokenize(text, options, max_tokens)
        except TooManyTokensError:
            return False
        return True

    async def detokenize(self, token_ids: list[int], options: dict[str, Any]) -> str:
        """Return the text of `token_ids`. Raises ValueError for ids outside the vocabulary."""
        prompt_tokenizer = self.required()
        vocab_size = len(prompt_tokenizer.tokenizer)
        for token_id in (min(token_ids), max(token_ids)) if token_ids else ():
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"token ids must be in [0, {vocab_size}), the tokenizer's vocabulary, got {token_id}")
        with self._engine.explaining_shutdown():
            return await prompt_tokenizer.decode(token_ids, options)
