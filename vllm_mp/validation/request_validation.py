"""The conditions under which a request can run, checked by the client before it sends and by the core on arrival."""

import reprlib
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_mp.config import ModelConfig, VllmConfig
from vllm_mp.model_config.architecture import Architecture
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.processor_registration import registered
from vllm_mp.requests.sampling_params import MAX_DRAFTS, SamplingParams
from vllm_mp.wire import MAX_BAD_WORD_SPELLINGS, MAX_BAD_WORD_TOKENS, MAX_REQUEST_ID_BYTES

_MAX_BAD_TOKENS = 2**16
"""Maximum number of tokens in all bad words of a request."""
_MAX_TIME = 2.0**53
"""Maximum distance in seconds from 1970 of an arrival time."""
_MAX_CONTEXT = "this model's maximum context length is"
"""Words of OpenAI's error, by which gateways such as LiteLLM tell a prompt that is too long from other errors."""


def validate_generation(
    request_id: str,
    prompt: npt.NDArray[np.int32],
    output: npt.NDArray[np.int32],
    params: SamplingParams,
    bad_words: list[list[int]],
    config: VllmConfig,
) -> int:
    """Return the number of tokens, prompt included, at which the completion ends with the reason "length".

    `prompt` [n], `output` [m] (the completion so far) and `bad_words` (`params.bad_words`) are token ids. Raises
    ValueError, naming the field, for a request that can never run.
    """
    model = config.model_config
    _check_request_id(request_id)
    validate_sampling(params, model)
    _check_not_empty(prompt)
    if len(prompt) >= model.max_model_len:
        raise generation_prompt_too_long(f"{len(prompt)} tokens", model, params.truncate_prompt_tokens)
    vocab_size = model.architecture.vocab_size
    _check_token_ids("prompt_token_ids", prompt, vocab_size)
    _check_token_ids("the completion so far", output, vocab_size)
    _check_bad_words(params, bad_words, vocab_size)
    room = model.max_model_len - len(prompt)
    if params.min_tokens > room:
        raise ValueError(
            f"min_tokens must be at most {room}, the rest of max_model_len={model.max_model_len} after the prompt of "
            f"{len(prompt)} tokens, got {params.min_tokens}"
        )
    max_total_tokens = len(prompt) + (room if params.max_tokens is None else min(room, params.max_tokens))
    if len(prompt) + len(output) >= max_total_tokens:
        raise ValueError(f"the completion has ended: it has {len(output)} tokens, the limit of the request")
    return max_total_tokens


def validate_sampling(params: SamplingParams, model: ModelConfig) -> None:
    """Raise ValueError, naming the field, for parameters with which no prompt can be completed by this model."""
    check_generates(model)
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        if ids := getattr(params, name):
            _check_token_ids(name, np.asarray(list(ids), np.int64), model.architecture.vocab_size)
    _check_logprobs(params, model)
    if params.logits_processors or params.extra_args:
        _check_registered(params, model)


def check_generates(model: ModelConfig) -> None:
    """Raise ValueError if the model generates no text."""
    if "generate" in model.supported_tasks:
        return
    architecture = model.architecture
    what = (
        "is an encoder" if architecture.is_encoder else f"has no head for tokens ({architecture.name} without lm_head)"
    )
    raise ValueError(
        f"{model.model} {what} and generates no text; call encode() for its embeddings, or ask /v1/embeddings for them"
    )


def validate_pooling(request_id: str, prompt: npt.NDArray[np.int32], params: PoolingParams, config: VllmConfig) -> None:
    """Raise ValueError, naming the field, for a pooling request on `prompt` [n] that can never run."""
    model = config.model_config
    _check_request_id(request_id)
    _check_not_empty(prompt)
    if len(prompt) > model.max_model_len:
        raise pooling_prompt_too_long(f"{len(prompt)} tokens", model, params.truncate_prompt_tokens)
    _check_token_ids("prompt_token_ids", prompt, model.architecture.vocab_size)
    _check_second_text(params, len(prompt), model.architecture)
    validate_pooling_params(params, model)


def validate_pooling_params(params: PoolingParams, model: ModelConfig) -> None:
    """Raise ValueError, naming the field, for parameters with which this model can make no vector of any prompt."""
    if pooling_task(params, model) == "classify":
        _check_classification(params, model)
    if params.dimensions is not None and params.dimensions > model.architecture.hidden_size:
        raise ValueError(
            f"dimensions must be at most {model.architecture.hidden_size}, the length of the model's hidden states, "
            f"got {params.dimensions}"
        )


def checked_arrival_time(arrival_time: Any) -> float:
    """Return the arrival time of a request, in seconds of `time.time()`.

    Raises TypeError unless it is a number, and ValueError unless it is finite.
    """
    if not isinstance(arrival_time, int | float) or isinstance(arrival_time, bool):
        raise TypeError(f"arrival_time must be a number of seconds, got {reprlib.repr(arrival_time)}")
    if not -_MAX_TIME <= arrival_time <= _MAX_TIME:  # this form refuses NaN too
        raise ValueError(
            f"arrival_time must be a time in seconds, as time.time() gives it, got {reprlib.repr(arrival_time)}"
        )
    return float(arrival_time)


def pooling_task(params: PoolingParams, model: ModelConfig) -> str:
    """Return what a pooling request asks for: "embed" or "classify"."""
    return params.task or ("classify" if model.architecture.num_classes else "embed")


