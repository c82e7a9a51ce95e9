"""The records of a request: as the caller gave it, and as a core is told of it. Records are never changed."""

import copy
import hashlib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from vllm_mp.client.prompts.prompt import PromptType, check_text
from vllm_mp.requests.images import PlacedImage, ProcessedImage
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.prompt_embeds import PromptEmbeds
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.requests.structured_outputs import Constraint
from vllm_mp.wire import MAX_TENANTS


class CallerRequest(NamedTuple):
    """A request as the caller gave it, not yet validated."""

    request_id: str
    prompt: PromptType | None
    prompt_token_ids: list[int] | None
    """Token ids instead of a `prompt` to tokenize."""
    priority: int
    arrival_time: float
    """In seconds of `time.time()`."""
    tokenization_kwargs: dict[str, Any]
    lora: LoRARequest | None = None
    """The adapter for the request; None for the base model."""
    prompt_text: str | None = None
    """Text that the outputs repeat as the prompt; None: the text of `prompt`, if it has one."""
    tenant: int = 0
    """Number of the party of this client for which the request runs, below `wire.MAX_TENANTS`."""

    def text_to_repeat(self, text: str | None) -> str | None:
        """Return what the outputs repeat as the prompt; `text` is the text of `prompt`."""
        return text if self.prompt_text is None else check_text("prompt_text", self.prompt_text)


class GenerationRequest(NamedTuple):
    """A validated request for text."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    """[num_prompt_tokens]"""
    packed_prompt: bytes
    """`prompt_token_ids` as little-endian int32, as the wire carries them."""
    params: SamplingParams
    """With a seed, so that another core can continue the request."""
    arrival_time: float
    priority: int = 0
    cache_salt: str = ""
    group: str = ""
    """Names the request's completions, which share the blocks of their prompt; empty for a single completion."""
    bad_words: Sequence[list[int]] = ()
    """The token ids of each spelling of each bad word."""
    seed_is_drawn: bool = False
    """The client drew the seed, because the caller gave none."""
    prompt_embeds: PromptEmbeds | None = None
    """The prompt, if it is given as embeddings; then `packed_prompt` is empty and `prompt_token_ids` are zeros."""
    extra_args: bytes = b""
    """`params.extra_args` as the wire carries them."""
    constraint: Constraint | None = None
    """What the output must match; None: anything goes."""
    lora: LoRARequest | None = None
    """The adapter for the request; None for the base model."""
    tenant: int = 0
    """As in `CallerRequest`."""
    placed_images: Sequence[PlacedImage] = ()
    """Where the images of the prompt stand."""
    images: Mapping[bytes, ProcessedImage] = {}
    """These images by digest; the record holds them, so that each core can be sent them."""


class PoolingRequest(NamedTuple):
    """A validated request for a vector. Fields are as in `GenerationRequest`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    packed_prompt: bytes
    params: PoolingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str = ""
    lora: LoRARequest | None = None
    tenant: int = 0


def checked_request_id(request_id: Any) -> str:
    """Return the id of a request as a str; an int becomes its decimal digits. Raises TypeError for other types."""
    if isinstance(request_id, str):
        return request_id
    if isinstance(request_id, int) and not isinstance(request_id, bool):
        return str(request_id)
    raise TypeError(f"request_id must be a str or an int, got {reprlib.repr(request_id)}")


def checked_tenant(tenant: Any) -> int:
    """Return the number of a tenant. Raises TypeError or ValueError for anything else."""
    if not isinstance(tenant, int) or isinstance(tenant, bool):
        raise TypeError(f"tenant must be an int, got {reprlib.repr(tenant)}")
    if not 0 <= tenant < MAX_TENANTS:
        raise ValueError(f"tenant must be from 0 to {MAX_TENANTS - 1}, got {tenant}; choose another number")
    return tenant


def digest_of(request: GenerationRequest | PoolingRequest) -> bytes:
    """Return a digest that requests share if prompt, parameters, cache salt and adapter are equal.

    A drawn seed is left out.
    """
    params, embeds, constraint = copy.copy(request.params), None, None
    images: Sequence[PlacedImage] = ()
    if isinstance(request, GenerationRequest) and isinstance(params, SamplingParams):
        embeds, constraint = request.prompt_embeds, request.constraint
        images = request.placed_images
        params.structured_outputs = params.guided_decoding = None
        if request.seed_is_drawn:
            params.seed = None
    content = (
        type(params).__name__,
        request.packed_prompt,
        params,
        request.cache_salt,
        embeds,
        constraint,
        request.lora,
        images,
    )
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()
