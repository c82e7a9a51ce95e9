"""The messages between client and core.

A message is one ZeroMQ frame: a msgspec struct encoded as a msgpack array whose first element is its tag. The
core's ROUTER socket knows a client by its identity frame; the client's DEALER socket has one peer.

Evolution: fields are only ever added at the end, with a default; tags are never used again; any other change
raises PROTOCOL_VERSION, which the first message of a client carries and the core compares.

Two invariants make loss and repetition visible. Every message carries the core's incarnation, so nothing that
was meant for, or sent by, an earlier core is taken. Every token carries its position in the answer, so a
client takes each position once and in order.
"""

from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_mp.pooling_params import PoolingParams
from vllm_mp.sampling_params import MAX_BAD_WORDS, SamplingParams

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 64 * 2**20
MAX_REQUEST_ID_BYTES = 1024
MAX_LIVE_REQUESTS = 2**20
"""Slots of one client are integers in [0, MAX_LIVE_REQUESTS)."""
MAX_BAD_WORD_TOKENS = 1024
MAX_BAD_WORD_SPELLINGS = 2
"""Ways in which a bad word may be written: at the beginning of a text, and behind a space."""
PAUSE_MODES = ("abort", "wait", "keep")
"""What the operation "pause" may do with the requests that are live."""
SLEEP_LEVELS = (1, 2)
SLEEP_MODES = ("keep", "abort")
"""What the operation "sleep" may do with the requests that are live."""
WEIGHTS, KV_CACHE = "weights", "kv_cache"
SLEEP_TAGS = (WEIGHTS, KV_CACHE)
"""What a sleeping core is without, and "wake_up" may name, in the order in which it comes back."""
_MAX_ARGS = 16
_LARGE_FRAME_BYTES = 2**16


class _Message(msgspec.Struct, array_like=True):
    pass


class Hello(_Message, tag=1):
    """Client to core: the first message."""

    version: int


class AddRequest(_Message, tag=2):
    """Client to core: run a request under `slot`, which names it in every later message of this client.

    `prompt` and `output` are token ids as little-endian int32; `output` holds what the client has received from
    an earlier incarnation, and generation goes on at position len(output). `params.seed` is always set, and `params.n`
    has no meaning: each answer is a request. Only requests of one `cache_salt` share cached prefixes; those of one
    `group`, where it is not empty, share their prompts' blocks also where nothing else is shared. `bad_words` are
    `params.bad_words` as token ids. Where `suspect` is not 0 the request was in the step that an earlier core died of:
    it runs in steps of its own until its answer has that many tokens, so that if it is what kills cores, it dies alone.
    """

    incarnation: int
    slot: int
    request_id: str
    prompt: bytes
    params: SamplingParams
    priority: int = 0
    output: bytes = b""
    cache_salt: str = ""
    group: str = ""
    bad_words: Annotated[
        list[Annotated[list[int], msgspec.Meta(max_length=MAX_BAD_WORD_TOKENS)]],
        msgspec.Meta(max_length=MAX_BAD_WORD_SPELLINGS * MAX_BAD_WORDS),
    ] = []
    isolate_until_num_tokens: int = 0


class AddPooling(_Message, tag=6):
    """Client to core: make one vector of `prompt`; its fields are as those of `AddRequest`."""

    incarnation: int
    slot: int
    request_id: str
    prompt: bytes
    params: PoolingParams
    priority: int = 0
    cache_salt: str = ""
    isolate_until_num_tokens: int = 0


class AbortRequests(_Message, tag=3):
    """Client to core: stop these; each is answered by its `Finished`. Unknown slots are no error."""

    incarnation: int
    slots: Annotated[list[int], msgspec.Meta(max_length=MAX_LIVE_REQUESTS)]


CallArgument = str | int | float | bool | None


class Call(_Message, tag=4):
    """Client to core: run the named operation and answer with a `Reply`."""

    incarnation: int
    call_id: int
    name: str
    args: Annotated[list[CallArgument], msgspec.Meta(max_length=_MAX_ARGS)] = []


class Bye(_Message, tag=5):
    """Client to core: this client leaves; its requests are dropped without an answer."""

    incarnation: int


ClientMessage = Hello | AddRequest | AbortRequests | Call | Bye | AddPooling


class Welcome(_Message, tag=16):
    """Core to client: the answer to Hello, sent when the core can serve. `config` is a `VllmConfig` as JSON."""

    version: int
    incarnation: int
    client: int
    pid: int
    config: bytes


