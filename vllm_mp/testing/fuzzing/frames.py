"""Frames that no well-behaved peer sends: valid ones with errors in their bytes, their structure or their values.

What a seed gives is always the same. A frame may turn out to be valid after all; then it must do what it says and no
more.
"""

import contextlib
import copy
import datetime
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vllm_mp import wire
from vllm_mp.pooling_params import PoolingParams
from vllm_mp.sampling_params import SamplingParams
from vllm_mp.testing.sampling_cases import CASES, random_params

Encode = msgspec.msgpack.encode


class Hostile(NamedTuple):
    """One message, of usually one frame, and what is wrong with it."""

    kind: str
    frames: list[bytes]


SCALARS: tuple[Any, ...] = (
    None,
    True,
    False,
    *(sign * 2**bits + offset for bits in (0, 7, 8, 15, 16, 20, 31, 32, 53) for sign in (1, -1) for offset in (-1, 0)),
    -(2**63),
    2**63,
    2**64 - 1,
    0.0,
    -0.0,
    0.5,
    1e-320,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x",
    "é\u0000😀",
    "__class__",
    "__init__.__globals__",
    "status",
    "pause",
    "abort",
    b"",
    b"\x00",
    b"\x01\x00\x00",
    b"\xff\xff\xff\xff",
    b"\x05\x00\x00\x00" * 3,
    datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC),
    msgspec.msgpack.Ext(5, b"ext"),
    msgspec.msgpack.Ext(-128, b""),
)

_SLEEPS = tuple(("sleep", level) for level in wire.SLEEP_LEVELS)
_NOT_UTF8 = b"\xa2\xff\xfe"
_UNENCODABLE: tuple[bytes, ...] = (
    b"",
    b"\xc1",
    b"\x91" * 5000,
    b"\x81\xa1x" * 3000,
    b"\xdd\xff\xff\xff\xff\x02",
    b"\xdf\xff\xff\xff\xff\x01\x01",
    b"\xdb\xff\xff\xff\xffabc",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
    b"\x92\x01" + _NOT_UTF8,
    b"\x96\x02\x01\x00" + _NOT_UTF8 + b"\xc4\x00\x80",
    b"\x94\x04\x01\x00" + _NOT_UTF8,
    b"\x93\x03\x01\xdd\xff\xff\xff\xff",
    b"\x96\x02\x01\x00\xa1x\xc4\x04\x01\x00\x00\x00\x82\xa1n\x01\xa1n\xc0",
    b"\x96\x02\x01\x00\xa1x\xc4\x04\x01\x00\x00\x00\x81\xaaextra_args\x81\xa1a" + b"\x91" * 5000,
    b"\x96\x02\x01\x00\xa1x\xc4\x04\x01\x00\x00\x00\x81\xaalogit_bias\x81\x80\x01",
    b"\x92\x04\xc7\x0c\xff" + b"\xff" * 12,
    b"\x92\x04\xd6\xff\xff\xff\xff\xff",
)
"""Bytes that no encoder makes: cut short, lengths that lie, nested too deeply, not UTF-8, times out of range."""


