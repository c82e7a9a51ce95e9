"""The endpoint /classify: the class of each text."""

import functools
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from starlette.responses import Response

from vllm_mp.model_store.hf_config import read_hf_config
from vllm_mp.server.http.endpoint import Call, json_response, post
from vllm_mp.server.http.errors import ApiError
from vllm_mp.server.openai.models import check_model
from vllm_mp.server.pooling.inputs import InputBody, adds_special_tokens, input_prompts
from vllm_mp.server.pooling.running import PoolingUsage, pooling_params, run


class ClassifyBody(InputBody, kw_only=True):
    """A request for the classes of texts."""

    use_activation: bool | None = None
    """False: the outputs for the classes as they are, instead of probabilities."""


class Classification(msgspec.Struct, kw_only=True):
    """The class of an input."""

    index: int
    label: str
    """The most likely class."""
    probs: list[float]
    """The probability of each class, in the order of the model's configuration."""
    num_classes: int


class ClassifyResponse(msgspec.Struct, kw_only=True):
    """The classes in the order of the inputs."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage


async def classify(call: Call, body: ClassifyBody) -> Response:
    """Return the class of each text."""
    model = check_model(call.server, body.model)
    config = call.server.engine.model_config
    if not config.architecture.num_classes:
        raise ApiError(400, f"{model.name} has no classes; use a model for sequence classification", param="model")
    request_id = f"classify-{call.request_id}"
    params = pooling_params(body, task="classify")
    inputs = await input_prompts(call, body, params)
    outputs = await run(call, body, request_id, inputs, model.lora, adds_special_tokens(body))
    labels = _labels(config.folder, config.load_format, config.architecture.num_classes)
    data = []
    for index, output in enumerate(outputs):
        values = output.outputs.data.tolist()
        label = labels[int(output.outputs.data.argmax())]
        data.append(Classification(index=index, label=label, probs=values, num_classes=len(values)))
    usage = PoolingUsage.of(outputs)
    response = ClassifyResponse(id=request_id, created=int(time.time()), model=model.name, data=data, usage=usage)
    return json_response(response)


@functools.lru_cache(maxsize=1)
def _labels(folder: Path, load_format: str, count: int) -> Sequence[str]:
    """Return the names of the classes, from config.json; those of transformers' defaults without it."""
    try:
        names = read_hf_config(folder, load_format).get("id2label") or {}
    except (OSError, ValueError):  # the folder may be on another machine
        names = {}
    return [str(names.get(str(index), f"LABEL_{index}")) for index in range(count)]


ROUTES = [post("/classify", classify, ClassifyBody, ClassifyResponse)]
