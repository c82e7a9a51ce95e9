"""The endpoints for scores of pairs of texts, and for the order of documents by their score."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from vllm_mp.client.blocking.scores import pair_prompts, similarity
from vllm_mp.client.prompts.prompt import TextPrompt, TokensPrompt
from vllm_mp.client.threads.background_call import call_in_thread
from vllm_mp.outputs import PoolingRequestOutput, ScoringRequestOutput
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.server.http.body import Ignored, RequestBody
from vllm_mp.server.http.endpoint import Call, json_response, post
from vllm_mp.server.http.errors import ApiError, as_refusal
from vllm_mp.server.openai.models import check_model
from vllm_mp.server.pooling.running import MAX_INPUTS, Inputs, PoolingBody, PoolingUsage, pooling_params, run

_Texts = str | list[str]


class ScoreBody(PoolingBody, kw_only=True):
    """A request for scores. A single first text belongs to all second texts."""

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    """Another name of `text_1`."""
    documents: _Texts | None = None
    """Another name of `text_2`."""
    items: _Texts | None = None
    """Another name of `text_2`."""
    data_1: _Texts | None = None
    """Another name of `text_1`."""
    data_2: _Texts | None = None
    """Another name of `text_2`."""
    use_activation: bool | None = None
    """False: the output of a cross-encoder as it is, instead of a probability."""


class Document(RequestBody):
    """A text to be ordered."""

    text: str


class RerankBody(PoolingBody, kw_only=True):
    """A request for the documents that fit a query best."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    """Return that many documents; default: all."""
    return_documents: bool | None = None
    """False: return indices and scores only."""
    use_activation: bool | None = None
    """False: the output of a cross-encoder as it is, instead of a probability."""
    rank_fields: Ignored = None
    max_chunks_per_doc: Ignored = None
    max_tokens_per_doc: Ignored = None


class Score(msgspec.Struct):
    """The score of a pair."""

    index: int
    score: float
    object: str = "score"


class ScoreResponse(msgspec.Struct, kw_only=True):
    """The scores in the order of the pairs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A document with its score."""

    index: int
    """Its index in the request."""
    relevance_score: float
    document: Document | None = None


class RerankResponse(msgspec.Struct, kw_only=True):
    """The documents, the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PoolingUsage


async def score(call: Call, body: ScoreBody) -> Response:
    """Return the score of each pair of texts."""
    model = check_model(call.server, body.model)
    first_name, first = _given(body, ("text_1", "queries", "data_1"))
    second_name, second = _given(body, ("text_2", "documents", "items", "data_2"))
    if len(first) not in (1, len(second)):
        message = f"{first_name} must have 1 text or as many as {second_name}, {len(second)}, got {len(first)}"
        raise ApiError(400, message, param=first_name)
    request_id = f"score-{call.request_id}"
    scores, usage = await _scores(call, body, request_id, (first_name, first), (second_name, second), model.lora)
    data = [Score(index, value) for index, value in enumerate(scores)]
    response = ScoreResponse(id=request_id, created=int(time.time()), model=model.name, data=data, usage=usage)
    return json_response(response)


async def rerank(call: Call, body: RerankBody) -> Response:
    """Return the documents that fit a query best, the best first."""
    model = check_model(call.server, body.model)
    if body.top_n is not None and body.top_n < 0:
        raise ApiError(400, f"top_n must be at least 0, got {body.top_n}; 0 returns all documents", param="top_n")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    request_id = f"rerank-{call.request_id}"
    query = ("query", [body.query])
    scores, usage = await _scores(call, body, request_id, query, ("documents", texts), model.lora)
    # Of equal scores, the document that was given first is first.
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
    shows_documents = body.return_documents is not False
    results = [
        RankedDocument(
            index=index,
            relevance_score=scores[index],
            document=Document(text=texts[index]) if shows_documents else None,
        )
        for index in order
    ]
    response = RerankResponse(id=request_id, model=model.name, results=results, usage=usage)
    return json_response(response)


def _given(body: ScoreBody, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return the texts of one side, and the name under which they were given. Raises ApiError unless there is one."""
    given = {name: value for name in names if (value := getattr(body, name)) is not None}
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise ApiError(400, f"give one of {', '.join(names)}, got {found}", param=names[0])
    ((name, value),) = given.items()
    return name, [value] if isinstance(value, str) else value


async def _scores(
    call: Call,
    body: PoolingBody,
    request_id: str,
    first: tuple[str, list[str]],
    second: tuple[str, list[str]],
    lora: LoRARequest | None,
) -> tuple[list[float], PoolingUsage]:
    """Return the score of each pair, and the tokens that were read; `first` and `second` have names and texts.

    A cross-encoder, a model with a single class, reads both texts of a pair at once. With other models the score is the
    cosine similarity of the embeddings.
    """
    for name, texts in (first, second):
        if not texts:
            raise ApiError(400, f"{name} is empty; give at least one text", param=name)
        if len(texts) > MAX_INPUTS:
            message = f"{name} must hold at most {MAX_INPUTS} texts, got {len(texts)}; send fewer"
            raise ApiError(400, message, param=name)
    num_classes = call.server.engine.model_config.architecture.num_classes
    if num_classes > 1:
        message = f"the model has {num_classes} classes, not a score; use /classify"
        raise ApiError(400, message, param="model")
    salt = call.tenant.cache_salt(body.cache_salt)
    if num_classes:
        inputs = await _pairs(call, body, first[1], second, salt)
        outputs = await run(call, body, request_id, inputs, lora)
        return [float(output.outputs.data[0]) for output in outputs], PoolingUsage.of(outputs)
    params = pooling_params(body, task="embed", use_activation=None)
    paths = [f"{name}[{index}]" for name, texts in (first, second) for index in range(len(texts))]
    prompts = [TextPrompt(prompt=text, cache_salt=salt) for text in first[1] + second[1]]
    vectors = await run(call, body, request_id, Inputs(prompts, [params] * len(prompts), paths), lora)
    queries, texts_read = vectors[: len(first[1])], vectors[len(first[1]) :]
    return _similarities(queries, texts_read), PoolingUsage.of(vectors)


async def _pairs(call: Call, body: PoolingBody, queries: list[str], second: tuple[str, list[str]], salt: str) -> Inputs:
    """Return the pairs as a cross-encoder reads them."""
    name, texts = second
    pairs = list(zip(queries * (len(texts) if len(queries) == 1 else 1), texts, strict=True))
    params = pooling_params(body, task="classify")
    engine = call.server.engine

    def tokenize() -> tuple[list[list[int]], list[Any]]:
        return pair_prompts(pairs, params, engine.get_tokenizer(), engine.model_config, None)

    try:
        token_ids, params_of_pairs = await call_in_thread(tokenize)
    except (ValueError, TypeError) as error:
        raise as_refusal(error) from None
    prompts = [TokensPrompt(prompt_token_ids=ids, cache_salt=salt) for ids in token_ids]
    return Inputs(prompts, params_of_pairs, [f"{name}[{index}]" for index in range(len(texts))])


def _similarities(queries: list[PoolingRequestOutput], texts: list[PoolingRequestOutput]) -> list[float]:
    if len(queries) == 1:
        queries *= len(texts)
    found = [similarity(query, text) for query, text in zip(queries, texts, strict=True)]
    return [pair.outputs.score for pair in found if isinstance(pair, ScoringRequestOutput)]


ROUTES = [
    *(post(path, score, ScoreBody, ScoreResponse) for path in ("/score", "/v1/score")),
    *(post(path, rerank, RerankBody, RerankResponse) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
]
