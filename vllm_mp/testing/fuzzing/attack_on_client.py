"""A campaign against a client: its core sends hostile frames, which its well-behaved streams must not notice."""

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import zmq

from vllm_mp import AsyncEngineArgs, AsyncLLM, PoolingParams, RequestOutputKind, SamplingParams, wire
from vllm_mp.errors import EngineDeadError, EngineError
from vllm_mp.testing.engines import ENGINE
from vllm_mp.testing.fuzzing.attack_on_core import MEMORY_MARGIN
from vllm_mp.testing.fuzzing.core_frames import CoreFrames
from vllm_mp.testing.fuzzing.report import CampaignReport

_INCARNATION = 7
_NUM_CALM, _NUM_VICTIMS = 8, 24
_BURST = 250
"""Hostile messages for each valid one."""
_BURSTS_PER_PHASE = 40
_TIMEOUT_S = 60.0
_CALM, _VICTIM = "calm ", "victim "
_VICTIM_PARAMS: tuple[Any, ...] = (
    SamplingParams(max_tokens=None),
    SamplingParams(max_tokens=None, output_kind=RequestOutputKind.DELTA, stop=["\n\n", "xyz"]),
    SamplingParams(max_tokens=None, logprobs=1, prompt_logprobs=1),
    SamplingParams(max_tokens=None, logprobs=1, stop="xyz", output_kind=RequestOutputKind.FINAL_ONLY),
    SamplingParams(max_tokens=None, n=3, logprobs=0),
    SamplingParams(max_tokens=None, detokenize=False),
    PoolingParams(),
)


def calm_token(request_id: str, position: int) -> int:
    """Return the token of a calm request at `position`."""
    return (int(request_id.removeprefix(_CALM)) * 1009 + position * 31 + 5) % 49152


class HostileCore:
    """Serves calm requests correctly and sends hostile messages about all others. Runs in a thread of its own.

    It sends a burst of messages before it answers a ping, so the client is never far behind.
    """

    def __init__(self, address: str, config: bytes, seed: int, vocab_size: int, report: CampaignReport) -> None:
        self.is_ending = False
        """Pings finish all requests properly instead of triggering bursts."""
        self.num_calm_tokens: dict[str, int] = {}
        """By request id, the tokens that were sent for each calm request that has ended."""
        self._config = config
        self._report = report
        self._frames = CoreFrames(seed, _INCARNATION, vocab_size)
        self._calm: dict[int, tuple[str, int]] = {}
        self._victims: dict[int, int] = {}
        self._is_closed = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.bind(address)
        self._identity = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join(_TIMEOUT_S)
        self._socket.close(linger=0)
        self._context.term()

    def _run(self) -> None:
        while not self._is_closed:
            while self._socket.poll(50):
                self._identity, frame = self._socket.recv_multipart()
                self._handle(wire.decode_client_message(frame))

    def _handle(self, message: wire.ClientMessage) -> None:
        if isinstance(message, wire.Hello):
            self._send(wire.welcome(_INCARNATION, 0, 1, self._config))
        elif isinstance(message, wire.AddRequest) and message.request_id.startswith(_CALM):
            self._calm[message.slot] = message.request_id, 0
        elif isinstance(message, wire.AddRequest | wire.AddPooling):
            self._victims[message.slot] = 0
        elif isinstance(message, wire.AbortRequests):
            ends = [
                wire.Finished(slot, self._victims.pop(slot), "abort") for slot in {*message.slots} & {*self._victims}
            ]
            self._send(wire.StepOutput(_INCARNATION, 1, b"", b"", b"", ends))
        elif isinstance(message, wire.Call):
            if self.is_ending:
                self._end_all()
            else:
                self._burst()
            self._send(wire.Reply(_INCARNATION, message.call_id))

    def _send(self, message: wire.CoreMessage) -> None:
        self._socket.send_multipart((self._identity, wire.encode(message)))

    def _burst(self) -> None:
        for _ in range(_BURST if self._victims else 0):
            hostile = self._frames.draw(self._victims, self._calm)
            self._socket.send_multipart((self._identity, *hostile.frames))
            self._report.sent[hostile.kind] += 1
        self._answer_calm([])

    def _answer_calm(self, finished: list[wire.Finished]) -> None:
        """Send one token with its log-probability for every calm request."""
        if not self._calm:
            return
        rows = [(slot, calm_token(request_id, at), at) for slot, (request_id, at) in self._calm.items()]
        columns = [np.array(column, np.int64) for column in zip(*rows, strict=True)]
        logprobs = [
            wire.TokenLogprobs(
                slot, at, np.array([token], "<i4").tobytes(), np.array([-at], "<f4").tobytes(), b"\x01\0\0\0"
            )
            for slot, token, at in rows
        ]
        output = wire.StepOutput(_INCARNATION, 1, *wire.pack_tokens(*columns), finished, logprobs=logprobs)
        self._calm = {slot: (request_id, at + 1) for slot, (request_id, at) in self._calm.items()}
        self._send(output)

    def _end_all(self) -> None:
        self.num_calm_tokens |= {request_id: at + 1 for request_id, at in self._calm.values()}
        self._answer_calm([wire.Finished(slot, at + 1, "length") for slot, (_, at) in self._calm.items()])
        ends = [wire.Finished(slot, count, "length") for slot, count in self._victims.items()]
        self._send(wire.StepOutput(_INCARNATION, 1, b"", b"", b"", ends))
        self._calm, self._victims = {}, {}


class _Watch(logging.Handler):
    """Watches the client's log: a refused message may raise ValueError, and nothing else."""

    def __init__(self, report: CampaignReport) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._report.answers["logged"] += 1
        if error is not None and not isinstance(error, ValueError):
            self._report.breaches.append(f"a message was refused with {error!r}: {logging.Formatter().format(record)}")


