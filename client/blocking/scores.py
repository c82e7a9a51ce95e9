"""Classes and scores of the vectors that a model makes."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from vllm_mp.client.engine.tokenization_options import tokenization_options
from vllm_mp.config import ModelConfig
from vllm_mp.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    PoolingRequestOutput,
    RequestFailure,
    ScoringOutput,
    ScoringRequestOutput,
)
from vllm_mp.requests.pooling_params import PoolingParams, check_task

_MIN_LENGTH = 1e-8
"""Lower bound of the product of lengths by which a dot product is divided, as in torch's CosineSimilarity."""


def with_task(params: Any, task: str | None) -> Any:
    """Return `params`, or a list of them, with this task unless it is None.

    Raises TypeError or ValueError for another task, which the caller gave as `pooling_task`, and for other parameters.
    """
    check_task("pooling_task", task)
    if isinstance(params, Sequence):
        return [with_task(each, task) for each in params]
    if params is None:
        return PoolingParams(task=task)
    if not isinstance(params, PoolingParams):
        raise TypeError(f"pooling_params must be PoolingParams or a list of them, got {type(params).__name__}")
    if task is None:
        return params
    if params.task not in (None, task):
        raise ValueError(f"task must be {task!r} or None for this call, got {params.task!r}")
    return msgspec.structs.replace(params, task=task)


def class_output(output: PoolingRequestOutput) -> ClassificationRequestOutput:
    return ClassificationRequestOutput(
        output.request_id,
        ClassificationOutput(output.outputs.data.tolist()),
        output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )


def score_output(output: PoolingRequestOutput) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        output.request_id,
        ScoringOutput(float(output.outputs.data[0])),
        output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )


def pair_prompts(
    pairs: list[tuple[Any, Any]],
    params: PoolingParams,
    tokenizer: Any,
    config: ModelConfig,
    tokenization_kwargs: dict[str, Any] | None,
) -> tuple[list[list[int]], list[PoolingParams]]:
    """Return the prompts, as token ids, and their parameters, with which a cross-encoder reads pairs of texts.

    Raises TypeError unless all are str.
    """
    has_types = getattr(config.architecture, "num_token_types", 0) > 1
    given = tokenization_options(tokenization_kwargs)
    if given.truncation_side == "left":
        raise ValueError("truncation_side must be 'right' for pairs of texts, got 'left'")
    params = given.truncated(params)
    options = {"return_token_type_ids": has_types, **given.of_tokenizer}
    if params.truncate_prompt_tokens is not None:
        limit = params.truncate_prompt_tokens
        options |= {"truncation": True, "max_length": config.max_model_len if limit == -1 else limit}
    prompts, params_of_pairs = [], []
    for pair in pairs:
        if not all(isinstance(text, str) for text in pair):
            raise TypeError(f"a cross-encoder scores pairs of str, got {pair!r:.200}")
        encoding = tokenizer(*pair, **options)
        prompts.append(encoding.input_ids)
        types = encoding.token_type_ids if has_types else []
        second_text_at = types.index(1) if 1 in types else None
        params_of_pairs.append(msgspec.structs.replace(params, second_text_at=second_text_at))
    return prompts, params_of_pairs


def similarity(
    query: PoolingRequestOutput | RequestFailure, text: PoolingRequestOutput | RequestFailure
) -> ScoringRequestOutput | RequestFailure:
    """Return the cosine similarity of two embeddings, or the failure of one of them."""
    if isinstance(query, RequestFailure):
        return query
    if isinstance(text, RequestFailure):
        return text
    a, b = (output.outputs.data.astype(np.float64) for output in (query, text))
    similarity = float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), _MIN_LENGTH))
    return ScoringRequestOutput(
        f"{query.request_id}_{text.request_id}",
        ScoringOutput(similarity),
        query.prompt_token_ids + text.prompt_token_ids,
    )
