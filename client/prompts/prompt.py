"""The forms of a prompt that callers may pass, and their validation."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import numpy as np

from vllm_mp.client.images.media import GivenImage, given_images
from vllm_mp.client.prompts.chat_images import ChatImage
from vllm_mp.requests.image_options import check_processor_options


class TextPrompt(TypedDict, total=False):
    """A prompt as text."""

    prompt: str
    cache_salt: str
    """Only prompts with the same salt share cached prefixes."""
    multi_modal_data: Any
    """{"image": image or list of images}: images of Pillow, arrays [height, width, 3] of uint8, or bytes of files. The
    prompt has the model's placeholder, such as "<image>", once for each, where it stands."""
    mm_processor_kwargs: dict[str, Any]
    """Options of the model's image processor for these images."""
    multi_modal_uuids: Any
    """{"image": list of a name or None for each image}. A later prompt with the same name and `cache_salt` may have
    None for the image, as long as the client keeps it."""


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; its text is only repeated in the outputs."""

    type: Literal["token"]
    """In what `InputPreprocessor` returns."""
    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str
    """Only prompts with the same salt share cached prefixes."""
    multi_modal_data: Any
    mm_processor_kwargs: dict[str, Any]
    multi_modal_uuids: Any
    """These three are as in `TextPrompt`; the placeholder is the model's image token."""


class EmbedsPrompt(TypedDict, total=False):
    """A prompt as embeddings, for an engine with `enable_prompt_embeds`; its text is only repeated in the outputs."""

    prompt_embeds: Any
    """A torch tensor or NumPy array [num_tokens, hidden_size] of float32, float16 or bfloat16, as the model's embedding
    layer returns it."""
    prompt: str
    prompt_token_ids: list[int]
    """Taken only with `prompt_is_token_ids`, and then not read."""
    prompt_is_token_ids: list[bool]
    """For each token, whether its id is read instead of its embedding: False for all of them."""
    cache_salt: str
    """Only prompts with the same salt share cached prefixes."""


_FIELDS = frozenset({*TextPrompt.__annotations__, *TokensPrompt.__annotations__, *EmbedsPrompt.__annotations__})
LONG_TEXT_CHARS = 2**18
"""Number of characters above which `parse_prompt` does not check a text to tokenize, because it takes milliseconds."""
MAX_SALT_CHARACTERS = 1024
"""Maximum number of characters of a `cache_salt`."""

_FORMS = "prompt must be a text, token ids or a dict"
_USE_CHAT = "for chat messages use chat()"

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]

PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPrompt


def text_prompt(
    text: str, images: Sequence[ChatImage], mm_processor_kwargs: dict[str, Any] | None, cache_salt: str = ""
) -> TextPrompt:
    """Return a text with the `images` for its placeholders as a prompt."""
    prompt = TextPrompt(prompt=text, cache_salt=cache_salt)
    if images:
        prompt["multi_modal_data"] = {"image": [image.value for image in images]}
        prompt["multi_modal_uuids"] = {"image": [image.name for image in images]}
        prompt["mm_processor_kwargs"] = mm_processor_kwargs or {}
    return prompt


