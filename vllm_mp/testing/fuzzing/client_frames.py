"""Frames that no well-behaved client sends: valid frames with errors in their bytes, structure or values.

A seed always gives the same frames. A frame may happen to be valid; then it must have its effect and no other.
"""

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from vllm_mp import wire
from vllm_mp.requests.images import IMAGE_DIGEST_BYTES, ImageArray, PlacedImage, ProcessedImage
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.prompt_embeds import PromptEmbeds
from vllm_mp.requests.sampling_params import SamplingParams
from vllm_mp.requests.structured_outputs import Constraint
from vllm_mp.testing.fuzzing.mutation import UNENCODABLE, HostileMessage, Mutator
from vllm_mp.testing.sampling_cases import CASES, random_params

_DIGESTS = (bytes(IMAGE_DIGEST_BYTES), bytes([255]) * IMAGE_DIGEST_BYTES)
_CONSTRAINTS = (
    Constraint("regex", "[a-c]+"),
    Constraint("choice", '["a","b"]'),
    Constraint("json", '{"type":"array","items":{"type":"integer"}}', any_whitespace=False),
    Constraint("json_object", starts_after=(1, 2)),
)
_HOSTILE_CONSTRAINTS = (
    Constraint("json", "{"),
    Constraint("json", '{"type":"foo"}'),
    Constraint("json", '{"$ref":"#"}'),
    Constraint("json", '{"type":"array","minItems":1000000000}'),
    Constraint("json", '{"items":' * 60 + "{}" + "}" * 60),
    Constraint("regex", "("),
    Constraint("regex", "(a{1,1000}){1,1000}"),
    Constraint("choice", "[]"),
    Constraint("choice", '{"a":1}'),
    Constraint("grammar", "start: start"),
    Constraint("grammar", "start: " + "(" * 1000),
    Constraint("structural_tag", "{}"),
    Constraint("structural_tag", '{"format":{"type":"or","elements":[]}}'),
    Constraint("json_object", starts_after=(-1, 2**63)),
    Constraint("json_object", whitespace_pattern="("),
)
_SLEEP_CALLS = tuple(("sleep", level) for level in wire.SLEEP_LEVELS)


