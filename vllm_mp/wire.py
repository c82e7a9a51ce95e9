"""The messages between client and core.

A message is one ZeroMQ frame: a msgspec struct encoded as a msgpack array whose first element is its tag. The
core's ROUTER socket knows a client by its identity frame; the client's DEALER socket has one peer.

Evolution: fields are only ever added at the end, with a default; tags are never used again; any other change raises
PROTOCOL_VERSION. `Hello` and `Welcome` carry PROTOCOL_VERSION and SCHEMA, a digest of all fields and their types. Each
side refuses a peer that differs, because msgspec would silently ignore a field that the older side does not know.

Two invariants make loss and repetition visible. Every message but the greeting carries the core's incarnation, so
messages that were meant for, or sent by, an earlier core are dropped. Every token carries its position in the output,
so a client takes each position once and in order.
"""

import functools
import logging
import operator
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_mp.config import VllmConfig
from vllm_mp.requests.images import MAX_IMAGES, ImageDigest, PlacedImage, ProcessedImage
from vllm_mp.requests.lora_request import LoRARequest
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.prompt_embeds import PromptEmbeds
from vllm_mp.requests.sampling_params import MAX_BAD_WORDS, MAX_EXTRA_ARGS_BYTES, SamplingParams
from vllm_mp.requests.structured_outputs import Constraint
from vllm_mp.version import __version__
from vllm_mp.wire_schema import fingerprint

PROTOCOL_VERSION = 4
MAX_MESSAGE_BYTES = 64 * 2**20
DECODE_ERRORS = (ValueError, TypeError, RecursionError, OverflowError)
"""What the decoding of bytes from a peer may raise: they are malformed (msgspec.DecodeError is a ValueError), not of
the expected type, not UTF-8, nested too deeply, or out of range."""
MAX_REQUEST_ID_BYTES = 1024
TCP_HEARTBEAT_MS = 5000
"""Time between two heartbeats of a client over TCP, whose connection breaks after three that are not answered."""
MAX_CLIENTS = 4096
"""Clients of one core that have said hello and have not left."""
MAX_TENANTS = 4096
"""Tenants of one client are integers in [0, MAX_TENANTS)."""
TOKEN_BYTES = 16
"""Length of a client's token."""
MAX_LIVE_REQUESTS = 2**20
"""Slots of one client are integers in [0, MAX_LIVE_REQUESTS)."""
MAX_CONVICTED_DEATHS = 64
"""Deaths of cores that a client names at a time, and that a core notes on its page."""
MAX_BAD_WORD_TOKENS = 1024
MAX_BAD_WORD_SPELLINGS = 2
"""A bad word is written in two ways: at the beginning of a text, and after a space."""
PAUSE_MODES = ("abort", "wait", "keep")
"""What the operation "pause" does with live requests."""
SLEEP_LEVELS = (1, 2)
SLEEP_MODES = ("keep", "abort")
"""What the operation "sleep" does with live requests."""
_SHORT, _LONG = np.dtype("<u2"), np.dtype("<u4")
TOKEN_IDS = np.dtype("<i4")
"""The type of token ids in `AddRequest` and `AddPooling`."""
WEIGHTS, KV_CACHE = "weights", "kv_cache"
SLEEP_TAGS = (WEIGHTS, KV_CACHE)
"""What a sleeping core has released and "wake_up" may name, in the order in which it is restored."""
_MAX_ARGS = 16
"""Maximum number of arguments of a `Call`."""
_LARGE_FRAME_BYTES = 2**16
"""Size from which a frame is decoded with `_BoundedParams`."""


_MAX_NAME_LENGTH = 64
_Name = Annotated[str, msgspec.Meta(max_length=_MAX_NAME_LENGTH)]
_Tenant = Annotated[int, msgspec.Meta(ge=0, lt=MAX_TENANTS)]
_Token = Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES)]
_PACKAGE = __version__[:_MAX_NAME_LENGTH]


class _Message(msgspec.Struct, array_like=True):
    pass


class Hello(_Message, tag=1):
    """Client to core: the first message. `package` is the client's version of vllm-mp; `hello` makes one.

    `operator_key` makes the client an operator of the core; it is empty for a plain client.

    `token` is random, and the same in each hello of a client, to whichever core and after whichever connection. A core
    knows from it that a client has come back, and says what its predecessor was computing for that client. It is a
    secret of the two: a peer that knows it can pose as the client. Empty: the client cannot be known again.
    """

    version: int
    schema: _Name = ""
    package: _Name = ""
    operator_key: Annotated[bytes, msgspec.Meta(max_length=_MAX_NAME_LENGTH)] = b""
    token: _Token = b""


