"""A pooling request as its consumer sees it, and the output processor that feeds it."""

import asyncio

import numpy as np
import pytest

from vllm_mp import EngineDeadError, EngineGenerateError, PoolingParams, PoolingRequestOutput
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.pooling_stream import PoolingStream
from vllm_mp.client.prompts.request import PoolingRequest
from vllm_mp.wire import Finished, StepOutput, pack_ids, pack_tokens

VECTOR = np.array([0.5, -1.5, 2.0], np.float32)


@pytest.fixture
def processor():
    return OutputProcessor()


@pytest.fixture
def stream(processor):
    stream = PoolingStream(PoolingRequest("id", "text", [1, 2], pack_ids([1, 2]), PoolingParams(), 5.0))
    processor.requests.reserve("id")
    processor.enter(stream)
    return stream


def step(finished, vectors=(), cached=(), tokens=()):
    slots = np.zeros(len(tokens), np.int64)
    columns = pack_tokens(slots, np.array(tokens, np.int64), np.arange(len(tokens)))
    return StepOutput(1, 1, *columns, finished=list(finished), vectors=list(vectors), cached=list(cached))


def take(stream):
    return asyncio.run(stream.next())


def test_vector_is_the_only_output(processor, stream):
    assert not processor.process(step([Finished(0, 0, "stop")], [(0, VECTOR.astype("<f4").tobytes())], [(0, 16)]))
    output = take(stream)
    assert isinstance(output, PoolingRequestOutput)
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("id", "text", [1, 2])
    assert output.outputs.data.dtype == np.float32
    assert output.outputs.embedding == VECTOR.tolist()
    assert output.finished
    assert output.num_cached_tokens == 16
    assert output.metrics.finished_time is not None
    assert len(processor.requests) == processor.num_slots_in_use == 0


def test_aborted_request_raises_because_it_has_no_vector(processor, stream):
    processor.abort(stream.request_id)
    with pytest.raises(EngineGenerateError, match="request id was aborted"):
        take(stream)
    assert processor.num_slots_in_use == 1, "until the core answers"
    processor.process(step([Finished(0, 0, "abort")]))
    assert processor.num_slots_in_use == 0


def test_end_without_the_vector_is_an_error(processor, stream):
    processor.process(step([Finished(0, 0, "stop")]))
    with pytest.raises(EngineGenerateError, match="without its vector"):
        take(stream)


def test_refusal_of_the_core_reaches_the_consumer(processor, stream):
    processor.process(step([Finished(0, 0, "error", error="the vector is not finite")]))
    with pytest.raises(EngineGenerateError, match="not finite"):
        take(stream)


def test_end_of_the_core_ends_the_stream(processor, stream):
    processor.fail_all(EngineDeadError("SIGKILL"))
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        take(stream)


def test_vector_that_arrives_after_the_abort_is_ignored(processor, stream):
    processor.abort(stream.request_id)
    processor.process(step([Finished(0, 0, "stop")], [(0, VECTOR.tobytes())]))
    with pytest.raises(EngineGenerateError, match="aborted"):
        take(stream)


def test_tokens_for_the_slot_of_a_vector_are_ignored(processor, stream):
    assert not processor.process(step([], tokens=[7]))
    assert not processor.process(step([Finished(0, 0, "stop")], [(0, VECTOR.tobytes())]))
    assert take(stream).outputs.data.tolist() == VECTOR.tolist()


def test_vector_of_a_wrong_length_fails_the_request(processor, stream):
    assert processor.process(step([], [(0, VECTOR.tobytes()[:-1])])) == [0]
    with pytest.raises(EngineGenerateError, match="request id"):
        take(stream)
