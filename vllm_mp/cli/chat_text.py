"""Texts of chats on their way to an engine and back: the prompt of messages, and the text of an answer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_mp.cli.flags.connect import no_chat_template

if TYPE_CHECKING:
    from vllm_mp.client.async_llm import AsyncLLM
    from vllm_mp.client.prompts.prompt import TokensPrompt
    from vllm_mp.outputs import CompletionOutput


def chat_prompt(llm: "AsyncLLM", messages: Sequence[dict[str, Any]]) -> "list[int] | TokensPrompt":
    """Return `messages` in the model's chat template as a prompt: token ids, or if there are images a dict with them.

    The images are data URLs. Raises ValueError if the model has no chat template, if the template fails, if a message
    is not valid Unicode, or for images if the model takes none.
    """
    import jinja2

    from vllm_mp.client.images.sources import data_of
    from vllm_mp.client.prompts.chat_images import content_form, take_images, with_images
    from vllm_mp.client.prompts.prompt import TokensPrompt, parse_prompt

    messages, images = take_images(messages)
    for message in messages:
        parse_prompt(message["content"], None)
    tokenizer = llm.model_tokenizer
    if not tokenizer.chat_template:
        raise ValueError(no_chat_template(llm.model_config.model))
    given: list[dict[str, Any]] = list(messages)
    if (config := llm.model_config.images) is not None:  # templates of such models may read lists of parts alone
        image_token = str(tokenizer.convert_ids_to_tokens(config.token_id))
        given = with_images(given, content_form(llm.chat_template.source), image_token, has_images=bool(images))
    elif images:
        name = llm.model_config.served_model_name
        raise ValueError(f"{name} takes no images, and the conversation has {len(images)}; begin a new one")
    try:
        text: Any = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template failed: {error}; give another with --chat-template") from error
    # The template contains the special tokens already.
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if not images:
        return ids
    # The engine puts the tokens of each image in the place of its placeholder.
    return TokensPrompt(prompt_token_ids=ids, multi_modal_data={"image": [data_of(image.value) for image in images]})


async def prompt_tokens(llm: "AsyncLLM", prompt: "list[int] | TokensPrompt") -> list[int]:
    """Return the token ids of what `chat_prompt` returned, with those of its images."""
    return prompt if isinstance(prompt, list) else await llm.prompt_tokens(prompt, add_special_tokens=False)


def whole_text(completion: "CompletionOutput") -> str:
    """Return the text of a completion without a character at its end that max_tokens has cut."""
    if completion.finish_reason == "length":
        return completion.text.rstrip("\N{REPLACEMENT CHARACTER}")
    return completion.text