class AddRequest(_Message, tag=2):
    """Client to core: run a request under `slot`, which names it in every later message of this client.

    `prompt` and `output` are token ids as little-endian int32. `output` holds the tokens that the client has received
    from an earlier incarnation; generation continues at position len(output). `params.seed` is always set. `params.n`
    has no meaning, as each completion is a request of its own. Only requests with the same `cache_salt` share cached
    prefixes. Requests with the same `group`, unless it is empty, share the blocks of their prompts even without a
    prefix cache. `bad_words` are `params.bad_words` as token ids. `isolate_until_num_tokens` is 0 unless the request
    was in the step during which an earlier core died: then the request shares its steps only with requests of this
    client that have the same `isolation_group`, until its completion has that many tokens, so that no other request
    dies with it. `after_pause`: the client knew of a pause in force when it first sent the request, so that a core that
    has inherited a pause with mode "wait" holds the request back. Waiting requests of one client and one priority run
    in the order of `arrival_time`, in seconds of the client's `time.time()`. `prompt_embeds` replaces
    `prompt`, which is then empty. `extra_args` are `params.extra_args`, which are None in the message, as msgpack.
    `constraint` is what `params.structured_outputs`, which are None in the message, demand of the output.
    `lora` is the adapter for the request, or None for the base model, and `adapter_digest` the digest of the weights
    that computed `output`; it is empty if the client does not know it. `is_replay`: an earlier core has admitted the
    request. Where a new request is refused because too much is under way, a replay waits: in the core until its
    constraint is compiled, in the client if there is no memory for it (`Finished.no_room`). `tenant` is the party of
    this client for which the request runs: tenants take turns and have shares of the memory as clients do. `images` are
    those of the prompt, in order; the core must have got each in a `PutImage`, else it answers with `MissingImages` and
    does not add the request.
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
    isolation_group: int = 0
    after_pause: bool = False
    arrival_time: float = 0.0
    prompt_embeds: PromptEmbeds | None = None
    extra_args: Annotated[bytes, msgspec.Meta(max_length=MAX_EXTRA_ARGS_BYTES)] = b""
    constraint: Constraint | None = None
    lora: LoRARequest | None = None
    adapter_digest: _Name = ""
    is_replay: bool = False
    tenant: _Tenant = 0
    images: Annotated[list[PlacedImage], msgspec.Meta(max_length=MAX_IMAGES)] = []


class AddPooling(_Message, tag=6):
    """Client to core: make one vector of `prompt`; the fields have the same meaning as in `AddRequest`."""

    incarnation: int
    slot: int
    request_id: str
    prompt: bytes
    params: PoolingParams
    priority: int = 0
    cache_salt: str = ""
    isolate_until_num_tokens: int = 0
    isolation_group: int = 0
    after_pause: bool = False
    arrival_time: float = 0.0
    lora: LoRARequest | None = None
    is_replay: bool = False
    tenant: _Tenant = 0


class AbortRequests(_Message, tag=3):
    """Client to core: stop the requests in `slots`; unknown slots are ignored.

    The core answers each with its `Finished`.
    """

    incarnation: int
    slots: Annotated[list[int], msgspec.Meta(max_length=MAX_LIVE_REQUESTS)]


CallArgument = str | int | float | bool | None


class Call(_Message, tag=4):
    """Client to core: run the named operation and answer with a `Reply`.

    `call_id` names the call among the calls of all clients, so clients count from a random number. An operation that
    pauses the core, puts it to sleep or ends that is carried out once under each id, also by successors. `is_suspect`:
    an earlier core died while it carried out the call, so that nothing else may go on meanwhile.
    """

    incarnation: int
    call_id: int
    name: str
    args: Annotated[list[CallArgument], msgspec.Meta(max_length=_MAX_ARGS)] = []
    is_suspect: bool = False


class Bye(_Message, tag=5):
    """Client to core: this client leaves; the core drops its requests without an answer."""

    incarnation: int


class MarkSeen(_Message, tag=7):
    """Client to core: the client has read everything up to the `Mark` with the same number."""

    incarnation: int
    mark: int


class Convicted(_Message, tag=8):
    """Client to core: requests of this client are to blame for the deaths of cores with the incarnations `deaths`.

    The core's parent counts such a death no longer, if a request of this client was in the pending steps.
    """

    incarnation: int
    deaths: Annotated[list[int], msgspec.Meta(max_length=MAX_CONVICTED_DEATHS)]


class PutImage(_Message, tag=9):
    """Client to core: keep an image, for requests that name its digest.

    The core keeps the images of live requests, and the latest others within a bound.
    """

    incarnation: int
    image: ProcessedImage


class ReplayEnd(_Message, tag=10):
    """Client to core: the client has sent all requests that earlier cores had admitted but those that wait for memory.

    A core waits for this a moment before its first step, once it has got the first of them, so that they continue
    together.
    """

    incarnation: int


ClientMessage = (
    Hello | AddRequest | AbortRequests | Call | Bye | AddPooling | MarkSeen | Convicted | PutImage | ReplayEnd
)


class ModelDigest(msgspec.Struct, array_like=True, frozen=True):
    """Digests of what a core has loaded, by which a client tells whether its successor serves the same model."""

    weights: str = ""
    config: str = ""
    """The digest of config.json, without fields that have no influence on results."""
    tokenizer: str = ""


NO_DIGEST = ModelDigest()


class LastDeath(msgspec.Struct, array_like=True, frozen=True):
    """The death of a core's predecessor, as far as it concerns one client."""

    incarnation: int
    """The incarnation of the core that died."""
    cause: str
    kind: str
    """"exit", "signal", "hang", "out_of_memory", "replaced", or "connection" if nothing else is known."""
    is_from_outside: bool
    """Another process killed or stopped the core, which no request can have caused."""
    num_in_step: int
    """Requests in the pending steps or at work on outside of steps, and calls that were carried out, of all clients."""
    in_step: list[tuple[int, int]] = []
    """(slot, progress) of each of these requests of this client. The progress is the number of output tokens, or minus
    the number of prompt tokens that are left."""
    num_restarts: int = 1
    """Number of restarts by the core's parent, with the one that followed this death."""
    calls: list[int] = []
    """The ids of this client's calls that were carried out."""
    model: ModelDigest = NO_DIGEST
    """What the core had loaded at its death, which may be other weights than those of its `Welcome`."""


