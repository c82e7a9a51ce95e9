"""Texts of chats on their way to an engine and back: the prompt of messages, and the text of an answer."""

from typing import TYPE_CHECKING, Any

from vllm_mp.cli.flags.connect import no_chat_template

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM
    from vllm_mp.outputs import CompletionOutput


def chat_prompt(llm: "AsyncLLM", messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of `messages` in the model's chat template.

    Raises ValueError if the model has no chat template, if the template fails, or if a message is not valid Unicode.
    """
    import jinja2

    from vllm_mp.client.prompts.chat_images import content_form, with_images
    from vllm_mp.client.prompts.prompt import parse_prompt

    for message in messages:
        parse_prompt(message["content"], None)
    tokenizer = llm.get_tokenizer()
    if not tokenizer.chat_template:
        raise ValueError(no_chat_template(llm.model_config.model))
    given: list[dict[str, Any]] = list(messages)
    if llm.model_config.images is not None:  # templates of such models may read lists of parts alone
        given = with_images(given, content_form(llm.chat_template.source), "", has_images=False)
    try:
        text: Any = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template failed: {error}; give another with --chat-template") from error
    # The template contains the special tokens already.
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def whole_text(completion: "CompletionOutput") -> str:
    """Return the text of a completion without a character at its end that max_tokens has cut."""
    if completion.finish_reason == "length":
        return completion.text.rstrip("\N{REPLACEMENT CHARACTER}")
    return completion.text
