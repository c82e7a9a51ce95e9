"""The images of prompts: processed beside the event loop, cached, and placed among the tokens of their prompts."""

import asyncio
import hashlib
import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from vllm_mp.client.images.media import GivenImage, image_job
from vllm_mp.client.images.messages import ImageJob, ImageResult
from vllm_mp.client.images.placement import ImageTokens, expand_ids, expand_text, place
from vllm_mp.client.images.process_pool import ImageProcessError, ImageProcesses
from vllm_mp.client.images.processor import ModelProcessor, bounded_options, model_processor
from vllm_mp.client.prompts.prompt_tokenizer import PromptTokenizer
from vllm_mp.config import VllmConfig
from vllm_mp.requests.image_options import packed_processor_options
from vllm_mp.requests.images import MAX_IMAGE_SPANS, PlacedImage, ProcessedImage
from vllm_mp.validation.image_validation import image_shape

_MAX_CACHE_SHARE: Final = 0.25
"""Share of `mm_processor_cache_gb` that a client may fill with processed images."""
_MAX_CACHE_BYTES: Final = 2**30
_MAX_NAMES: Final = 2**14
_MAX_PROMPT_BYTES: Final = 2**29
"""Bound on the arrays of all images of a prompt, which the client holds as long as the request lives."""

ProcessorFiles = Callable[[], dict[str, dict[str, Any]]]
"""Returns the files of the model's processor, as `read_processor_files` does."""
_MISSING_PILLOW = "images need the package Pillow: pip install 'vllm-mp[images]'"


class PromptWithImages(NamedTuple):
    """A prompt whose placeholders have become the tokens of its images."""

    token_ids: list[int]
    placed: list[PlacedImage]
    """Where each image stands, in the order of the prompt."""
    images: list[ProcessedImage]
    """The images that are placed, each once."""


