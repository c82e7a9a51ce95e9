"""Requests that run in tasks of their own, and whose results are taken by id."""

import asyncio
import copy
import enum
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from vllm_mp.client.engine_client import EngineClient
from vllm_mp.client.prompts.prompt import PromptType, TokensPrompt
from vllm_mp.errors import DuplicateRequestIdError, EngineGenerateError
from vllm_mp.outputs import RequestOutput
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.sampling_params import RequestOutputKind, SamplingParams

_MAX_ENDED = 10_000
"""Number of ended requests whose status a manager keeps, and whose result if it has not been taken."""


class RequestStatus(str, enum.Enum):  # noqa: UP042, because str() of a StrEnum is another
    """The state of a request of a `RequestManager`."""

    WAITING = "waiting"
    """It has no output yet."""
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    """It was aborted. Its result is what it had by then."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StreamingRequest:
    """A request as a `RequestManager` is given it."""

    request_id: str
    prompt: str
    sampling_params: SamplingParams
    arrival_time: float
    """In seconds of `time.time()`."""
    lora_request: LoRARequest | None = None


class RequestManager:
    """Runs each request in a task of its own, whether or not a consumer waits for it.

        manager = RequestManager(engine)
        await manager.add_request("a", "Once upon a time", SamplingParams(max_tokens=50))
        result = await manager.get_result("a")

    The result is kept until `get_result` has returned it or `stream` has ended with it; all consumers that wait for
    the request at that moment receive it. Of requests that ended, the manager remembers the last 10,000. Its methods
    must be called in the event loop of the engine.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._requests: dict[str, _ManagedRequest] = {}
        """By id: the requests that run, or whose results have not been taken."""
        self._ended: dict[str, RequestStatus] = {}
        """By id: the statuses of ended requests, in the order of their ends."""

    async def add_request(
        self,
        request_id: str,
        prompt: str,
        sampling_params: SamplingParams,
        prompt_token_ids: list[int] | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Begin a request and return at once; `get_result` and `stream` raise the error of a request that cannot run.

        `AsyncLLM.generate` documents the arguments. The id of an ended request may be used again, and the ended
        request is forgotten then. Raises DuplicateRequestIdError if a request that runs has the id, and TypeError for
        other parameters than SamplingParams.
        """
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, got {type(sampling_params).__name__}")
        known = self._requests.get(request_id)
        if known is not None and not known.has_ended:
            raise DuplicateRequestIdError(f"request_id {request_id!r} is in use by a live request; choose another")
        self._ended.pop(request_id, None)
        arrival = time.time() if arrival_time is None else arrival_time
        managed = _ManagedRequest(StreamingRequest(request_id, prompt, sampling_params, arrival, lora_request))
        self._requests[request_id] = managed
        optional = {"arrival_time": arrival_time, "lora_request": lora_request}
        options = {name: value for name, value in optional.items() if value is not None}
        managed.task = asyncio.create_task(self._run(managed, prompt_token_ids, options))

    async def abort_request(self, request_id: str) -> None:
        """Abort a request and return when it has ended; no-op for an ended request.

        Raises KeyError for an unknown id.
        """
        self._status(request_id)
        managed = self._requests.get(request_id)
        if managed is None or (task := managed.task) is None:
            return
        managed.is_aborted = True
        await self._engine.abort(request_id)
        await asyncio.wait([task])

    async def get_request_status(self, request_id: str) -> RequestStatus:
        """Return the status of a request. Raises KeyError for an unknown id."""
        return self._status(request_id)

    async def get_result(self, request_id: str) -> RequestOutput:
        """Return the last output of a request when it has ended, with all tokens whatever its `output_kind`.

        Raises the error of a request that failed, EngineGenerateError for a request that was aborted before its first
        output, and KeyError for an unknown id and for a result that was taken.
        """
        managed = self._find(request_id)
        while not managed.has_ended:
            await managed.news.wait()
        self._drop_result(managed)
        return managed.result()

    result = get_result
    """The same method under a shorter name."""

    async def stream(self, request_id: str) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request, as its `output_kind` says, from its first token to its end.

        A slow consumer receives fewer and larger outputs. Leaving early does not abort the request. Raises what
        `get_result` raises.
        """
        managed = self._find(request_id)
        kind, shown = managed.request.sampling_params.output_kind, None
        while not managed.has_ended:
            output = managed.output
            if output is None or output is shown or kind == RequestOutputKind.FINAL_ONLY:
                await managed.news.wait()
            else:
                yield _since(shown, output) if kind == RequestOutputKind.DELTA else output
                shown = output
        self._drop_result(managed)
        output = managed.result()
        if output is not shown:
            yield _since(shown, output) if kind == RequestOutputKind.DELTA else output

    async def _run(
        self, managed: "_ManagedRequest", prompt_token_ids: list[int] | None, options: dict[str, Any]
    ) -> None:
        """Run a request to its end, and note its outputs or its error."""
        request, status = managed.request, RequestStatus.CANCELLED
        prompt: PromptType = request.prompt
        if prompt_token_ids is not None:
            prompt = TokensPrompt(prompt=request.prompt, prompt_token_ids=prompt_token_ids)
        try:
            params = request.sampling_params.clone()
            # Every output has all tokens, so the latest is the result, and the first tells that the request runs.
            params.output_kind = RequestOutputKind.CUMULATIVE
            if not managed.is_aborted:
                async for output in self._engine.generate(prompt, params, request.request_id, **options):
                    managed.note(output)
            if not managed.was_aborted():
                status = RequestStatus.COMPLETED
        except Exception as error:
            managed.error, status = error, RequestStatus.FAILED
        finally:
            managed.end(status)
            self._note_end(managed)

    def _note_end(self, managed: "_ManagedRequest") -> None:
        self._ended[managed.request.request_id] = managed.status
        if len(self._ended) > _MAX_ENDED:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._requests.pop(oldest, None)

    def _status(self, request_id: str) -> RequestStatus:
        if request_id in self._requests:
            return self._requests[request_id].status
        if request_id in self._ended:
            return self._ended[request_id]
        raise KeyError(f"no request has the id {request_id!r}, nor had any of the last {_MAX_ENDED} that ended")

    def _find(self, request_id: str) -> "_ManagedRequest":
        """Return a request whose result was not taken. Raises KeyError if there is none with this id."""
        status = self._status(request_id)
        if request_id not in self._requests:
            raise KeyError(f"the result of request {request_id!r}, which is {status.value}, was taken before; keep it")
        return self._requests[request_id]

    def _drop_result(self, managed: "_ManagedRequest") -> None:
        """Forget an ended request except for its status."""
        if self._requests.get(managed.request.request_id) is managed:
            del self._requests[managed.request.request_id]


class _ManagedRequest:
    """A request of a manager, and its outputs so far."""

    def __init__(self, request: StreamingRequest) -> None:
        self.request = request
        self.status = RequestStatus.WAITING
        self.task: asyncio.Task[None] | None = None
        """The task that runs the request; None after its end."""
        self.is_aborted = False
        """The manager was told to abort it."""
        self.output: RequestOutput | None = None
        """The latest output, which has all tokens so far."""
        self.error: Exception | None = None
        self.news = asyncio.Event()
        """Set, and replaced by another event, at each output and at the end."""

    @property
    def has_ended(self) -> bool:
        return self.status not in (RequestStatus.WAITING, RequestStatus.RUNNING)

    def note(self, output: RequestOutput) -> None:
        """Keep an output, and wake the consumers."""
        self.output, self.status = output, RequestStatus.RUNNING
        self._announce()

    def was_aborted(self) -> bool:
        """Return whether an abort ended the request, as its last output says."""
        return self.output is None or any(each.finish_reason == "abort" for each in self.output.outputs)

    def end(self, status: RequestStatus) -> None:
        """End the request, and wake the consumers."""
        self.status, self.task = status, None
        if self.output is None and self.error is None:
            self.error = EngineGenerateError(f"request {self.request.request_id} was aborted before its first output")
        self._announce()

    def result(self) -> RequestOutput:
        """Return the last output of the ended request. Raises the error if it failed."""
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output

    def _announce(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


def _since(shown: RequestOutput | None, output: RequestOutput) -> RequestOutput:
    """Return what `output` has beyond `shown`, an earlier output of the same request, as an output of kind DELTA."""
    if shown is None:
        return output
    delta = copy.copy(output)
    delta.prompt_logprobs = None
    delta.outputs = []
    for earlier, later in zip(shown.outputs, output.outputs, strict=True):
        num_tokens = len(earlier.token_ids)
        if earlier.finished() or (len(later.token_ids) == num_tokens and not later.finished()):
            continue
        completion = copy.copy(later)
        completion.text = later.text[len(earlier.text) :]
        completion.token_ids = later.token_ids[num_tokens:]
        completion.logprobs = None if later.logprobs is None else later.logprobs[num_tokens:]
        delta.outputs.append(completion)
    return delta