def _check_classification(params: PoolingParams, model: ModelConfig) -> None:
    if not model.architecture.num_classes:
        raise ValueError(
            f"task must be 'embed' or None, got 'classify': {model.model} has no classes; use a model for sequence "
            "classification"
        )
    for name in ("pooling_type", "normalize", "dimensions"):
        if (value := getattr(params, name)) is not None:
            raise ValueError(f"{name} must be None for classes, got {value!r}; set task='embed' for an embedding")


def _check_second_text(params: PoolingParams, num_tokens: int, architecture: Architecture) -> None:
    if params.second_text_at is None:
        return
    if getattr(architecture, "num_token_types", 0) < 2:
        raise ValueError(
            f"second_text_at must be None, got {params.second_text_at}: the model has no token type for second texts"
        )
    if params.second_text_at >= num_tokens:
        raise ValueError(
            f"second_text_at must be below {num_tokens}, the tokens of the prompt, got {params.second_text_at}"
        )


def generation_prompt_too_long(size: str, model: ModelConfig, truncation: int | None = None) -> ValueError:
    """Return the error for a prompt of `size`, the number of its tokens in words, that leaves no room for a token.

    `truncation` is the request's truncate_prompt_tokens.
    """
    return ValueError(
        f"the prompt is too long: {size}, and {_MAX_CONTEXT} max_model_len={model.max_model_len} for prompt and "
        f"completion; {_shorten(truncation, model.max_model_len - 1)}"
    )


def pooling_prompt_too_long(size: str, model: ModelConfig, truncation: int | None = None) -> ValueError:
    """Return the error for a prompt that is too long for a vector; `size` is the number of its tokens in words.

    `truncation` is the request's truncate_prompt_tokens.
    """
    return ValueError(
        f"the prompt is too long: {size}, and {_MAX_CONTEXT} max_model_len={model.max_model_len}; "
        f"{_shorten(truncation, model.max_model_len)}"
    )


def _shorten(truncation: int | None, limit: int) -> str:
    """Return what to do about a prompt that may have `limit` tokens."""
    if truncation is None:
        how = "shorten it, set truncate_prompt_tokens"
    else:
        how = f"shorten it, lower truncate_prompt_tokens={truncation} to at most {limit} or set it to -1"
    return f"{how}, or raise max_model_len if the model's context allows it"


def _check_request_id(request_id: str) -> None:
    try:
        size = len(request_id.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"request_id must be valid Unicode, got {request_id[:50]!r}") from error
    if size > MAX_REQUEST_ID_BYTES:
        raise ValueError(f"request_id must be of at most {MAX_REQUEST_ID_BYTES} bytes, got {request_id[:50]!r}...")


def _check_not_empty(prompt: npt.NDArray[np.int32]) -> None:
    if not len(prompt):
        raise ValueError("the prompt is empty; give at least one token")


def _check_token_ids(name: str, ids: npt.NDArray[Any], vocab_size: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        raise ValueError(f"{name} must be in [0, {vocab_size}), the model's vocabulary, got {int(wrong[0])}")


def _check_bad_words(params: SamplingParams, bad_words: list[list[int]], vocab_size: int) -> None:
    """Raise ValueError unless `bad_words` can be the token ids of `params.bad_words`, and are not too many."""
    if len(bad_words) > MAX_BAD_WORD_SPELLINGS * len(params.bad_words or ()):
        raise ValueError(
            f"bad_words must have at most {MAX_BAD_WORD_SPELLINGS} spellings each, got {len(bad_words)} in all"
        )
    if params.bad_words and not bad_words:
        raise ValueError(f"bad_words must have token ids, got none for {len(params.bad_words)} words")
    for word in bad_words:
        if not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
            raise ValueError(f"bad_words must be of 1 to {MAX_BAD_WORD_TOKENS} tokens each, got {len(word)}")
    total = sum(map(len, bad_words))
    if total > _MAX_BAD_TOKENS:
        raise ValueError(f"bad_words must be of at most {_MAX_BAD_TOKENS} tokens in all, got {total}; give fewer")
    for word in bad_words:
        # An array of objects, because the wire carries integers that do not fit into int64.
        _check_token_ids("bad_words", np.asarray(word, np.object_), vocab_size)


def _check_registered(params: SamplingParams, model: ModelConfig) -> None:
    """Raise ValueError for logits processors that the engine has not registered, and for arguments of none."""
    names = [registration.name for registration in registered(model.logits_processors)]
    for name in params.logits_processors or ():
        if name not in names:
            raise ValueError(
                f"logits_processors names {name!r}, and this engine has registered {', '.join(names) or 'none'}; start "
                f"it with logits_processors=['{name}=module:Class']"
            )
    arguments = params.extra_args or {}
    most = arguments.get(MAX_DRAFTS, 0)
    if type(most) is not int or most < 0:
        raise ValueError(f"extra_args[{MAX_DRAFTS!r}] must be an integer of at least 0, got {reprlib.repr(most)}")
    if arguments.keys() - {MAX_DRAFTS} and not names:
        raise ValueError(
            f"extra_args must be empty or have {MAX_DRAFTS!r} alone, because only logits processors read the rest and "
            "this engine has registered none; start it with logits_processors=['module:Class']"
        )


def _check_logprobs(params: SamplingParams, model: ModelConfig) -> None:
    vocab_size = model.architecture.vocab_size
    limit = vocab_size if model.max_logprobs == -1 else model.max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and (vocab_size if count == -1 else count) > limit:
            raise ValueError(
                f"{name} must be at most {limit}, got {count}; ask for fewer, or start the engine with a higher "
                "max_logprobs (-1: no limit)"
            )