class PromptImages:
    """The images of an engine's prompts. Its processes start with the first image, and end with `close`."""

    def __init__(self, config: VllmConfig, prompt_tokenizer: PromptTokenizer | None, files: ProcessorFiles) -> None:
        """`prompt_tokenizer` is None with skip_tokenizer_init; then no prompt may have images."""
        self._config = config
        self._prompt_tokenizer = prompt_tokenizer
        self._files = files
        self._processor: ModelProcessor | None = None
        self._processes: ImageProcesses | None = None
        share = config.multimodal_config.mm_processor_cache_gb * _MAX_CACHE_SHARE * 2**30
        self._cache = _ImageCache(min(int(share), _MAX_CACHE_BYTES))
        self._image_token = ""

    @property
    def image_token(self) -> str | None:
        """The text of the placeholder of an image; None if the model takes no images, or there is no tokenizer."""
        images = self._config.model_config.images
        if images is None or self._prompt_tokenizer is None:
            return None
        if not self._image_token:
            self._image_token = self._text_of_token(images.placeholder_id)
        return self._image_token

    @property
    def process_ids(self) -> list[int]:
        """The ids of the image processes."""
        return [] if self._processes is None else self._processes.pids

    def check_count(self, num_images: int) -> None:
        """Raise ValueError, with the remedy, unless a prompt may have this many images, more than 0."""
        if self._config.model_config.images is None:
            name = self._config.model_config.served_model_name
            raise ValueError(
                f"the model {name} takes no images: leave multi_modal_data out, or serve a model that does, such as "
                "SmolVLM, LLaVA, Qwen2.5-VL or Gemma 3, in GGUF files with its mmproj file"
            )
        limit = self._config.multimodal_config.max_images
        if num_images > limit:
            raise ValueError(f"a prompt may have at most {limit} images (limit_mm_per_prompt), got {num_images}")
        if importlib.util.find_spec("PIL") is None:
            raise ValueError(_MISSING_PILLOW)

    def check_without_images(self, token_ids: Sequence[int]) -> None:
        """Raise ValueError, with the remedy, for a prompt without images that has placeholders."""
        images = self._config.model_config.images
        if images is None:
            return
        ids = list(token_ids)
        for token in dict.fromkeys((images.placeholder_id, images.token_id)):
            if count := ids.count(token):
                text = token if self._prompt_tokenizer is None else self._text_of_token(token)
                raise ValueError(
                    f"the prompt has {count} image tokens ({text!r}) and no image; give the images in "
                    "multi_modal_data, or remove these tokens"
                )

    async def prompt(
        self,
        given: Sequence[GivenImage],
        options: dict[str, Any],
        text: str | None,
        token_ids: list[int] | None,
        tokenization_kwargs: dict[str, Any],
        max_tokens: int | None,
        cache_salt: str,
        tenant: int,
    ) -> PromptWithImages:
        """Return the prompt, `text` unless it is None or else `token_ids`, with the images `given` in it.

        `options` are those of the request for the image processor; names of images are known to prompts with the same
        options and `cache_salt`. Tenants take turns at the image processes. Raises ValueError or TypeError,
        naming the image or the field at fault, NoRoomError if too many images wait, and TooManyTokensError for more
        than `max_tokens`.
        """
        self.check_count(len(given))
        config, image_token = self._config.model_config.images, self.image_token
        if config is None or image_token is None or self._prompt_tokenizer is None:
            raise ValueError("images need a tokenizer: leave skip_tokenizer_init off")
        if token_ids is None:
            assert text is not None
            expand_text(text, image_token, [_UNKNOWN] * len(given))  # so that a wrong number costs nothing
        else:
            expand_ids(token_ids, config.placeholder_id, image_token, [()] * len(given))
        all_options = {**(self._config.multimodal_config.mm_processor_kwargs or {}), **options}
        packed = packed_processor_options("mm_processor_kwargs", bounded_options(all_options, config))
        results: list[ImageResult] = []
        for number, image in enumerate(given):
            results.append(await self._result(image, number, packed, cache_salt, tenant))
            num_bytes = sum(len(array.data) for result in results for array in result.arrays)
            if num_bytes > _MAX_PROMPT_BYTES:
                raise ValueError(
                    f"the arrays of the first {number + 1} images have {num_bytes} bytes, the limit for a prompt is "
                    f"{_MAX_PROMPT_BYTES}; give fewer or smaller images"
                )
        token = self._text_of_token(config.token_id)
        tokens = [self._tokens(result, number, token) for number, result in enumerate(results)]
        if token_ids is None:
            assert text is not None
            expanded = expand_text(text, image_token, tokens)
            ids = await self._prompt_tokenizer.ids(expanded, tokenization_kwargs, max_tokens)
        else:
            no_special = {"add_special_tokens": False}
            texts = {image.text: await self._prompt_tokenizer.ids(image.text, no_special) for image in tokens}
            ids = expand_ids(token_ids, config.placeholder_id, image_token, [texts[image.text] for image in tokens])
        placed = place(ids, config.token_id, tokens)
        images = {result.digest: ProcessedImage(result.digest, result.arrays) for result in results}
        return PromptWithImages(ids, placed, list(images.values()))

    def forget(self) -> None:
        """Forget the processed images that no request has."""
        self._cache.clear()

    def close(self) -> None:
        """End the image processes; callers that wait get a RuntimeError. Idempotent; from any thread."""
        if self._processes is not None:
            self._processes.close()

    def _text_of_token(self, token_id: int) -> str:
        assert self._prompt_tokenizer is not None
        return str(self._prompt_tokenizer.tokenizer.convert_ids_to_tokens(token_id))

    def _tokens(self, result: ImageResult, number: int, image_token: str) -> ImageTokens:
        """Return the tokens of the image `number`.

        Raises ValueError if it has none, or too many runs of them, or arrays that the model does not take.
        """
        assert self._processor is not None
        text = self._processor.text_of(result)
        num_tokens, num_tiles = text.count(image_token), result.rows * result.columns + 1
        if num_tokens == 0 or num_tiles > MAX_IMAGE_SPANS:
            raise ValueError(
                f"multi_modal_data['image'][{number}] cannot be used: it becomes {num_tokens} image tokens in "
                f"{num_tiles} tiles, and there must be a token, and at most {MAX_IMAGE_SPANS} tiles; correct "
                "mm_processor_kwargs"
            )
        config = self._config.model_config.images
        assert config is not None
        try:
            image_shape(ProcessedImage(result.digest, result.arrays), config)
        except ValueError as error:
            raise ValueError(
                f"multi_modal_data['image'][{number}] cannot be used: its processor makes what the model does not take "
                f"({error}); correct mm_processor_kwargs"
            ) from None
        return ImageTokens(result.digest, text, num_tokens)

    async def _result(
        self, image: GivenImage, number: int, options: bytes, cache_salt: str, tenant: int
    ) -> ImageResult:
        """Return a processed image, from the cache or made now. Raises ValueError, naming the image by its number."""
        name = None if image.name is None else _Name(image.name, options, cache_salt)
        if image.value is None:
            if name is None or (result := self._cache.named(name)) is None:
                raise ValueError(
                    f"multi_modal_data['image'][{number}] cannot be used: it is left out, and this client has no "
                    f"image of its name {image.name!r:.100}, or not any more; give the image with its name"
                )
            return result
        key, job = await asyncio.to_thread(_job_with_key, image.value, number, options)
        result = self._cache.get(key)
        if result is None:
            try:
                result = await self._started().run(job, key, tenant)
            except ImageProcessError as error:
                raise ValueError(f"multi_modal_data['image'][{number}] cannot be used: {error}") from None
            if result.error:
                raise ValueError(f"multi_modal_data['image'][{number}] cannot be used: {result.error}")
            self._cache.put(key, result)
        if name is not None:
            self._cache.set_name(name, key)
        return result

    def _started(self) -> ImageProcesses:
        """Return the processes, which start with their first job. Raises ValueError if the folder has no processor."""
        if self._processes is None:
            model = self._config.model_config
            assert model.images is not None
            self._processor = model_processor(model.images, self._text_of_token, self._files(), model.hf_config)
            self._processes = ImageProcesses(self._processor.image_processor)
        return self._processes


