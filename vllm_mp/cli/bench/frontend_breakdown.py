"""What each part of the client's output path costs, measured part by part on the frames of a replay core."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_mp import wire
from vllm_mp.client.outputs import Completion, GenerationStream, IncrementalDetokenizer, OutputProcessor, output_path
from vllm_mp.client.outputs.stream import ReadyStreams
from vllm_mp.client.prompts.request import GenerationRequest
from vllm_mp.replay_core.answers import Answers
from vllm_mp.replay_core.streams import Streams
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams

_PROMPT = [300]


def breakdown(tokenizer: Any, num_streams: int, num_tokens: int) -> dict[str, float]:
    """Return the microseconds of processor time per token of each part, for streams in DELTA mode in a group."""
    frames = _frames(num_streams, num_tokens)
    total = num_streams * (num_tokens - 1)
    decode = _time(lambda: [wire.decode_core_message(frame) for frame in frames])
    messages: Any = [wire.decode_core_message(frame) for frame in frames]
    processor, _ = _group(None, num_streams, num_tokens)
    take_in = _time(lambda: [processor.process(message) for message in messages])
    without_text = _outputs_s(None, num_streams, num_tokens, messages)
    _outputs_s(tokenizer, num_streams, num_tokens, messages)  # the texts of single tokens are remembered after this
    with_text = _outputs_s(tokenizer, num_streams, num_tokens, messages)
    seconds = {
        "decoding the message": decode,
        "taking tokens in": take_in,
        "making outputs": without_text,
        "text": with_text - without_text,
    }
    return {name: 1e6 * part / total for name, part in seconds.items()}


def _frames(num_streams: int, num_tokens: int) -> list[bytes]:
    """Return the messages of all steps but the last, which also has the ends."""
    answers = Answers()
    live = Streams(answers)
    params = SamplingParams(temperature=0, ignore_eos=True)
    for slot in range(num_streams):
        live.add(slot, answers.choose(np.asarray([slot], np.int32), params, num_tokens, []), 0)
    return [wire.encode(live.step(1, step)) for step in range(1, num_tokens)]


def _group(tokenizer: Any, num_streams: int, num_tokens: int) -> tuple[OutputProcessor, ReadyStreams]:
    """Return an output processor with a stream in each of its slots, and their group; no text without `tokenizer`."""
    processor, ready = OutputProcessor(), ReadyStreams()
    params = SamplingParams(max_tokens=num_tokens, output_kind=RequestOutputKind.DELTA)
    for number in range(num_streams):
        request = GenerationRequest(str(number), None, _PROMPT, wire.pack_ids(_PROMPT), params, 0.0)
        detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, _PROMPT)
        stream = GenerationStream(request, [Completion(0, params, detokenizer)])
        processor.requests.reserve(stream.request_id)
        processor.enter(stream)
        stream.group = ready
    return processor, ready


def _outputs_s(tokenizer: Any, num_streams: int, num_tokens: int, messages: list[Any]) -> float:
    """Return the processor seconds that it takes to make the outputs of all messages, one for each token."""
    processor, ready = _group(tokenizer, num_streams, num_tokens)
    spent = 0.0

    def take(stream: Any) -> Any:
        stream.is_ready = False
        return stream.take()

    for message in messages:
        processor.process(message)
        start = time.thread_time()
        output_path.current.take_outputs(ready.take(), take)
        spent += time.thread_time() - start
    return spent


def _time(call: Callable[[], Any]) -> float:
    """Return the processor seconds of a call."""
    start = time.thread_time()
    call()
    return time.thread_time() - start