class Welcome(_Message, tag=16):
    """Core to client: the answer to Hello, sent when the core can serve; `welcome` makes one.

    `config` is a `VllmConfig` as JSON, `package` the core's version of vllm-mp. `last_death` is None if the core has no
    predecessor, or knows nothing of it. `why_dropped` says why the core closed the client's last connection; it is
    empty if the core did not.
    """

    version: int
    incarnation: int
    client: int
    pid: int
    config: bytes
    schema: _Name = ""
    package: _Name = ""
    last_death: LastDeath | None = None
    why_dropped: str = ""
    is_paused: bool = False
    model: ModelDigest = NO_DIGEST


class Refused(_Message, tag=17):
    """Core to client: the answer to a Hello from a client that the core does not serve."""

    reason: str


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """The end of a request. The core sends exactly one for each slot added; the slot is free after it.

    `num_output_tokens` counts the tokens of the whole completion. `reason` is "stop", "length", "abort" or "error".
    `stop_reason` is a token id; the client finds stop strings itself. `needs_operator`: the error is that only
    operators may make such a request. `invalid_constraint`: the error is that the request's constraint cannot be
    compiled or followed. `too_many_constraints`: the error is that too many constraints of this client, or of all, are
    being compiled. `no_room`: the error is that live requests take too much of the core's memory; the client sends a
    replay again. `interrupted`: the request is not at fault, and may be sent again.
    """

    slot: int
    num_output_tokens: int
    reason: str
    stop_reason: int | str | None = None
    error: str | None = None
    needs_operator: bool = False
    invalid_constraint: bool = False
    too_many_constraints: bool = False
    no_room: bool = False
    interrupted: bool = False


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities at `len(ranks) / 4` successive positions of one request, from `position` on.

    `token_ids` (int32) and `values` (float32) have one row for each position, all of the same length: the chosen token,
    then the most likely ones, best first. `ranks` (uint32) belong to the chosen tokens; 1 is the best. All are
    little-endian.
    """

    slot: int
    position: int
    token_ids: bytes
    values: bytes
    ranks: bytes


class StepOutput(_Message, tag=18):
    """Core to client: the results of one step for this client, by column.

    Entry i of the columns says that request `slots[i]` has the token `tokens[i]` at `positions[i]` of its
    completion. Slots are uint16, or uint32 if any slot is above 65,535; tokens are uint32; positions are the lower 16
    bits of the position, which is enough for a client that knows the position it waits for. All are little-endian.
    `finished` applies after the tokens.
    """

    incarnation: int
    step: int
    slots: bytes
    tokens: bytes
    positions: bytes
    finished: list[Finished] = []
    cached: list[tuple[int, int]] = []
    """(slot, prompt tokens found in the cache) of requests with their first token here, if that number is not 0. It is
    0 for a replay, which may find what it has computed itself."""
    logprobs: list[TokenLogprobs] = []
    """Log-probabilities of tokens in the columns, at their positions in the completion."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Log-probabilities of prompt tokens, at their positions, in order; all arrive before the first output token."""
    vectors: list[tuple[int, bytes]] = []
    """(slot, vector as little-endian float32); together with its `Finished`, the answer to an `AddPooling`."""
    queued: list[tuple[int, float]] = []
    """(slot, seconds) of requests with their first token or their vector here: the time that each waited in this core
    until a step computed its first tokens."""
    adapters: list[tuple[int, str]] = []
    """(slot, digest of its adapter's weights) of requests with their first token here that have an adapter."""