_UNKNOWN: Final = ImageTokens(b"", "", 0)


def _job_with_key(image: Any, number: int, options: bytes) -> tuple[bytes, ImageJob]:
    """Return the job for an image, and a key that equal jobs share."""
    job = image_job(image, number, options)
    key = hashlib.sha256(f"{job.width} {job.height} {len(options)} ".encode() + options)
    key.update(job.data)
    return key.digest(), job


class _Name(NamedTuple):
    """What a caller named an image, and whose prompts know it by that name."""

    name: str
    options: bytes
    cache_salt: str


class _ImageCache:
    """The processed images that were used last, up to a number of bytes, and the names of some."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._results: OrderedDict[bytes, ImageResult] = OrderedDict()
        self._keys: OrderedDict[_Name, bytes] = OrderedDict()
        """By name, the one that was given last at the end."""

    def get(self, key: bytes) -> ImageResult | None:
        if (result := self._results.get(key)) is not None:
            self._results.move_to_end(key)
        return result

    def put(self, key: bytes, result: ImageResult) -> None:
        if key in self._results or _size(result) > self._max_bytes:
            return
        self._results[key] = result
        self._num_bytes += _size(result)
        while self._num_bytes > self._max_bytes:
            _, oldest = self._results.popitem(last=False)
            self._num_bytes -= _size(oldest)

    def named(self, name: _Name) -> ImageResult | None:
        key = self._keys.get(name)
        return None if key is None else self.get(key)

    def set_name(self, name: _Name, key: bytes) -> None:
        self._keys[name] = key
        self._keys.move_to_end(name)
        if len(self._keys) > _MAX_NAMES:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._results.clear()
        self._keys.clear()
        self._num_bytes = 0


def _size(result: ImageResult) -> int:
    return sum(len(array.data) for array in result.arrays)