class ParsedPrompt(NamedTuple):
    """Text to tokenize, or token ids, or embeddings. Text beside one of these is only repeated in the outputs."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str = ""
    embeds: Any = None
    """What the caller gave as `prompt_embeds`, not validated."""
    images: Sequence[GivenImage] = ()
    mm_processor_kwargs: Mapping[str, Any] = {}
    """Options of the image processor for `images`."""


class TooManyTokensError(Exception):
    """A prompt has more tokens than its limit."""

    def __init__(self, size: str) -> None:
        """`size` is the number of tokens, in words."""
        super().__init__(size)
        self.size = size


def parse_prompt(prompt: Any, prompt_token_ids: Any = None, max_tokens: int | None = None) -> ParsedPrompt:
    """Parse any form of prompt; `prompt_token_ids` are its token ids unless `prompt` has its own.

    Raises TypeError or ValueError, naming the fault, for other types, missing or unknown parts and text that is not
    valid Unicode, unless it is long and must be tokenized; NotImplementedError for parts that are not served;
    TooManyTokensError for a list of more than `max_tokens` token ids.
    """
    text: Any = None
    ids: Any = prompt_token_ids
    embeds: Any = None
    salt: Any = ""
    images: list[GivenImage] = []
    options: dict[str, Any] = {}
    if isinstance(prompt, dict):
        unknown = prompt.keys() - _FIELDS
        if unknown:
            remedy = _USE_CHAT if "role" in prompt else "give 'prompt' or 'prompt_token_ids'"
            raise ValueError(f"a prompt has no field {sorted(unknown, key=str)[0]!r}; {remedy}")
        if prompt.get("type", "token") != "token":
            raise NotImplementedError(f"prompts of type {prompt['type']!r:.100} are not served; give token ids or text")
        images = given_images(prompt.get("multi_modal_data"), prompt.get("multi_modal_uuids"))
        options = check_processor_options("mm_processor_kwargs", prompt.get("mm_processor_kwargs"))
        text = prompt.get("prompt")
        salt = prompt.get("cache_salt") or ""
        ids = prompt.get("prompt_token_ids", ids)
        embeds = prompt.get("prompt_embeds")
        if (mask := prompt.get("prompt_is_token_ids")) is not None:
            _check_mask(mask, ids, embeds)
            ids = None
        if embeds is not None and ids is not None:
            raise ValueError("the prompt has prompt_embeds and prompt_token_ids; give one of them")
        if embeds is not None and images:
            raise ValueError("the prompt has prompt_embeds and multi_modal_data; give one of them")
    elif isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, bytes | bytearray):
        raise TypeError("the prompt is bytes; decode it to str first")
    elif prompt is not None:
        _check_form(prompt)
        ids = prompt
    if text is None and ids is None and embeds is None:
        raise ValueError("the prompt has neither text nor token ids; give one of them")
    if not isinstance(salt, str) or len(salt) > MAX_SALT_CHARACTERS:
        raise ValueError(f"cache_salt must be a str of at most {MAX_SALT_CHARACTERS} characters, got {salt!r:.100}")
    is_tokenized = ids is None and embeds is None
    if text is not None and not (is_tokenized and isinstance(text, str) and len(text) > LONG_TEXT_CHARS):
        check_text("the prompt", text)
    return ParsedPrompt(
        text,
        None if ids is None else check_token_ids(ids, max_tokens),
        check_text("cache_salt", salt),
        embeds,
        images,
        options,
    )


def _check_mask(mask: Any, ids: Any, embeds: Any) -> None:
    """Raise TypeError, ValueError or NotImplementedError unless `mask` says that all of a prompt is its `embeds`."""
    if embeds is None:
        raise ValueError("prompt_is_token_ids is of no use without prompt_embeds; leave it out")
    try:
        flags = msgspec.convert(mask.tolist() if hasattr(mask, "tolist") else mask, list[bool])
    except msgspec.ValidationError:
        raise TypeError(f"prompt_is_token_ids must be a list of bool, got {reprlib.repr(mask)}") from None
    if hasattr(ids, "__len__") and len(ids) != len(flags):
        raise ValueError(
            f"prompt_is_token_ids must have a bool for each of {len(ids)} prompt_token_ids, got {len(flags)}"
        )
    if True in flags:
        raise NotImplementedError(
            f"prompt_is_token_ids[{flags.index(True)}] is True: a prompt of both token ids and prompt_embeds is not "
            "served; give the embeddings of all its tokens"
        )


def _check_form(prompt: Any) -> None:
    """Raise TypeError, with the remedy, for objects that callers pass by mistake instead of token ids."""
    if not isinstance(prompt, list | tuple):
        if not hasattr(prompt, "__len__"):
            raise TypeError(f"{_FORMS}, got {type(prompt).__name__}; {_USE_CHAT}")
        return
    first = prompt[0] if prompt else None
    if isinstance(first, dict):
        raise TypeError(f"{_FORMS}, got a {type(prompt).__name__} of dicts; {_USE_CHAT}")
    if isinstance(first, str):
        raise TypeError(f"{_FORMS}, got a {type(prompt).__name__} of texts; pass each text to a call of its own")


def check_text(name: str, text: Any) -> str:
    """Return `text` if it is valid Unicode. Raises TypeError or ValueError with `name`."""
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str, got {type(text).__name__}")
    if text.isascii():
        return text
    # In parts, between which the GIL is free for other threads.
    for start in range(0, len(text), LONG_TEXT_CHARS):
        try:
            text[start : start + LONG_TEXT_CHARS].encode("utf-8")
        except UnicodeEncodeError as error:
            position = start + error.start
            raise ValueError(
                f"{name} is not valid Unicode: {text[position]!r} at character {position} is half of a surrogate pair; "
                "decode the bytes that it came from as UTF-8"
            ) from error
    return text


def check_token_ids(ids: Any, max_tokens: int | None = None) -> list[int]:
    """Return `ids` as a list.

    Raises TypeError or ValueError unless they are token ids, and TooManyTokensError for more than `max_tokens`.
    """
    if max_tokens is not None and isinstance(ids, list | tuple | np.ndarray) and len(ids) > max_tokens:
        raise TooManyTokensError(f"{len(ids)} tokens")
    try:
        return msgspec.convert(ids, list[_TokenId])  # many times as fast as numpy, and refuses all but plain integers
    except msgspec.ValidationError:
        pass
    try:
        array = np.asarray(ids)
    except ValueError:  # lists of different lengths; the next check refuses the text
        array = np.asarray(["lists of different lengths"])
    if array.size == 0 and array.ndim == 1:
        return []
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"prompt_token_ids must be one list of integers, got {reprlib.repr(ids)}")
    if array.min() < 0 or array.max() >= 2**31:
        raise ValueError(f"prompt_token_ids must be in the model's vocabulary, got {array.min()} to {array.max()}")
    result: list[int] = array.tolist()
    return result