class Mutator:
    """Errors for valid frames, drawn from `chance`."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def value(self) -> Any:
        """Something that a field does not expect, seldom a large one."""
        chance = self._chance
        kind = chance.random()
        if kind < 0.85:
            return copy.copy(chance.choice(SCALARS))
        if kind < 0.98:
            items = [chance.choice(SCALARS) for _ in range(chance.choice((0, 1, 2, 8)))]
            if chance.random() < 0.4:
                return {str(i): item for i, item in enumerate(items)}
            return [items] if chance.random() < 0.3 else items
        size = chance.choice((300, 2000, 70_000))
        return chance.choice((b"\x00" * size, "s" * size, [0] * size, [[]] * size, dict.fromkeys(range(size), 0.5)))

    def bytes(self, frame: bytes, others: list[bytes]) -> bytes:
        """`frame` with a few bytes changed, left out, doubled or taken from one of `others`."""
        chance, data = self._chance, bytearray(frame)
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            at = chance.randrange(len(data) + 1)
            kind = chance.randrange(7)
            if kind == 0:
                data[at:at] = chance.randbytes(chance.choice((1, 1, 2, 4)))
            elif kind == 1:
                del data[at : at + chance.choice((1, 1, 2, 4))]
            elif kind == 2:
                del data[at:]
            elif kind == 3:
                data[at:at] = data[max(0, at - 4) : at]
            elif kind == 4:
                other = chance.choice(others)
                data[at:] = other[chance.randrange(len(other) + 1) :]
            elif at < len(data):
                data[at] = chance.randrange(256) if kind == 5 else data[at] ^ (1 << chance.randrange(8))
        return bytes(data)

    def structure(self, frame: bytes) -> bytes:
        """`frame`, which is valid, with values replaced, left out, doubled or swapped."""
        chance, tree = self._chance, msgspec.msgpack.decode(frame)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            places = list(_places(tree))
            if not places:
                break
            owner, key = chance.choice(places)
            kind = chance.randrange(8)
            if isinstance(owner, dict):
                if kind == 0:
                    del owner[key]
                elif kind == 1:
                    owner[f"{key}_"] = owner.pop(key)
                else:
                    owner[key] = self.value()
            elif kind == 0:
                del owner[key]
            elif kind == 1:
                owner.insert(key, copy.deepcopy(owner[key]))
            elif kind == 2:
                other = chance.randrange(len(owner))
                owner[key], owner[other] = owner[other], owner[key]
            elif kind == 3 and isinstance(owner[key], int) and not isinstance(owner[key], bool):
                owner[key] = max(-(2**63), min(2**64 - 1, owner[key] + chance.choice((-1, 1, 2**16, -(2**16)))))
            else:
                owner[key] = self.value()
        return Encode(tree)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) below `tree`, but of long lists only the beginning, and the tag hardly ever."""
    stack = [tree]
    while stack:
        owner = stack.pop()
        keys = range(min(len(owner), 16)) if isinstance(owner, list) else list(itertools.islice(owner, 64))
        for key in keys:
            yield owner, key
            if isinstance(owner[key], list | dict):
                stack.append(owner[key])