class Refused(_Message, tag=17):
    """Core to client: the answer to a Hello that cannot be served."""

    reason: str


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """The end of a request; exactly one is sent for each slot added, and the slot is free after it.

    `num_output_tokens` counts the tokens of the whole answer. `reason` is "stop", "length", "abort" or "error".
    `stop_reason` is a token id; strings are found by the client.
    """

    slot: int
    num_output_tokens: int
    reason: str
    stop_reason: int | str | None = None
    error: str | None = None


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities at `len(ranks) / 4` positions of one request, the first being `position`.

    `token_ids` (int32) and `values` (float32) have one row a position, all of one length: the chosen token, then the
    most likely ones, best first. `ranks` (uint32) are those of the chosen tokens, 1 being the best. Little-endian.
    """

    slot: int
    position: int
    token_ids: bytes
    values: bytes
    ranks: bytes


class StepOutput(_Message, tag=18):
    """Core to client: what one step brought this client, by column.

    Entry i of the columns says that request `slots[i]` has the token `tokens[i]` at `positions[i]` of its
    answer. Slots are uint16, or uint32 when a slot above 65,535 is among them; tokens are uint32; positions
    are the lower 16 bits of the position, which is enough for a client that knows the position it waits for.
    All little-endian. `finished` applies after the tokens.
    """

    incarnation: int
    step: int
    slots: bytes
    tokens: bytes
    positions: bytes
    finished: list[Finished] = []
    cached: list[tuple[int, int]] = []
    """(slot, prompt tokens found in the cache) of requests with their first token here, where there were any."""
    logprobs: list[TokenLogprobs] = []
    """Of tokens of the columns, at their positions in the answer."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Of tokens of prompts, at their positions there; a prompt's come in order, before the first token."""
    vectors: list[tuple[int, bytes]] = []
    """(slot, vector as little-endian float32), which with its `Finished` is the answer to an `AddPooling`."""


class Reply(_Message, tag=19):
    """Core to client: the answer to a Call: a result of plain data, or an error."""

    incarnation: int
    call_id: int
    result: Any = None
    error: str | None = None


CoreMessage = Welcome | Refused | StepOutput | Reply


class _BoundedParams(SamplingParams):
    """Without what may have any shape, and would be decoded before it is refused.

    Bytes become objects of up to seventy times their size. What has a type has a bound, here and in `SamplingParams`.
    """

    guided_decoding: None = None
    structured_outputs: None = None
    extra_args: None = None


class _LargeAddRequest(AddRequest, tag=2):
    params: _BoundedParams


_encoder = msgspec.msgpack.Encoder()
_client_decoder = msgspec.msgpack.Decoder(ClientMessage)
_large_client_decoder = msgspec.msgpack.Decoder(Hello | _LargeAddRequest | AbortRequests | Call | Bye | AddPooling)
_core_decoder = msgspec.msgpack.Decoder(CoreMessage)


def encode(message: ClientMessage | CoreMessage) -> bytes:
    return _encoder.encode(message)


def encode_bounded(message: ClientMessage) -> bytes:
    """Encode what a core will take; raises ValueError for what is too large for it."""
    frame = encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ValueError(f"the request takes {len(frame)} bytes, {MAX_MESSAGE_BYTES} is the most; shorten it")
    return frame


def decode_client_message(frame: bytes) -> ClientMessage:
    """Decode what a client sent.

    Raises ValueError (msgspec.MsgspecError is one) for what is not of the protocol, not UTF-8 or not a valid parameter,
    RecursionError for what is nested too deeply.
    """
    decoder = _client_decoder if len(frame) < _LARGE_FRAME_BYTES else _large_client_decoder
    message: ClientMessage = decoder.decode(frame)
    return message


def decode_core_message(frame: bytes) -> CoreMessage:
    """Decode what a core sent; raises ValueError (msgspec.MsgspecError is one) or RecursionError, as above."""
    message: CoreMessage = _core_decoder.decode(frame)
    return message


def pack_tokens(
    slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> tuple[bytes, bytes, bytes]:
    """The columns of a StepOutput from integer arrays [n]."""
    slot_type = "<u2" if not len(slots) or slots.max() < 2**16 else "<u4"
    return (
        slots.astype(slot_type).tobytes(),
        tokens.astype("<u4").tobytes(),
        (positions & 0xFFFF).astype("<u2").tobytes(),
    )


def unpack_tokens(output: StepOutput) -> tuple[list[int], list[int], list[int]]:
    """Slots, tokens and lower position bits of a StepOutput; raises ValueError if the columns disagree."""
    count = len(output.tokens) // 4
    slot_bytes = len(output.slots)
    if (
        len(output.tokens) != 4 * count
        or len(output.positions) != 2 * count
        or slot_bytes not in (2 * count, 4 * count)
    ):
        raise ValueError(f"columns disagree: {slot_bytes}, {len(output.tokens)}, {len(output.positions)} bytes")
    slot_type = "<u2" if slot_bytes == 2 * count else "<u4"
    return (
        np.frombuffer(output.slots, slot_type).tolist(),
        np.frombuffer(output.tokens, "<u4").tolist(),
        np.frombuffer(output.positions, "<u2").tolist(),
    )


def pack_ids(token_ids: list[int]) -> bytes:
    """Token ids as little-endian int32."""
    return np.asarray(token_ids, "<i4").tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.int32]:
    """Token ids [n] from little-endian int32; raises ValueError if the length does not fit."""
    return np.frombuffer(data, "<i4").astype(np.int32)
