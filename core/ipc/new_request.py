"""The scheduler's requests, made from the messages of clients after these are validated again."""

import msgspec
import numpy as np

from vllm_mp import wire
from vllm_mp.config import VllmConfig
from vllm_mp.core.images.request_images import RequestImages
from vllm_mp.core.lora.cached_adapter import CachedAdapter
from vllm_mp.core.scheduler.cache.block_pool import root_hash
from vllm_mp.core.scheduler.logits_processors import LogitsProcessors
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.waiting.memory_quota import REQUEST_BYTES
from vllm_mp.core.structured_output.constrained_output import ConstrainedOutput
from vllm_mp.requests.sampling_params import EXTRA_ARGS, MAX_DRAFTS, SamplingParams
from vllm_mp.validation.embeds_validation import check_prompt_embeds
from vllm_mp.validation.request_validation import (
    checked_arrival_time,
    pooling_task,
    validate_generation,
    validate_pooling,
)


def new_request(
    client: int,
    message: wire.AddRequest | wire.AddPooling,
    config: VllmConfig,
    order: tuple[int, int],
    num_bytes: int,
    adapter: CachedAdapter | None = None,
    token: bytes = b"",
    images: RequestImages | None = None,
) -> Request:
    """Return the request of a message of `num_bytes`; `order` is its place in the waiting queue.

    `adapter` and `images` are those that the message names, `token` is that of the client.

    Raises ValueError or NotImplementedError for a request that cannot run.
    """
    number = 0 if adapter is None else adapter.number
    if isinstance(message, wire.AddPooling):
        request = _pooling(client, message, config, order, num_bytes, number)
    else:
        request = _generation(client, message, config, order, num_bytes, number, token)
    request.adapter = adapter
    if images is not None:
        request.images = images
    return request


def _pooling(
    client: int, message: wire.AddPooling, config: VllmConfig, order: tuple[int, int], num_bytes: int, adapter: int
) -> Request:
    prompt, params, defaults = wire.unpack_ids(message.prompt), message.params, config.model_config.pooling
    validate_pooling(message.request_id, prompt, params, config)
    if pooling_task(params, config.model_config) == "classify":
        # The head reads the state of the first token.
        pooling = msgspec.structs.replace(params, task="classify", pooling_type="cls", normalize=False)
    else:
        pooling = msgspec.structs.replace(
            params,
            pooling_type=params.pooling_type or defaults.pooling_type,
            normalize=defaults.normalize if params.normalize is None else params.normalize,
        )
    return Request(
        client=client,
        slot=message.slot,
        request_id=message.request_id,
        params=pooling,
        tokens=prompt,
        num_prompt_tokens=len(prompt),
        max_total_tokens=len(prompt),
        hashes=[root_hash(message.cache_salt, adapter)] if config.cache_config.enable_prefix_caching else [],
        # The other types need the hidden states of tokens before the last.
        reads_cache=pooling.pooling_type == "last",
        order=order,
        isolation_group=message.isolation_group,
        after_pause=message.after_pause,
        is_replay=message.is_replay,
        arrival_time=checked_arrival_time(message.arrival_time),
        tenant=message.tenant,
        num_bytes=num_bytes + REQUEST_BYTES,
    )


