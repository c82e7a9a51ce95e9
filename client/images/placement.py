"""Images in the token ids of a prompt: placeholders become the tokens of their images, which are found again."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from vllm_mp.requests.images import PlacedImage

Span = tuple[int, int]
"""(index of the first token, number of tokens) of a run of image tokens."""


class ImageTokens(NamedTuple):
    """A processed image as a prompt needs it."""

    digest: bytes
    text: str
    """What takes the place of its placeholder."""
    num_tokens: int
    """Number of image tokens in `text`."""


def check_count(num_placeholders: int, num_images: int, image_token: str) -> None:
    """Raise ValueError, with the remedy, unless there are as many placeholders as images."""
    if num_placeholders == num_images:
        return
    if num_placeholders < num_images:
        remedy = f"write {image_token!r} once for each image, where it stands in the prompt, or give fewer images"
    else:
        remedy = "give an image for each in multi_modal_data, or remove it from the prompt"
    raise ValueError(f"the prompt has {num_placeholders} times {image_token!r} for {num_images} images; {remedy}")


def expand_text(text: str, image_token: str, images: Sequence[ImageTokens]) -> str:
    """Return `text` with the texts of the images in place of the placeholders. Raises ValueError if counts differ."""
    parts = text.split(image_token)
    check_count(len(parts) - 1, len(images), image_token)
    return parts[0] + "".join(image.text + part for image, part in zip(images, parts[1:], strict=True))


def expand_ids(
    token_ids: Sequence[int], token_id: int, image_token: str, expansions: Sequence[Sequence[int]]
) -> list[int]:
    """Return `token_ids` with the token ids of the images in place of the placeholders `token_id`.

    Raises ValueError if counts differ.
    """
    check_count(list(token_ids).count(token_id), len(expansions), image_token)
    expanded: list[int] = []
    rest = iter(expansions)
    for each in token_ids:
        if each == token_id:
            expanded += next(rest)
        else:
            expanded.append(each)
    return expanded


def place(token_ids: Sequence[int], token_id: int, images: Sequence[ImageTokens]) -> list[PlacedImage]:
    """Return where each image stands in `token_ids`, whose runs of `token_id` are the images' tokens, in order.

    Raises ValueError if there are more or fewer such tokens than the images have.
    """
    wanted = sum(image.num_tokens for image in images)
    runs = _runs(token_ids, token_id)
    found = sum(length for _, length in runs)
    if found != wanted:
        raise ValueError(
            f"the tokenizer made {found} image tokens of the prompt, and its images have {wanted}; the tokenizer and "
            "the processor of the model's folder do not belong together"
        )
    placed, position = [], 0
    for image in images:
        left, spans = image.num_tokens, []
        while left:
            start, length = runs[position]
            count = min(left, length)
            spans.append((start, count))
            left -= count
            if count < length:  # the next image follows without a token between
                runs[position] = start + count, length - count
            else:
                position += 1
        placed.append(PlacedImage(image.digest, spans))
    return placed


def cut(images: Sequence[PlacedImage], num_removed: int) -> list[PlacedImage]:
    """Return where images stand after the first `num_removed` tokens were cut; those before are left out.

    Raises ValueError if that cuts through an image.
    """
    kept = []
    for number, image in enumerate(images):
        (first, _), (last, length) = image.spans[0], image.spans[-1]
        if last + length <= num_removed:
            continue
        if first < num_removed:
            raise ValueError(
                f"truncate_prompt_tokens would cut through image {number + 1} of the prompt, whose tokens end at "
                f"{last + length} of which {num_removed} are cut; raise it, or shorten the prompt"
            )
        spans = [(start - num_removed, count) for start, count in image.spans]
        kept.append(PlacedImage(image.digest, spans))
    return kept


def _runs(token_ids: Sequence[int], token_id: int) -> list[Span]:
    runs, position = [], 0
    for is_image, group in groupby(token_ids, token_id.__eq__):
        length = sum(1 for _ in group)
        if is_image:
            runs.append((position, length))
        position += length
    return runs
