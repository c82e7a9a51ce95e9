"""Embeddings, classes and scores of prompts, for blocking callers."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from vllm_mp.arguments.unserved_arguments import accepts_unserved, check_unserved
from vllm_mp.arguments.unserved_table import CALL_ARGUMENTS
from vllm_mp.client.blocking.batch_inputs import prompts_of
from vllm_mp.client.blocking.blocking_engine import BlockingEngine
from vllm_mp.client.blocking.progress_bar import UseTqdm
from vllm_mp.client.prompts.prompt import PromptType
from vllm_mp.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestFailure,
    ScoringOutput,
    ScoringRequestOutput,
)
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.pooling_params import PoolingParams

_MIN_LENGTH = 1e-8
"""Lower bound of the product of lengths by which a dot product is divided, as in torch's CosineSimilarity."""


class PoolingCalls(BlockingEngine):
    """The calls of `LLM` that return no text."""

    @accepts_unserved("LLM.encode", CALL_ARGUMENTS)
    def encode(
        self,
        prompts: PromptType | Iterable[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput | RequestFailure]:
        """Return a vector for each prompt: its embedding, or with a classification model its classes.

        `pooling_task` is "embed" or "classify" and overrides this. Raises BatchDeadError if the core is gone for good.
        """
        params = _with_task(pooling_params, pooling_task)
        inputs = self._inputs(prompts_of(prompts), params, lora_request, None)
        requests = self._requests(self._engine.encode, inputs, tokenization_kwargs=tokenization_kwargs)
        return self._run(requests, inputs.total, use_tqdm)

    @accepts_unserved("LLM.embed", CALL_ARGUMENTS)
    def embed(
        self,
        prompts: PromptType | Iterable[PromptType],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput | RequestFailure]:
        """Return the embedding of each prompt."""
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="embed",
            tokenization_kwargs=tokenization_kwargs,
        )

    @accepts_unserved("LLM.classify", CALL_ARGUMENTS)
    def classify(
        self,
        prompts: PromptType | Iterable[PromptType],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput | RequestFailure]:
        """Return the probability of each class for each prompt. Raises ValueError if the model has no classes."""
        if not self.model_config.architecture.num_classes:
            raise ValueError(f"{self.model_config.model} has no classes; use a model for sequence classification")
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [output if isinstance(output, RequestFailure) else _classes(output) for output in outputs]

    @accepts_unserved("LLM.score", CALL_ARGUMENTS)
    def score(
        self,
        data_1: PromptType | Sequence[PromptType],
        data_2: PromptType | Sequence[PromptType],
        /,
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput | RequestFailure]:
        """Return the score of each pair of a text of `data_1` and the text of `data_2` with the same index.

        A single text of `data_1` belongs to all pairs. A cross-encoder, a model with a single class, reads both texts
        of a pair at once, as str. With other models the score is the cosine similarity of the embeddings.
        `lora_request` is one adapter for all. Raises ValueError for lists of different lengths, and for a model with
        several classes.
        """
        check_unserved(chat_template=chat_template)
        left, right = list(prompts_of(data_1)), list(prompts_of(data_2))
        if len(left) not in (1, len(right)):
            raise ValueError(f"data_1 must have 1 text or as many as data_2, {len(right)}, got {len(left)}")
        num_classes = self.model_config.architecture.num_classes
        if num_classes > 1:
            raise ValueError(f"{self.model_config.model} has {num_classes} classes, not a score; call classify()")
        if num_classes:
            pairs = zip(left * (len(right) if len(left) == 1 else 1), right, strict=True)
            return self._score_pairs(list(pairs), pooling_params, use_tqdm, lora_request, tokenization_kwargs)
        outputs = self.embed(
            left + right,
            use_tqdm=use_tqdm,
            pooling_params=pooling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        queries, texts = outputs[: len(left)], outputs[len(left) :]
        if len(queries) == 1:
            queries *= len(texts)
        return [_similarity(query, text) for query, text in zip(queries, texts, strict=True)]

    def _score_pairs(
        self,
        pairs: list[tuple[Any, Any]],
        pooling_params: PoolingParams | None,
        use_tqdm: UseTqdm,
        lora_request: LoRARequest | None,
        tokenization_kwargs: dict[str, Any] | None,
    ) -> list[ScoringRequestOutput | RequestFailure]:
        """Return the scores of pairs of texts by a cross-encoder. Raises TypeError unless all are str."""
        tokenizer, params = self.get_tokenizer(), _with_task(pooling_params, "classify")
        has_types = getattr(self.model_config.architecture, "num_token_types", 0) > 1
        options = {"return_token_type_ids": has_types, **(tokenization_kwargs or {})}
        if params.truncate_prompt_tokens is not None:
            limit = params.truncate_prompt_tokens
            options |= {"truncation": True, "max_length": self.model_config.max_model_len if limit == -1 else limit}
        prompts, of_pairs = [], []
        for pair in pairs:
            if not all(isinstance(text, str) for text in pair):
                raise TypeError(f"a cross-encoder scores pairs of str, got {pair!r:.200}")
            encoding = tokenizer(*pair, **options)
            prompts.append(encoding.input_ids)
            types = encoding.token_type_ids if has_types else []
            of_pairs.append(msgspec.structs.replace(params, second_text_at=types.index(1) if 1 in types else None))
        outputs = self.encode(prompts, of_pairs, use_tqdm=use_tqdm, lora_request=lora_request)
        return [output if isinstance(output, RequestFailure) else _score(output) for output in outputs]


def _with_task(params: Any, task: str | None) -> Any:
    """Return `params`, or a list of them, with this task unless it is None."""
    if isinstance(params, Sequence):
        return [_with_task(each, task) for each in params]
    if params is None:
        return PoolingParams(task=task)
    if not isinstance(params, PoolingParams):
        raise TypeError(f"pooling_params must be PoolingParams or a list of them, got {type(params).__name__}")
    if task is None:
        return params
    if params.task not in (None, task):
        raise ValueError(f"task must be {task!r} or None for this call, got {params.task!r}")
    return msgspec.structs.replace(params, task=task)


def _classes(output: PoolingRequestOutput) -> ClassificationRequestOutput:
    return ClassificationRequestOutput(
        output.request_id,
        ClassificationOutput(output.outputs.data.tolist()),
        output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )


def _score(output: PoolingRequestOutput) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        output.request_id,
        ScoringOutput(float(output.outputs.data[0])),
        output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )


def _similarity(
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
