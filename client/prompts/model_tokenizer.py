"""The tokenizer that a client works with: it imports transformers only for what the tokenizers library cannot do."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from vllm_mp.client.prompts.template_text import is_plain_data, template_text
from vllm_mp.client.prompts.token_length import TokenLength
from vllm_mp.client.prompts.tokenizer_record import TokenizerRecord

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_RENDERED: Final = frozenset({"tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"})
"""The arguments of `apply_chat_template`, beside the messages, that `template_text` knows."""
_TAKEN: Final = frozenset({"conversations", "messages", "self"})
"""Further names that no variable of a template may have in transformers."""


class LibraryNeeded(BaseException):
    """Only transformers can render a chat. No exception, because those are what a template may raise."""


class ModelTokenizer:
    """A fast tokenizer of transformers that was recorded: the part of its interface that this package uses.

    Methods and attributes have the names, arguments and results that they have there. What they cannot do themselves,
    they leave to the tokenizer of transformers, which `library` loads when it is first needed. From then on the chat
    template and the special tokens are those of that object, which callers may change.
    """

    is_fast = True

    def __init__(self, record: TokenizerRecord, backend: Tokenizer, load: Callable[[], Any]) -> None:
        """`backend` is that of `record`; no caller changes it. `load` returns the tokenizer of transformers."""
        self._record = record
        self.backend_tokenizer = backend
        self._load = load
        self._lock = threading.Lock()
        self._library: Any = None
        self._chat_template = record.chat_template

    def library(self) -> Any:
        """Return the tokenizer of transformers, always the same. Raises ValueError if it cannot be loaded any more."""
        with self._lock:
            if self._library is None:
                self._library = self._load()
                self._library.chat_template = self._chat_template
            return self._library

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        template: str | dict[str, str] | None = self._of_library("chat_template", self._chat_template)
        return template

    @chat_template.setter
    def chat_template(self, template: str | dict[str, str] | None) -> None:
        with self._lock:
            self._chat_template = template
            if self._library is not None:
                self._library.chat_template = template

    @property
    def special_tokens_map(self) -> dict[str, str]:
        tokens: dict[str, str] = self._of_library("special_tokens_map", self._record.special_tokens_map)
        return dict(tokens)

    @property
    def all_special_tokens(self) -> list[str]:
        tokens: list[str] = self._of_library("all_special_tokens", self._record.all_special_tokens)
        return list(tokens)

    @property
    def all_special_ids(self) -> list[int]:
        ids: list[int] = self._of_library("all_special_ids", self._record.all_special_ids)
        return list(ids)

    @property
    def split_special_tokens(self) -> bool:
        return self._record.split_special_tokens

    @property
    def truncation_side(self) -> str:
        side: str = self._of_library("truncation_side", self._record.truncation_side)
        return side

    @property
    def model_max_length(self) -> int:
        length: int = self._of_library("model_max_length", self._record.model_max_length)
        return length

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def template_arguments(self) -> frozenset[str]:
        """The names of the parameters of `apply_chat_template`."""
        return frozenset(self._record.template_arguments)

    @property
    def token_length(self) -> TokenLength | None:
        """How much text a token stands for; None if it is not known."""
        return self._record.token_length

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.library()(*args, **options)

    def encode(self, text: Any, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Raises TypeError unless it is str."""
        if not isinstance(text, str):
            raise TypeError(f"the text to tokenize must be str, got {type(text).__name__}")
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        if options or self._record.cleans_up or not _are_ids(token_ids):
            return self.library().decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Any, **options: Any) -> list[str]:
        texts: list[str] = self.library().batch_decode(sequences, **options)
        return texts

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the token of an id, or a list of tokens; None for an id that has none."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(token_id)) for token_id in ids]

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Return what transformers' method returns; raises what that raises."""
        try:
            return self.render_chat(conversation, **options)
        except LibraryNeeded:
            return self.library().apply_chat_template(conversation, **options)

    def render_chat(self, conversation: Any, **options: Any) -> Any:
        """Return what `apply_chat_template` returns, but raise LibraryNeeded if `library` is to be called first."""
        if self._library is not None:
            return self._library.apply_chat_template(conversation, **options)
        text = self._text_of_chat(conversation, options) if options.get("tokenize") is False else None
        if text is None:
            raise LibraryNeeded
        return text

    def _text_of_chat(self, conversation: Any, options: dict[str, Any]) -> str | None:
        """Return the text of a conversation; None if only transformers can make it, or refuse it."""
        variables = {name: value for name, value in options.items() if name not in _RENDERED}
        if variables.keys() & (self.template_arguments | _TAKEN):
            return None
        own, given, tools = self._chat_template, options.get("chat_template"), options.get("tools")
        template = own if given is None else given
        if isinstance(own, dict) or not isinstance(template, str):
            return None
        adds_prompt = options.get("add_generation_prompt", False)
        continues = options.get("continue_final_message", False)
        if not isinstance(adds_prompt, bool) or not isinstance(continues, bool):
            return None
        if not isinstance(conversation, list) or not all(type(message) is dict for message in conversation):
            return None
        if not (tools is None or (isinstance(tools, list) and all(type(tool) is dict for tool in tools))):
            return None
        if not is_plain_data([conversation, tools, variables]):
            return None
        return template_text(
            template,
            conversation,
            tools,
            {**self._record.special_tokens_map, **variables},
            add_generation_prompt=adds_prompt,
            continue_final_message=continues,
        )

    def _of_library(self, name: str, recorded: Any) -> Any:
        """Return an attribute that callers may have changed."""
        library = self._library
        return recorded if library is None else getattr(library, name)


def library_tokenizer(tokenizer: Any) -> Any:
    """Return the tokenizer of transformers for a tokenizer that a client works with."""
    return tokenizer.library() if isinstance(tokenizer, ModelTokenizer) else tokenizer


def template_arguments(tokenizer: Any) -> frozenset[str]:
    """Return the names of the parameters of the `apply_chat_template` of a tokenizer."""
    if isinstance(tokenizer, ModelTokenizer):
        return tokenizer.template_arguments
    return frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)


def _are_ids(token_ids: Any) -> bool:
    return type(token_ids) is list and all(type(token_id) is int for token_id in token_ids)