class Reply(_Message, tag=19):
    """Core to client: the answer to a `Call`: a result of plain data, or an error.

    `needs_operator`: the error is that only operators may make this call.
    """

    incarnation: int
    call_id: int
    result: Any = None
    error: str | None = None
    needs_operator: bool = False


class Mark(_Message, tag=20):
    """Core to client: return `mark` in a `MarkSeen`, so that the core knows how much this client has read.

    A mark is random and follows every 64 KiB of output. A core that many clients share drops a client that returns none
    while much output waits for it.
    """

    incarnation: int
    mark: int


class PauseChanged(_Message, tag=21):
    """Core to client: a pause has begun or ended. `Welcome` says whether there is a pause at that time."""

    incarnation: int
    is_paused: bool


class MissingImages(_Message, tag=22):
    """Core to client: the request in `slot` was not added, because the core does not have the images `digests`.

    The client sends these images, and then the request again. `was_admitted`: the request was live, and the core has
    removed it, because a sleep has dropped what was made of its images.
    """

    incarnation: int
    slot: int
    digests: Annotated[list[ImageDigest], msgspec.Meta(max_length=MAX_IMAGES)]
    was_admitted: bool = False


class ModelChanged(_Message, tag=23):
    """Core to client: a sleep has dropped the weights, or a wake-up has read them again, or others.

    `Welcome` says what was loaded at that time.
    """

    incarnation: int
    model: ModelDigest
    """What the core has loaded; `NO_DIGEST`: it has no weights."""


CoreMessage = Welcome | Refused | StepOutput | Reply | Mark | PauseChanged | MissingImages | ModelChanged


class _BoundedParams(SamplingParams):
    """`SamplingParams` without the fields that may hold any value, which would be decoded before they are refused.

    Decoding them makes objects of up to seventy times the size of the bytes. Every typed field has a bound, here and in
    `SamplingParams`.
    """

    guided_decoding: None = None
    structured_outputs: None = None
    extra_args: None = None


class _LargeAddRequest(AddRequest, tag=2):
    """`AddRequest` in a large frame."""

    params: _BoundedParams


_encoder = msgspec.msgpack.Encoder()
_client_decoder = msgspec.msgpack.Decoder(ClientMessage)
_large_client_decoder = msgspec.msgpack.Decoder(
    functools.reduce(
        operator.or_, (_LargeAddRequest if kind is AddRequest else kind for kind in get_args(ClientMessage))
    )
)
_core_decoder = msgspec.msgpack.Decoder(CoreMessage)


SCHEMA = fingerprint((*get_args(ClientMessage), *get_args(CoreMessage), VllmConfig))
"""What client and core must have in common beside PROTOCOL_VERSION: the messages and the configuration."""


def hello(operator_key: bytes = b"", token: bytes = b"") -> Hello:
    """Return the `Hello` of this version of vllm-mp."""
    return Hello(PROTOCOL_VERSION, SCHEMA, _PACKAGE, operator_key, token)


def welcome(
    incarnation: int,
    client: int,
    pid: int,
    config: bytes,
    last_death: LastDeath | None = None,
    why_dropped: str = "",
    is_paused: bool = False,
    model: ModelDigest = NO_DIGEST,
) -> Welcome:
    """Return the `Welcome` of this version of vllm-mp."""
    return Welcome(
        PROTOCOL_VERSION, incarnation, client, pid, config, SCHEMA, _PACKAGE, last_death, why_dropped, is_paused, model
    )


def mismatch(peer: Hello | Welcome) -> str | None:
    """Return why this process must not talk to `peer`, naming both versions and the remedy; None if it may."""
    if (peer.version, peer.schema) == (PROTOCOL_VERSION, SCHEMA):
        return None
    theirs, ours = _described(peer), _described(hello())
    client, core = (theirs, ours) if isinstance(peer, Hello) else (ours, theirs)
    return (
        f"client and core do not match: the client is {client}, the core is {core}; install the same vllm-mp for both"
    )


