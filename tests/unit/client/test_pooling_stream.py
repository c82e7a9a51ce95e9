"""One pooling request as its consumer sees it, and the book that feeds it."""

import asyncio

import numpy as np
import pytest

from vllm_mp import EngineDeadError, EngineGenerateError, PoolingParams, PoolingRequestOutput
from vllm_mp.client.outputs.output_processor import OutputProcessor
from vllm_mp.client.outputs.pooling_stream import PoolingStream
from vllm_mp.wire import Finished, StepOutput, pack_tokens

VECTOR = np.array([0.5, -1.5, 2.0], np.float32)


@pytest.fixture
def book():
    return OutputProcessor()


@pytest.fixture
def stream(book):
    stream = PoolingStream("id", "text", [1, 2], PoolingParams(), 5.0)
    book.reserve("id")
    book.enter(stream)
    return stream


def step(finished, vectors=(), cached=(), tokens=()):
    slots = np.zeros(len(tokens), np.int64)
    columns = pack_tokens(slots, np.array(tokens, np.int64), np.arange(len(tokens)))
    return StepOutput(1, 1, *columns, finished=list(finished), vectors=list(vectors), cached=list(cached))


def take(stream):
    return asyncio.run(stream.next())


def test_the_vector_is_the_only_output(book, stream):
    assert not book.take_in(step([Finished(0, 0, "stop")], [(0, VECTOR.astype("<f4").tobytes())], [(0, 16)]))
    output = take(stream)
    assert isinstance(output, PoolingRequestOutput)
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("id", "text", [1, 2])
    assert output.outputs.data.dtype == np.float32
    assert output.outputs.embedding == VECTOR.tolist()
    assert output.finished
    assert output.num_cached_tokens == 16
    assert output.metrics.finished_time is not None
    assert len(book) == book.num_slots_in_use == 0


def test_an_aborted_request_has_no_vector_to_yield(book, stream):
    book.end_by_abort(stream)
    with pytest.raises(EngineGenerateError, match="request id was aborted"):
        take(stream)
    assert book.num_slots_in_use == 1, "until the core answers"
    book.take_in(step([Finished(0, 0, "abort")]))
    assert book.num_slots_in_use == 0


def test_an_end_without_the_vector_is_an_error(book, stream):
    book.take_in(step([Finished(0, 0, "stop")]))
    with pytest.raises(EngineGenerateError, match="without its vector"):
        take(stream)


def test_what_the_core_refuses_is_told(book, stream):
    book.take_in(step([Finished(0, 0, "error", error="the vector is not finite")]))
    with pytest.raises(EngineGenerateError, match="not finite"):
        take(stream)


def test_the_end_of_the_core_is_the_end_of_the_stream(book, stream):
    book.fail_all(EngineDeadError("SIGKILL"))
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        take(stream)


def test_a_vector_that_comes_after_the_abort_changes_nothing(book, stream):
    book.end_by_abort(stream)
    book.take_in(step([Finished(0, 0, "stop")], [(0, VECTOR.tobytes())]))
    with pytest.raises(EngineGenerateError, match="aborted"):
        take(stream)
