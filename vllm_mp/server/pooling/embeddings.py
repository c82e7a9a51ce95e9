"""The endpoints /v1/embeddings and /pooling: a vector for each input."""

import asyncio
import base64
import time
from typing import Any, Literal, cast

import msgspec
import numpy as np
from starlette.responses import Response

from vllm_mp.outputs import PoolingRequestOutput
from vllm_mp.server.http.endpoint import Call, json_response, post
from vllm_mp.server.openai.models import check_model
from vllm_mp.server.pooling.inputs import InputBody, adds_special_tokens, input_prompts
from vllm_mp.server.pooling.running import PoolingUsage, pooling_params, run

_VECTORS_PER_TURN = 16
"""Vectors that become JSON before other tasks get a turn on the event loop."""


class EmbeddingsBody(InputBody, kw_only=True):
    """A request for vectors."""

    encoding_format: Literal["float", "base64"] | None = None
    """ "base64" stands for the bytes of the vector, by default in little-endian float32; default: "float"."""
    embed_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """The type of each component in base64; default: "float32"."""
    endianness: Literal["native", "little", "big"] | None = None
    """The order of the bytes of each component in base64; "native" is the server's; default: "little"."""
    dimensions: int | None = None
    """Keep that many leading components."""
    normalize: bool | None = None
    """Scale the vector to length 1; default: unless the model says otherwise."""
    pooling_type: str | None = None
    """ "last", "mean" or "cls"; default: what the model says."""


class VectorsBody(EmbeddingsBody, kw_only=True):
    """A request for vectors of what the model is made for: embeddings, or the outputs for its classes."""

    task: Literal["embed", "classify"] | None = None
    """Default: what the model is made for."""
    use_activation: bool | None = None
    """False: the outputs for classes as they are, instead of probabilities."""


class Embedding(msgspec.Struct):
    """The vector of an input."""

    index: int
    """The index of the input in the request."""
    embedding: list[float] | str
    object: str = "embedding"


class Vector(msgspec.Struct):
    """The vector of an input."""

    index: int
    """The index of the input in the request."""
    data: list[float] | str
    object: str = "pooling"


class EmbeddingsResponse(msgspec.Struct, kw_only=True):
    """The vectors in the order of the inputs."""

    id: str
    object: str = "list"
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class VectorsResponse(msgspec.Struct, kw_only=True):
    """The vectors in the order of the inputs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Vector]
    usage: PoolingUsage


async def create_embeddings(call: Call, body: EmbeddingsBody) -> Response:
    """Return the vectors of all inputs; an input that fails ends the request, and aborts the others."""
    request_id = f"embd-{call.request_id}"
    name, outputs = await _outputs(call, body, request_id, task="embed")
    response = EmbeddingsResponse(
        id=request_id,
        model=name,
        data=cast("list[Embedding]", await _encoded(outputs, body, Embedding)),
        usage=PoolingUsage.of(outputs),
    )
    return json_response(response)


async def create_vectors(call: Call, body: VectorsBody) -> Response:
    """Return the vectors of all inputs: embeddings, or with a model that has classes its outputs for them."""
    request_id = f"pool-{call.request_id}"
    name, outputs = await _outputs(call, body, request_id)
    response = VectorsResponse(
        id=request_id,
        created=int(time.time()),
        model=name,
        data=cast("list[Vector]", await _encoded(outputs, body, Vector)),
        usage=PoolingUsage.of(outputs),
    )
    return json_response(response)


async def _outputs(
    call: Call, body: EmbeddingsBody, request_id: str, **own: str
) -> tuple[str, list[PoolingRequestOutput]]:
    """Return the name of the model and its outputs; `own` are parameters that the endpoint sets."""
    model = check_model(call.server, body.model)
    inputs = await input_prompts(call, body, pooling_params(body, **own))
    return model.name, await run(call, body, request_id, inputs, model.lora, adds_special_tokens(body))


async def _encoded(
    outputs: list[PoolingRequestOutput], body: EmbeddingsBody, kind: type[Embedding] | type[Vector]
) -> list[msgspec.Raw]:
    """Return the JSON of each vector."""
    encoder = msgspec.json.Encoder()
    data: list[msgspec.Raw] = []
    for index, output in enumerate(outputs):
        if index % _VECTORS_PER_TURN == _VECTORS_PER_TURN - 1:
            await asyncio.sleep(0)
        vector = output.outputs.data
        as_base64 = body.encoding_format == "base64"
        values = base64.b64encode(_vector_bytes(vector, body)).decode() if as_base64 else vector.tolist()
        data.append(msgspec.Raw(encoder.encode(kind(index, values))))
    return data


def _vector_bytes(vector: np.ndarray[Any, Any], body: EmbeddingsBody) -> bytes:
    """Return the components of `vector` in the type and the order of bytes that `body` asks for."""
    values = vector.astype(np.float32)
    if body.embed_dtype == "float16":
        with np.errstate(over="ignore"):  # larger components become infinite
            values = values.astype(np.float16)
    elif body.embed_dtype == "bfloat16":
        bits = values.view(np.uint32)
        values = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # to nearest, ties to even
    return values.astype(values.dtype.newbyteorder(body.endianness or "little")).tobytes()


ROUTES = [
    post("/v1/embeddings", create_embeddings, EmbeddingsBody, EmbeddingsResponse),
    post("/pooling", create_vectors, VectorsBody, VectorsResponse),
]