def _described(peer: Hello | Welcome) -> str:
    """Return the versions of `peer` for an error."""
    package = f"vllm-mp {peer.package}" if peer.package else "another vllm-mp"
    return f"{package} (protocol version {peer.version}, schema {peer.schema or 'unknown'})"


class DropCounter:
    """Counts the messages that one end drops, and logs them ever more rarely."""

    def __init__(self, logger: logging.Logger, sender: str) -> None:
        self._logger = logger
        self._sender = sender
        self.num_dropped = 0

    def count(self) -> None:
        """Count a message that is dropped without a line in the log, such as one of an earlier incarnation."""
        self.num_dropped += 1

    def warn(self, why: str, cause: Exception | None = None) -> None:
        """Count a message that is invalid, and log it if the count is a power of two: so no flood fills the log."""
        self.num_dropped += 1
        if self.num_dropped & (self.num_dropped - 1) == 0:
            self._logger.warning(
                "dropped an invalid message from %s (%d so far): %.500s",
                self._sender,
                self.num_dropped,
                why,
                exc_info=cause,
            )


def encode(message: ClientMessage | CoreMessage) -> bytes:
    """Return `message` as a frame."""
    return _encoder.encode(message)


def encode_bounded(message: ClientMessage) -> bytes:
    """Return `message` as a frame for a core. Raises ValueError if it is larger than a core accepts."""
    frame = encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ValueError(f"the request is too large: {len(frame)} bytes, the limit is {MAX_MESSAGE_BYTES}; shorten it")
    return frame


def decode_client_message(frame: bytes) -> ClientMessage:
    """Decode a message of a client.

    Raises ValueError (msgspec.MsgspecError is one) for a frame that is no message, holds text that is not UTF-8 or has
    an invalid parameter, and RecursionError for a frame that is nested too deeply.
    """
    decoder = _client_decoder if len(frame) < _LARGE_FRAME_BYTES else _large_client_decoder
    message: ClientMessage = decoder.decode(frame)
    return message


def decode_core_message(frame: bytes) -> CoreMessage:
    """Decode a message of a core.

    Raises ValueError (msgspec.MsgspecError is one) and RecursionError as `decode_client_message` does.
    """
    message: CoreMessage = _core_decoder.decode(frame)
    return message


def pack_tokens(
    slots: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> tuple[bytes, bytes, bytes]:
    """Return the columns of a `StepOutput` from integer arrays [n]."""
    return pack_slots(slots), *pack_results(tokens, positions)


def pack_slots(slots: npt.NDArray[np.integer]) -> bytes:
    """Return the column of slots [n] of a `StepOutput`."""
    return slots.astype(_SHORT if not len(slots) or slots.max() < 2**16 else _LONG).tobytes()


def pack_results(tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> tuple[bytes, bytes]:
    """Return the columns of tokens and of positions of a `StepOutput` from arrays [n]."""
    return tokens.astype(_LONG).tobytes(), (positions & 0xFFFF).astype(_SHORT).tobytes()


def unpack_tokens(output: StepOutput) -> tuple[list[int], list[int], list[int]]:
    """Return slots, tokens and lower position bits of a `StepOutput`. Raises ValueError if the columns disagree."""
    return unpack_columns(output.slots, output.tokens, output.positions)


def unpack_columns(slots: bytes, tokens: bytes, positions: bytes) -> tuple[list[int], list[int], list[int]]:
    """Return the values of the columns of a `StepOutput`. Raises ValueError if the columns disagree."""
    count = len(tokens) // 4
    dtype = slot_dtype(slots, count)
    if len(tokens) != 4 * count or len(positions) != 2 * count or dtype is None:
        raise ValueError(
            f"the columns disagree: {len(slots)} bytes of slots, {len(tokens)} of tokens, {len(positions)} of positions"
        )
    return (
        np.frombuffer(slots, dtype).tolist(),
        np.frombuffer(tokens, "<u4").tolist(),
        np.frombuffer(positions, "<u2").tolist(),
    )


def slot_dtype(slots: bytes, count: int) -> Literal["<u2", "<u4"] | None:
    """Return the dtype of the column of `count` slots of a `StepOutput`; None if the column has another length."""
    if len(slots) == 2 * count:
        return "<u2"
    return "<u4" if len(slots) == 4 * count else None


def pack_ids(token_ids: list[int]) -> bytes:
    """Return token ids as little-endian int32."""
    return np.asarray(token_ids, TOKEN_IDS).tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.int32]:
    """Return token ids [n] from little-endian int32. Raises ValueError if the length is not a multiple of 4 bytes."""
    return np.frombuffer(data, TOKEN_IDS).astype(np.int32)