class ClientFrames:
    """What a hostile client sends to the core of `incarnation`, whose model has `vocab_size` tokens.

    It keeps its hands off what every client may do to all others by design: frames that would pause the core, or put it
    to sleep, are left out.
    """

    def __init__(self, seed: int, incarnation: int, vocab_size: int, num_slots: int = 64) -> None:
        self._chance = random.Random(seed)
        self._mutator = Mutator(self._chance)
        self._incarnation = incarnation
        self._vocab_size = vocab_size
        self._num_slots = num_slots
        self._recent: deque[bytes] = deque([Encode([1, 0])], maxlen=64)
        self._kinds: dict[str, tuple[int, Callable[[], list[bytes]]]] = {
            "bytes changed": (32, lambda: [self._mutator.bytes(self._valid(), list(self._recent))]),
            "structure changed": (32, lambda: [self._mutator.structure(self._valid())]),
            "hostile values": (12, lambda: [self._hostile_values()]),
            "valid, out of order": (8, lambda: [self._valid()]),
            "replayed": (4, lambda: [self._chance.choice(self._recent)]),
            "other incarnation": (3, lambda: [self._of_another_incarnation()]),
            "other version": (2, lambda: [wire.encode(self._of_another_version())]),
            "random bytes": (2, lambda: [self._chance.randbytes(self._chance.choice((0, 1, 9, 200)))]),
            "not of any encoder": (2, lambda: [self._chance.choice(_UNENCODABLE)]),
            "a core's": (1, lambda: [self._of_a_core()]),
            "several frames": (2, self._several),
        }

    def __iter__(self) -> Iterator[Hostile]:
        kinds = list(self._kinds)
        weights = list(itertools.accumulate(weight for weight, _ in self._kinds.values()))
        while True:
            (kind,) = self._chance.choices(kinds, cum_weights=weights)
            frames = self._kinds[kind][1]()
            if not any(map(pauses, frames)):
                yield Hostile(kind, frames)

    def _valid(self) -> bytes:
        frame = wire.encode(self._message())
        self._recent.append(frame)
        return frame

    def _slot(self) -> int:
        return self._chance.randrange(self._num_slots)

    def _ids(self, most: int) -> bytes:
        return wire.pack_ids([self._chance.randrange(self._vocab_size) for _ in range(self._chance.randint(1, most))])

    def _params(self) -> SamplingParams:
        chance = self._chance
        params = {"seed": chance.randrange(2**32), "max_tokens": chance.choice((1, 1, 2, 5, None))}
        others = random_params(chance, 0.15, [name for name in CASES if name not in (*params, "min_tokens")])
        others |= {name: value for name, value in (("min_tokens", 1), ("extra_args", {})) if chance.random() < 0.15}
        return SamplingParams(**others, **params)

    def _message(self) -> wire.ClientMessage:
        chance, incarnation = self._chance, self._incarnation
        kind = chance.random()
        if kind < 0.5:
            params = self._params()
            return wire.AddRequest(
                incarnation,
                self._slot(),
                chance.choice(("id", "é" * 9)),
                self._ids(8),
                params,
                chance.choice((0, 0, 5, -5)),
                self._ids(3) if chance.random() < 0.2 else b"",
                chance.choice(("", "salt")),
                chance.choice(("", "group")),
                [[chance.randrange(self._vocab_size)]] if params.bad_words else [],
                chance.random() < 0.1,
            )
        if kind < 0.6:
            pooling = PoolingParams(pooling_type=chance.choice((None, "mean", "last")), normalize=True)
            return wire.AddPooling(incarnation, self._slot(), "id", self._ids(8), pooling)
        if kind < 0.8:
            return wire.AbortRequests(incarnation, [self._slot() for _ in range(chance.choice((0, 1, 8)))])
        if kind < 0.9:
            name = chance.choice(
                ("ping", "status", "reset_prefix_cache", "resume", "pause", "stop_profile", "sleep", "wake_up", "none")
            )
            values = (None, "keep", "wait", "weights", True, 3, 0.5)
            args = [chance.choice(values) for _ in range(chance.choice((0, 0, 1, 2, 5)))]
            return wire.Call(incarnation, chance.randrange(2**32), name, args)
        if kind < 0.985:
            return wire.hello()
        return wire.Bye(incarnation)

    def _hostile_values(self) -> bytes:
        """A valid structure, one field of which the protocol's types allow and sense does not."""
        chance, vocab_size = self._chance, self._vocab_size
        message = wire.AddRequest(self._incarnation, self._slot(), "id", self._ids(8), self._params())
        beyond = chance.choice((vocab_size, vocab_size + 1, 2**31 - 1))
        changes: list[Callable[[], Any]] = [
            lambda: setattr(message, "slot", chance.choice((-1, 2**20, 2**32, 2**63, -(2**63), 2**64 - 1))),
            lambda: setattr(message, "incarnation", chance.choice((0, -1, self._incarnation + 1, 2**64 - 1))),
            lambda: setattr(message, "prompt", wire.pack_ids([chance.choice((-1, -(2**31), beyond))])),
            lambda: setattr(message, "prompt", chance.choice((b"", b"\x01", b"\x00" * 7, bytes(4 * 5000)))),
            lambda: setattr(message, "output", chance.choice((b"\x01", bytes(4 * 5000), wire.pack_ids([beyond])))),
            lambda: setattr(message, "request_id", "i" * chance.choice((1024, 1025, 10_000))),
            lambda: setattr(message, "priority", chance.choice((2**63, -(2**63), 2**64 - 1))),
            lambda: setattr(message, "cache_salt", "s" * 10_000),
            lambda: setattr(message, "bad_words", chance.choice(([[]], [[beyond]], [[-1, 2**64 - 1]], [[1]] * 3000))),
            lambda: setattr(message.params, "bad_words", ["x"] * 3),
            lambda: setattr(message.params, "max_tokens", chance.choice((0, -1, 2**31, 2**63))),
            lambda: setattr(message.params, "min_tokens", chance.choice((10**6, 2**31 - 1))),
            lambda: setattr(message.params, "temperature", chance.choice((math.nan, math.inf, -1.0, 1e300, 1e-45))),
            lambda: setattr(message.params, "top_p", chance.choice((math.nan, 0.0, -1.0, 2.0, 1e-300))),
            lambda: setattr(message.params, "repetition_penalty", chance.choice((0.0, math.nan, 1e-300, 1e300))),
            lambda: setattr(message.params, "seed", chance.choice((2**63, 2**64 - 1, -(2**63), -1, None))),
            lambda: setattr(message.params, "stop_token_ids", chance.choice(([beyond], [-1], [0] * 1500))),
            lambda: setattr(message.params, "allowed_token_ids", chance.choice(([], [beyond], [2**63]))),
            lambda: setattr(message.params, "logit_bias", chance.choice(({beyond: 1.0}, {-1: 1.0}, {0: math.nan}))),
            lambda: setattr(message.params, "logprobs", chance.choice((21, 10**6, -1, -2))),
            lambda: setattr(message.params, "structured_outputs", {"json": [[]] * 50}),
            lambda: setattr(message.params, "extra_args", {"__class__": "x"}),
            lambda: setattr(message.params, "stop", chance.choice(("", ["x"] * 100, "y" * 300, "\n"))),
        ]
        chance.choice(changes)()
        return wire.encode(message)

    def _of_another_incarnation(self) -> bytes:
        message = self._message()
        if not isinstance(message, wire.Hello):
            message.incarnation = self._chance.choice((0, 1, self._incarnation - 1, self._incarnation + 1))
        return wire.encode(message)

    def _of_another_version(self) -> wire.Hello:
        versions = (0, 1, -1, 10**6, 2**64 - 1, wire.PROTOCOL_VERSION)
        return wire.Hello(self._chance.choice(versions), self._chance.choice(("", "0123456789abcdef", "s" * 64)))

    def _of_a_core(self) -> bytes:
        return wire.encode(
            self._chance.choice(
                (
                    wire.welcome(self._incarnation, 0, 1, b"{}"),
                    wire.Refused("no"),
                    wire.StepOutput(self._incarnation, 1, b"\0\0", b"\0\0\0\0", b"\0\0"),
                    wire.Reply(self._incarnation, 1),
                )
            )
        )

    def _several(self) -> list[bytes]:
        return [
            self._chance.choice((b"", b"x", self._valid(), self._chance.choice(self._recent)))
            for _ in range(self._chance.choice((2, 2, 3, 200)))
        ]


