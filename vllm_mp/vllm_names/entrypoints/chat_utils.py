"""Chat templates under the names that programs import from `vllm.entrypoints.chat_utils`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_mp.arguments.unserved_names import refuse

ChatCompletionMessageParam = dict[str, Any]
"""A message of a conversation, as OpenAI's API writes it."""
ConversationMessage = dict[str, Any]

__all__ = [
    "ChatCompletionMessageParam",
    "ConversationMessage",
    "apply_hf_chat_template",
    "load_chat_template",
    "resolve_hf_chat_template",
]

__getattr__ = refuse(
    __name__,
    dict.fromkeys(
        (
            "AsyncMultiModalItemTracker",
            "ChatTemplateContentFormat",
            "ChatTemplateContentFormatOption",
            "MultiModalItemTracker",
            "parse_chat_messages",
            "parse_chat_messages_async",
            "parse_chat_messages_futures",
        ),
        "AsyncLLM.chat and LLM.chat read the messages of a conversation",
    ),
)


def load_chat_template(chat_template: str | Path | None, *, is_literal: bool = False) -> str | None:
    """Return the template in the file `chat_template`, or the text itself; None for None.

    Raises ValueError for a text without braces that names no file.
    """
    if chat_template is None or is_literal:
        return None if chat_template is None else str(chat_template)
    try:
        return Path(chat_template).read_text()
    except OSError as error:
        if isinstance(chat_template, str) and any(brace in chat_template for brace in "{}\n"):
            return chat_template
        raise ValueError(f"chat_template={str(chat_template)!r:.200} cannot be read: {error.strerror}") from None


def resolve_hf_chat_template(
    tokenizer: Any,
    chat_template: str | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    model_config: Any = None,
    trust_remote_code: bool | None = None,
) -> str | None:
    """Return `chat_template`, or the template of `tokenizer` for a request with `tools`; None if it has none.

    `model_config` and `trust_remote_code` have no effect.
    """
    if chat_template is not None:
        return chat_template
    try:
        template: str = tokenizer.get_chat_template(None, tools=tools)
    except (AttributeError, ValueError):  # without a template
        return None
    return template


def apply_hf_chat_template(
    tokenizer: Any,
    conversation: Sequence[dict[str, Any]],
    chat_template: str | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    tokenize: bool = False,
    model_config: Any = None,
    trust_remote_code: bool | None = None,
    **options: Any,
) -> str | list[int]:
    """Return a conversation as the text of a prompt, or with `tokenize` as its token ids.

    `options` go to the tokenizer's `apply_chat_template`. Raises ValueError without a template.
    """
    template = resolve_hf_chat_template(tokenizer, chat_template, tools)
    if template is None:
        raise ValueError("the tokenizer has no chat template; give chat_template")
    rendered: str | list[int] = tokenizer.apply_chat_template(
        conversation, chat_template=template, tools=tools, tokenize=tokenize, **options
    )
    return rendered