def _generation(
    client: int,
    message: wire.AddRequest,
    config: VllmConfig,
    order: tuple[int, int],
    num_bytes: int,
    adapter: int,
    token: bytes,
) -> Request:
    prompt, output, embeds = wire.unpack_ids(message.prompt), wire.unpack_ids(message.output), message.prompt_embeds
    if embeds is not None:
        if message.images:
            raise ValueError("a prompt of prompt_embeds takes no images; give text or token ids")
        if len(prompt):
            raise ValueError("the prompt has prompt_embeds and prompt_token_ids; give one of them")
        check_prompt_embeds(embeds, message.params, config.model_config)
        prompt = np.zeros(embeds.num_tokens, np.int32)
    if message.params.extra_args:
        raise ValueError("extra_args must be a field of the message, not of its parameters")
    if message.params.structured_outputs is not None or message.params.guided_decoding is not None:
        raise ValueError("structured_outputs must be the constraint of the message, not one of its parameters")
    message.params.extra_args = EXTRA_ARGS.unpacked("extra_args", message.extra_args) or None
    max_total_tokens = validate_generation(
        message.request_id, prompt, output, message.params, message.bad_words, config
    )
    # Log-probabilities of the prompt were sent before the first token of the output.
    prompt_logprobs = None if len(output) else message.params.prompt_logprobs
    num_unknown = 0 if embeds is None else len(prompt)
    logits_processors = LogitsProcessors.from_params(message.params, message.bad_words, num_unknown)
    constrained = None
    if message.constraint is not None:
        marker = message.constraint.reasoning_start, *message.constraint.starts_after
        if max(marker) >= config.model_config.architecture.vocab_size or min(marker) < -1:
            raise ValueError("the constraint must name token ids of the model as the markers of its reasoning")
        may_force = message.params.logprobs is None and not _bars_tokens(message)
        constrained = ConstrainedOutput(message.constraint, may_force)
    # The processors hold these as arrays; the dict takes ten times as much memory.
    message.params.logit_bias = message.params.allowed_token_ids = message.params.bad_words = None
    return Request(
        client=client,
        slot=message.slot,
        request_id=message.request_id,
        params=message.params,
        tokens=np.concatenate([prompt, output]),
        num_prompt_tokens=len(prompt),
        max_total_tokens=max_total_tokens,
        prompt_embeds=embeds,
        logits_processors=logits_processors,
        constrained=constrained,
        num_logprobs=_num_logprobs(message.params.logprobs, config),
        num_prompt_logprobs=_num_logprobs(prompt_logprobs, config),
        hashes=_root_hashes(client, message, config, adapter, token),
        # Cached tokens are not computed, so they have no log-probabilities.
        reads_cache=prompt_logprobs is None,
        max_drafts=_max_drafts(message.params, config),
        draft_pool=root_hash(message.cache_salt, adapter) if config.speculative_config is not None else b"",
        order=order,
        isolation_group=message.isolation_group,
        after_pause=message.after_pause,
        is_replay=message.is_replay,
        arrival_time=checked_arrival_time(message.arrival_time),
        tenant=message.tenant,
        num_bytes=num_bytes + REQUEST_BYTES,
    )


def _bars_tokens(message: wire.AddRequest) -> bool:
    """Return whether a request bars tokens, also if only a logits processor of the operator knows which."""
    params = message.params
    return bool(message.bad_words or params.allowed_token_ids or params.logits_processors)


def _root_hashes(client: int, message: wire.AddRequest, config: VllmConfig, adapter: int, token: bytes) -> list[bytes]:
    """Return the root hash that a request's block hashes build on.

    Without prefix caching it is that of the request alone, or of its group, also in the next core.
    """
    if config.cache_config.enable_prefix_caching:
        return [root_hash(message.cache_salt, adapter)]
    # No other client has this token; without one, a client's number is never given to another client.
    own = message.group or f"{message.slot} {message.arrival_time} {message.request_id}"
    return [root_hash(f"{token.hex() or client} {own}", adapter)]


def _max_drafts(params: SamplingParams, config: VllmConfig) -> int:
    """Return the maximum number of draft tokens of a request in a step; 0 without speculation."""
    if config.speculative_config is None:
        return 0
    most = config.speculative_config.num_speculative_tokens
    wanted: int = (params.extra_args or {}).get(MAX_DRAFTS, most)
    return min(most, wanted)


def _num_logprobs(wanted: int | None, config: VllmConfig) -> int:
    """Return how many log-probabilities to send per position; -1: none, not even of the chosen token."""
    if wanted == -1:
        return config.model_config.architecture.vocab_size
    return -1 if wanted is None else wanted