async def attack_client(
    folder: Path, num_messages: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> CampaignReport:
    """Send `num_messages` hostile messages to a client while its calm streams go on. Call `say` about the progress."""
    report, address = CampaignReport(), f"ipc://{folder}/hostile.sock"
    config = AsyncEngineArgs(**{**ENGINE, "max_model_len": 8192}).create_engine_config()
    vocab_size = config.model_config.get_vocab_size()
    core = HostileCore(address, msgspec.json.encode(config), seed, vocab_size, report)
    watch, logger = _Watch(report), logging.getLogger("vllm_mp")
    logger.addHandler(watch)
    propagates, logger.propagate = logger.propagate, False
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: report.breaches.append(f"the event loop reports {context}")
    )
    engine = AsyncLLM.connect(address, tokenizer=config.model_config.tokenizer)
    began = time.monotonic()
    try:
        for phase in itertools.count():
            try:
                await _phase(engine, core, phase, report)
            finally:
                report.after = _holdings(engine)
                report.before = report.before or report.after
            if phase % 10 == 9:
                say(
                    f"{report.num_sent:,} sent, {report.calm_answers:,} calm completions, "
                    f"{len(report.breaches)} breaches"
                )
            if report.num_sent >= num_messages:
                break
    except TimeoutError:
        report.breaches.append(f"streams did not end within {_TIMEOUT_S:g} s")
    except EngineDeadError as error:
        report.breaches.append(f"the engine is gone: {error}")
    finally:
        report.seconds = time.monotonic() - began
        engine.shutdown()
        core.close()
        logger.removeHandler(watch)
        logger.propagate = propagates
    if report.after["bytes of memory"] > report.before["bytes of memory"] + MEMORY_MARGIN:
        report.breaches.append("the client grew")
    if report.after["slots"]:
        report.breaches.append(f"{report.after['slots']} slots were not released")
    return report


def _holdings(engine: AsyncLLM) -> dict[str, int]:
    process = psutil.Process()
    return {
        "bytes of memory": process.memory_info().rss,
        "descriptors": process.num_fds(),
        "slots": engine.output_processor.num_slots_in_use,
        "messages dropped": engine.cores.first.supervisor.core.connection.num_dropped,
    }


async def _phase(engine: AsyncLLM, core: HostileCore, phase: int, report: CampaignReport) -> None:
    """Run calm streams from start to end, beside victims."""
    core.is_ending = False
    kinds = list(RequestOutputKind)
    calm = []
    for i in range(_NUM_CALM):
        params = SamplingParams(max_tokens=None, ignore_eos=True, logprobs=0, output_kind=kinds[i % len(kinds)])
        request_id = f"{_CALM}{phase * _NUM_CALM + i}"
        stream = await engine.add_request(request_id, {"prompt_token_ids": [1, 2, 3]}, params)
        calm.append(asyncio.create_task(_read_calm(stream, request_id, core, report)))
    victims = [asyncio.create_task(_be_a_victim(engine, core, i, report)) for i in range(_NUM_VICTIMS)]
    for _ in range(_BURSTS_PER_PHASE):
        await _ping(engine)
    core.is_ending = True
    async with asyncio.timeout(_TIMEOUT_S):
        while not all(task.done() for task in victims):
            await _ping(engine)
        await asyncio.gather(*victims, *calm)


async def _ping(engine: AsyncLLM) -> None:
    with contextlib.suppress(EngineError):
        await engine.check_health()
    await asyncio.sleep(0)


async def _read_calm(stream: Any, request_id: str, core: HostileCore, report: CampaignReport) -> None:
    """Read a calm stream, which must have all that the core has sent for it, with a token for each burst or more.

    The client pings by itself when the core is silent for a second, so the number of bursts depends on the load.
    """
    token_ids: list[int] = []
    num_logprobs = 0
    try:
        async for output in stream:
            completion = output.outputs[0]
            new_ids, num_new = completion.token_ids, len(completion.logprobs)
            delta = num_new == len(new_ids) and token_ids and new_ids[0] != token_ids[0]
            token_ids = token_ids + new_ids if delta else new_ids
            num_logprobs = num_logprobs + num_new if delta else num_new
            reason = completion.finish_reason
    except Exception as error:
        report.breaches.append(f"{request_id} failed: {error!r}")
        return
    num_sent = core.num_calm_tokens.pop(request_id, 0)
    expected = [calm_token(request_id, position) for position in range(num_sent)]
    if num_sent <= _BURSTS_PER_PHASE or (token_ids, num_logprobs, reason) != (expected, num_sent, "length"):
        report.breaches.append(f"{request_id} has {token_ids}, {num_logprobs} log-probabilities, {reason}")
    report.calm_answers += 1


async def _be_a_victim(engine: AsyncLLM, core: HostileCore, index: int, report: CampaignReport) -> None:
    """Send one request after another until the engine is gone. Each must end with outputs or with an EngineError."""
    for count in itertools.count():
        if core.is_ending:
            return
        request_id, params = f"{_VICTIM}{index} {count}", _VICTIM_PARAMS[(index + count) % len(_VICTIM_PARAMS)]
        try:
            async for _ in await engine.add_request(request_id, {"prompt_token_ids": [1, 2, 3]}, params):
                pass
            report.answers["victim ended"] += 1
        except EngineDeadError as error:  # later requests would end at once, and let no other task run
            report.breaches.append(f"{request_id} lost the engine: {error!r}")
            return
        except EngineError:
            report.answers["victim failed"] += 1
        except Exception as error:
            report.breaches.append(f"{request_id} with {params} raised {error!r}")
