"""Frames that no well-behaved core sends: valid frames with errors in their bytes, structure or values.

A seed always gives the same frames.
"""

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Callable, Container
from typing import Any

import msgspec
import numpy as np

from vllm_mp import wire
from vllm_mp.testing.fuzzing.mutation import UNENCODABLE, HostileMessage, Mutator


class CoreFrames:
    """Frames of a hostile core for its client."""

    def __init__(self, seed: int, incarnation: int, vocab_size: int) -> None:
        self._chance = random.Random(seed)
        self._mutator = Mutator(self._chance)
        self._incarnation = incarnation
        self._vocab_size = vocab_size
        self._recent: deque[bytes] = deque([msgspec.msgpack.encode([18, 0, 0, b"", b"", b""])], maxlen=64)
        self._kinds: dict[str, tuple[int, Callable[[dict[int, int]], list[bytes]]]] = {
            "bytes changed": (
                30,
                lambda victims: [self._mutator.change_bytes(self._valid(victims), list(self._recent))],
            ),
            "structure changed": (30, lambda victims: [self._mutator.change_structure(self._valid(victims))]),
            "hostile values": (20, lambda victims: [self._hostile_values(victims)]),
            "valid": (8, lambda victims: [self._valid(victims)]),
            "replayed": (4, lambda _: [self._chance.choice(self._recent)]),
            "random bytes": (2, lambda _: [self._chance.randbytes(self._chance.choice((0, 1, 9, 200)))]),
            "not of any encoder": (2, lambda _: [self._chance.choice(UNENCODABLE)]),
            "several frames": (2, lambda victims: [b"", self._valid(victims), b"x"]),
        }
        self._weights = list(itertools.accumulate(weight for weight, _ in self._kinds.values()))

    def draw(self, victims: dict[int, int], spared: Container[int]) -> HostileMessage:
        """Return a message for slots of `victims` that names no slot of `spared`.

        `victims` maps a slot to the number of tokens that it has received; the tokens of the message are added.
        """
        while True:
            (kind,) = self._chance.choices(list(self._kinds), cum_weights=self._weights)
            frames = self._kinds[kind][1](victims)
            outputs = [output for frame in frames if (output := self._as_decoded(frame)) is not None]
            if not any(slot in spared for output in outputs for slot in slots_named(output)):
                for output in outputs:
                    _advance(victims, output)
                return HostileMessage(kind, frames)

    def _as_decoded(self, frame: bytes) -> wire.StepOutput | None:
        """Return what a client decodes from `frame`, if it is the output of a step."""
        try:
            message = wire.decode_core_message(frame)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, wire.StepOutput) and message.incarnation == self._incarnation else None

    def _valid(self, victims: dict[int, int]) -> bytes:
        frame = wire.encode(self._message(victims))
        self._recent.append(frame)
        return frame

    def _message(self, victims: dict[int, int]) -> wire.CoreMessage:
        chance, incarnation = self._chance, self._incarnation
        kind = chance.random()
        if kind < 0.04:
            return wire.welcome(incarnation, 0, 1, b"{}")
        if kind < 0.08:
            return wire.Refused("no")
        if kind < 0.15:
            return wire.Reply(incarnation, chance.randrange(2**40, 2**41), {"x": [1]}, chance.choice((None, "no")))
        return self._step_output(victims)

    def _step_output(self, victims: dict[int, int]) -> wire.StepOutput:
        """Return a valid step output for some of `victims`."""
        chance = self._chance
        slots = chance.sample(list(victims), min(len(victims), chance.choice((1, 2, 8))))
        tokens = [chance.randrange(self._vocab_size) for _ in slots]
        positions = [victims[slot] for slot in slots]
        columns = wire.pack_tokens(*(np.array(column, np.int64) for column in (slots, tokens, positions)))
        output = wire.StepOutput(self._incarnation, chance.randrange(2**32), *columns)
        if chance.random() < 0.9:
            output.logprobs = [self._logprobs(slot, victims[slot]) for slot in slots]
        if chance.random() < 0.1:
            output.prompt_logprobs = [self._logprobs(slot, 1, 2) for slot in slots]
        if chance.random() < 0.1:
            output.cached = [(slot, 1) for slot in slots]
        if chance.random() < 0.1:
            output.vectors = [(slot, bytes(16)) for slot in slots]
        if chance.random() < 0.1:
            output.queued = [(slot, 0.5) for slot in slots]
        if chance.random() < 0.05:
            output.finished = [wire.Finished(slots[0], victims[slots[0]] + 1, chance.choice(("stop", "length")), 3)]
        return output

    def _logprobs(self, slot: int, position: int, count: int = 1) -> wire.TokenLogprobs:
        ids = np.array([[self._chance.randrange(self._vocab_size), 0]] * count, "<i4")
        return wire.TokenLogprobs(
            slot, position, ids.tobytes(), np.full(ids.shape, -1, "<f4").tobytes(), np.ones(count, "<u4").tobytes()
        )

    def _hostile_values(self, victims: dict[int, int]) -> bytes:
        """Return a valid structure with one part whose value has the right type but makes no sense."""
        chance, output = self._chance, self._step_output(victims)
        slot, count = wire.unpack_tokens(output)[0][0], len(output.positions) // 2
        wild = chance.choice((-1, 2**16, 2**20, 2**32, 2**63, 2**64 - 1, -(2**63)))
        ends = [wire.Finished(slot, chance.choice((0, -1, 2**63, victims[slot] + 1)), "error", wild, "e" * 3000)]
        odd = [wire.Finished(slot, victims[slot] + 1, "", None), wire.Finished(slot, 0, "x" * 5000, "s")]
        ids, values, ranks = bytes(8), bytes(8), bytes(4)
        of_one_token = [
            (slot, wild, ids, values, ranks),
            (slot, 0, b"", b"", b""),
            (slot, 0, b"", b"", ranks),
            (slot, 0, ids, values, b""),
            (slot, 0, ids, values, b"\x00"),
            (slot, 0, ids[:-1], values, ranks),
            (slot, 0, ids, values[:-4], ranks),
            (slot, 0, b"\xff" * 8, b"\xff" * 8, b"\xff" * 4),
            (slot, victims[slot], b"\xff" * 8, b"\xff" * 8, b"\xff" * 4),
            (slot, victims[slot], b"\xff\xff\xff\x7f" * 2, values, ranks),
            (slot, victims[slot], b"", b"", ranks),
        ]
        changes: list[Callable[[], Any]] = [
            lambda: setattr(output, "tokens", b"\xff" * (4 * count)),
            lambda: setattr(output, "tokens", b"\xff\xff\xff\x7f" * count),
            lambda: setattr(output, "positions", chance.randbytes(2 * count)),
            lambda: setattr(output, chance.choice(("slots", "tokens", "positions")), bytes(5)),
            lambda: setattr(output, "finished", ends),
            lambda: setattr(output, "finished", odd),
            lambda: setattr(output, "finished", [wire.Finished(wild, 1, "stop")] * 3),
            lambda: setattr(output, "cached", [(slot, wild), (wild, 1)]),
            lambda: setattr(output, "queued", [(slot, chance.choice((-1.0, 1e300, float("nan")))), (wild, 1.0)]),
            lambda: setattr(output, "vectors", [(slot, b"\x00" * chance.choice((0, 1, 4, 7)))]),
            lambda: setattr(output, "vectors", [(slot, b"\xff" * 400), (wild, b"")]),
            lambda: setattr(output, "logprobs", [wire.TokenLogprobs(*chance.choice(of_one_token))]),
            lambda: setattr(output, "prompt_logprobs", [wire.TokenLogprobs(*chance.choice(of_one_token))]),
            lambda: setattr(output, "incarnation", wild),
        ]
        chance.choice(changes)()
        return wire.encode(output)


def slots_named(output: wire.StepOutput) -> set[int]:
    """Return the slots that `output` names."""
    named = {entry.slot for part in (output.finished, output.logprobs, output.prompt_logprobs) for entry in part}
    named |= {slot for part in (output.cached, output.vectors, output.queued) for slot, _ in part}
    with contextlib.suppress(ValueError):
        named |= {*wire.unpack_tokens(output)[0]}
    return named


def _advance(positions: dict[int, int], output: wire.StepOutput) -> None:
    """Add the tokens of `output` that a client accepts to `positions`, the number of tokens by slot."""
    with contextlib.suppress(ValueError):
        for slot, _, position in zip(*wire.unpack_tokens(output), strict=True):
            if slot in positions and positions[slot] & 0xFFFF == position:
                positions[slot] += 1