def pauses(frame: bytes) -> bool:
    """Whether a core would pause or sleep for `frame`, unless the arguments are wrong."""
    try:
        message = wire.decode_client_message(frame)
    except (ValueError, RecursionError):
        return False
    if not isinstance(message, wire.Call):
        return False
    return (message.name, len(message.args)) == ("pause", 2) or (message.name, *message.args[:1]) in _SLEEPS


class CoreFrames:
    """What a core that has gone mad sends to a client."""

    def __init__(self, seed: int, incarnation: int, vocab_size: int) -> None:
        self._chance = random.Random(seed)
        self._mutator = Mutator(self._chance)
        self._incarnation = incarnation
        self._vocab_size = vocab_size
        self._recent: deque[bytes] = deque([Encode([18, 0, 0, b"", b"", b""])], maxlen=64)
        self._kinds: dict[str, tuple[int, Callable[[dict[int, int]], list[bytes]]]] = {
            "bytes changed": (30, lambda victims: [self._mutator.bytes(self._valid(victims), list(self._recent))]),
            "structure changed": (30, lambda victims: [self._mutator.structure(self._valid(victims))]),
            "hostile values": (20, lambda victims: [self._hostile_values(victims)]),
            "valid": (8, lambda victims: [self._valid(victims)]),
            "replayed": (4, lambda _: [self._chance.choice(self._recent)]),
            "random bytes": (2, lambda _: [self._chance.randbytes(self._chance.choice((0, 1, 9, 200)))]),
            "not of any encoder": (2, lambda _: [self._chance.choice(_UNENCODABLE)]),
            "several frames": (2, lambda victims: [b"", self._valid(victims), b"x"]),
        }
        self._weights = list(itertools.accumulate(weight for weight, _ in self._kinds.values()))

    def draw(self, victims: dict[int, int], spared: Container[int]) -> Hostile:
        """A message about the slots of `victims`, with the tokens that each has had, that says nothing of `spared`."""
        while True:
            (kind,) = self._chance.choices(list(self._kinds), cum_weights=self._weights)
            frames = self._kinds[kind][1](victims)
            outputs = [output for frame in frames if (output := self._as_taken(frame)) is not None]
            if not any(slot in spared for output in outputs for slot in slots_named(output)):
                for output in outputs:
                    _advance(victims, output)
                return Hostile(kind, frames)

    def _as_taken(self, frame: bytes) -> wire.StepOutput | None:
        """What a client reads in `frame`, if that is the output of a step."""
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
        """What a core may well send about some of `victims`."""
        chance = self._chance
        slots = chance.sample(list(victims), min(len(victims), chance.choice((1, 2, 8))))
        tokens = [chance.randrange(self._vocab_size) for _ in slots]
        columns = wire.pack_tokens(*(np.array(one, np.int64) for one in (slots, tokens, [victims[s] for s in slots])))
        output = wire.StepOutput(self._incarnation, chance.randrange(2**32), *columns)
        if chance.random() < 0.9:
            output.logprobs = [self._logprobs(slot, victims[slot]) for slot in slots]
        if chance.random() < 0.1:
            output.prompt_logprobs = [self._logprobs(slot, 1, 2) for slot in slots]
        if chance.random() < 0.1:
            output.cached = [(slot, 1) for slot in slots]
        if chance.random() < 0.1:
            output.vectors = [(slot, bytes(16)) for slot in slots]
        if chance.random() < 0.05:
            output.finished = [wire.Finished(slots[0], victims[slots[0]] + 1, chance.choice(("stop", "length")), 3)]
        return output

    def _logprobs(self, slot: int, position: int, count: int = 1) -> wire.TokenLogprobs:
        ids = np.array([[self._chance.randrange(self._vocab_size), 0]] * count, "<i4")
        return wire.TokenLogprobs(
            slot, position, ids.tobytes(), np.full(ids.shape, -1, "<f4").tobytes(), np.ones(count, "<u4").tobytes()
        )

    def _hostile_values(self, victims: dict[int, int]) -> bytes:
        """A valid structure, one part of which the protocol's types allow and sense does not."""
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
            lambda: setattr(output, "vectors", [(slot, b"\x00" * chance.choice((0, 1, 4, 7)))]),
            lambda: setattr(output, "vectors", [(slot, b"\xff" * 400), (wild, b"")]),
            lambda: setattr(output, "logprobs", [wire.TokenLogprobs(*chance.choice(of_one_token))]),
            lambda: setattr(output, "prompt_logprobs", [wire.TokenLogprobs(*chance.choice(of_one_token))]),
            lambda: setattr(output, "incarnation", wild),
        ]
        chance.choice(changes)()
        return wire.encode(output)