class ClientFrames:
    """Frames of a hostile client for the core of `incarnation`, whose model has `vocab_size` tokens.

    Frames that would pause the core or put it to sleep are left out, because any client is allowed to send them.
    """

    def __init__(self, seed: int, incarnation: int, vocab_size: int, num_slots: int = 64) -> None:
        self._chance = random.Random(seed)
        self._mutator = Mutator(self._chance)
        self._incarnation = incarnation
        self._vocab_size = vocab_size
        self._num_slots = num_slots
        self._recent: deque[bytes] = deque([msgspec.msgpack.encode([1, 0])], maxlen=64)
        self._kinds: dict[str, tuple[int, Callable[[], list[bytes]]]] = {
            "bytes changed": (32, lambda: [self._mutator.change_bytes(self._valid(), list(self._recent))]),
            "structure changed": (32, lambda: [self._mutator.change_structure(self._valid())]),
            "hostile values": (12, lambda: [self._hostile_values()]),
            "valid, out of order": (8, lambda: [self._valid()]),
            "replayed": (4, lambda: [self._chance.choice(self._recent)]),
            "other incarnation": (3, lambda: [self._of_another_incarnation()]),
            "other version": (2, lambda: [wire.encode(self._of_another_version())]),
            "random bytes": (2, lambda: [self._chance.randbytes(self._chance.choice((0, 1, 9, 200)))]),
            "not of any encoder": (2, lambda: [self._chance.choice(UNENCODABLE)]),
            "a core's": (1, lambda: [self._of_a_core()]),
            "several frames": (2, self._several),
        }

    def __iter__(self) -> Iterator[HostileMessage]:
        kinds = list(self._kinds)
        weights = list(itertools.accumulate(weight for weight, _ in self._kinds.values()))
        while True:
            (kind,) = self._chance.choices(kinds, cum_weights=weights)
            frames = self._kinds[kind][1]()
            if not any(map(pauses, frames)):
                yield HostileMessage(kind, frames)

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
        params: dict[str, Any] = {"seed": chance.randrange(2**32), "max_tokens": chance.choice((1, 1, 2, 5, None))}
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
                constraint=chance.choice(_CONSTRAINTS) if chance.random() < 0.1 else None,
                tenant=chance.choice((0, 0, 1, wire.MAX_TENANTS - 1)),
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
        if kind < 0.902:
            return wire.PutImage(incarnation, self._image())
        if kind < 0.905:
            return wire.MarkSeen(incarnation, chance.randrange(2**63))
        if kind < 0.906:
            return wire.ReplayEnd(incarnation)
        if kind < 0.91:
            return wire.Convicted(incarnation, [chance.randrange(2**64) for _ in range(chance.choice((0, 1, 64)))])
        if kind < 0.985:
            return wire.hello()
        return wire.Bye(incarnation)

    def _hostile_values(self) -> bytes:
        """Return a valid structure with one field whose value has the right type but makes no sense."""
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
            lambda: setattr(message, "tenant", chance.choice((-1, wire.MAX_TENANTS, 2**31, 2**63, -(2**63)))),
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
            lambda: setattr(message, "constraint", chance.choice(_HOSTILE_CONSTRAINTS)),
            lambda: setattr(message.params, "extra_args", {"__class__": "x"}),
            lambda: setattr(message.params, "logits_processors", chance.choice((["x"], ["os:system"], [""] * 70))),
            lambda: setattr(message, "extra_args", chance.choice((b"\x81", b"\x91" * 9000, b"\x81\xa1x\x01"))),
            lambda: setattr(message, "prompt_embeds", self._embeds()),
            lambda: setattr(message, "images", [self._placed_image() for _ in range(chance.choice((1, 2, 300)))]),
            lambda: setattr(message.params, "stop", chance.choice(("", ["x"] * 100, "y" * 300, "\n"))),
        ]
        chance.choice(changes)()
        return wire.encode(message)

    def _embeds(self) -> PromptEmbeds:
        chance = self._chance
        return PromptEmbeds(
            chance.choice(("float32", "bfloat16", "float64", "")),
            chance.choice((0, 1, -1, 3, 2**63 - 1)),
            bytes(chance.choice((0, 1, 4, 192, 4096))),
        )

    def _image(self) -> ProcessedImage:
        """Return an image of a model with tiles of 32 x 32 pixels, or one that is wrong."""
        chance, size = self._chance, 4 * 3 * 32 * 32
        shape = chance.choice(([1, 1, 3, 32, 32], [1, 3, 32, 32], [], [0], [2**31 - 1] * 8, [3, 32, 32, 32, 1]))
        data = chance.choice((bytes(size), bytes([chance.randrange(256)]) * size, b"", b"1234"))
        name = chance.choice(("pixel_values", "pixel_values", "pixel_attention_mask", ""))
        array = ImageArray(name, chance.choice(("float32", "float32", "int64", "object")), shape, data)
        return ProcessedImage(chance.choice(_DIGESTS), [array] * chance.choice((0, 1, 1, 1, 2)))

    def _placed_image(self) -> PlacedImage:
        chance = self._chance
        spans = [(chance.choice((0, 1, 4, 2**31 - 1)), chance.choice((1, 4, 2**31 - 1))) for _ in range(3)]
        return PlacedImage(chance.choice(_DIGESTS), spans[: chance.choice((1, 1, 1, 3))])

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
    """Return whether a core would pause or sleep for `frame` if its arguments were valid."""
    try:
        message = wire.decode_client_message(frame)
    except (ValueError, RecursionError):
        return False
    if not isinstance(message, wire.Call):
        return False
    return (message.name, len(message.args)) == ("pause", 2) or (message.name, *message.args[:1]) in _SLEEP_CALLS


def raw_connections(seed: int) -> Iterator[bytes]:
    """Yield bytes for the core's socket that break its transport protocol, at the start or later."""
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