def slots_named(output: wire.StepOutput) -> set[int]:
    """Whom `output` says something about."""
    named = {one.slot for part in (output.finished, output.logprobs, output.prompt_logprobs) for one in part}
    named |= {slot for part in (output.cached, output.vectors) for slot, _ in part}
    with contextlib.suppress(ValueError):
        named |= {*wire.unpack_tokens(output)[0]}
    return named


def _advance(positions: dict[int, int], output: wire.StepOutput) -> None:
    """Count in `positions`, by slot, the tokens that `output` brings and a client takes."""
    with contextlib.suppress(ValueError):
        for slot, _, position in zip(*wire.unpack_tokens(output), strict=True):
            if slot in positions and positions[slot] & 0xFFFF == position:
                positions[slot] += 1


def raw_connections(seed: int) -> Iterator[bytes]:
    """What to write to the core's socket without speaking its transport protocol, or after having begun to."""
    chance = random.Random(seed)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    while True:
        yield chance.choice(
            (
                b"",
                b"GET / HTTP/1.1\r\n\r\n",
                chance.randbytes(chance.choice((1, 10, 64, 5000))),
                greeting[: chance.randrange(64)],
                greeting,
                greeting.replace(b"NULL", b"EVIL"),
                greeting.replace(b"\x03\x00", b"\x09\x09"),
                greeting + chance.randbytes(100),
                greeting + b"\x04\xff" + chance.randbytes(300),
                greeting + b"\x06" + b"\xff" * 8,
                greeting + ready.replace(b"DEALER", b"ROUTEX"),
                greeting + ready + b"\x02" + b"\xff" * 8 + b"x" * 100,
                greeting + ready + b"\x02" + (wire.MAX_MESSAGE_BYTES - 1).to_bytes(8, "big") + b"x" * 100,
                greeting + ready + b"\x00\x05abc",
                greeting + ready + b"\x00\x00" * 50,
                greeting + ready + b"\x01\x01x" * 50,
                greeting + ready + chance.randbytes(300),
            )
        )
