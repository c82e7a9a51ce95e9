"""Messages arrive unchanged, a token takes at most ten bytes, and arbitrary bytes do no harm."""

import datetime
import hashlib
import os
import subprocess
import sys
from typing import Annotated

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mp import __version__, wire
from vllm_mp.arguments.parameters import Integer, Number, Strings, Switch, TokenBiases, TokenIds
from vllm_mp.config import VllmConfig
from vllm_mp.requests.images import ImageArray, ProcessedImage
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.sampling_params import PARAMETERS, SEED_LIMIT, RequestOutputKind, SamplingParams
from vllm_mp.testing.sampling_cases import every_field, invalid_values
from vllm_mp.wire_schema import fingerprint

PARAMS = SamplingParams(**{**every_field(), "seed": -SEED_LIMIT, "stop_token_ids": [0, 2**31 - 1], "max_tokens": None})
CLIENT_MESSAGES = [
    wire.hello(),
    wire.hello(operator_key=b"k" * 64),
    wire.hello(b"a key", b"0123456789abcdef"),
    wire.AddRequest(1, 0, "id", wire.pack_ids([1, 2, 3]), SamplingParams(seed=1)),
    wire.AddRequest(2**63 - 1, 2**20 - 1, "id é 😀", b"", PARAMS, -(2**31), wire.pack_ids([5]), "salt é"),
    wire.AbortRequests(1, []),
    wire.AbortRequests(1, [0, 65_536, 2**20 - 1]),
    wire.Call(1, 2**40, "status"),
    wire.Call(1, 3, "pause", ["keep", True]),
    wire.AddPooling(1, 4, "id", wire.pack_ids([1]), PoolingParams(pooling_type="CLS", dimensions=8), 2, "salt"),
    wire.Bye(3),
    wire.MarkSeen(3, 2**63 - 1),
    wire.ReplayEnd(3),
    wire.Convicted(3, [1, 2]),
    wire.PutImage(3, ProcessedImage(bytes(32), [ImageArray("pixel_values", "uint8", [1, 2], b"ab")])),
]
CORE_MESSAGES = [
    wire.welcome(7, 2, 12345, b'{"a": 1}'),
    wire.welcome(7, 2, 12345, b"{}", wire.LastDeath(6, "why", "signal", False, 3, [(0, 5), (70_000, 0)])),
    wire.Refused("no such key: é"),
    wire.StepOutput(1, 9, b"\x00\x00", b"\x01\x00\x00\x00", b"\x00\x00"),
    wire.StepOutput(
        1, 9, b"", b"", b"", [wire.Finished(3, 70_000, "stop", 2), wire.Finished(4, 0, "error", None, "why")]
    ),
    wire.StepOutput(1, 9, b"", b"", b"", cached=[(3, 2**20)]),
    wire.StepOutput(1, 9, b"", b"", b"", [wire.Finished(3, 0, "stop")], vectors=[(3, b"\x00\x00\x80\x3f")]),
    wire.Reply(1, 2, {"free_blocks": 3, "list": [1.5, None, "x"]}),
    wire.Reply(1, 2, error="no operation 'x'"),
    wire.Reply(1, 2, error="no", needs_operator=True),
    wire.PauseChanged(1, True),
    wire.Mark(3, 2**63 - 1),
    wire.MissingImages(3, 5, [bytes(32)], was_admitted=True),
    wire.ModelChanged(3, wire.ModelDigest("weights", "config", "tokenizer")),
]


def documented_errors(decode):
    """Return the errors that the docstring of `decode` names."""
    known = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError)
    return tuple(error for error in known if error.__name__ in decode.__doc__)


def assert_decodes_or_is_refused(decode, frame, kinds):
    """Check that `decode(frame)` returns a message or raises an error that its docstring names."""
    try:
        message = decode(frame)
    except documented_errors(decode):
        return
    assert isinstance(message, kinds)


def assert_no_harm(frame):
    """Check that both sides decode the frame or refuse it with a documented error."""
    assert_decodes_or_is_refused(wire.decode_client_message, frame, wire.ClientMessage)
    assert_decodes_or_is_refused(wire.decode_core_message, frame, wire.CoreMessage)


@pytest.mark.parametrize("message", CLIENT_MESSAGES, ids=lambda message: type(message).__name__)
def test_message_of_a_client_arrives_unchanged(message):
    assert wire.decode_client_message(wire.encode(message)) == message


@pytest.mark.parametrize("message", CORE_MESSAGES, ids=lambda message: type(message).__name__)
def test_message_of_a_core_arrives_unchanged(message):
    assert wire.decode_core_message(wire.encode(message)) == message


def test_examples_cover_every_message():
    assert {type(message) for message in CLIENT_MESSAGES} == set(wire.ClientMessage.__args__)
    assert {type(message) for message in CORE_MESSAGES} == set(wire.CoreMessage.__args__)


def test_each_side_refuses_messages_of_its_own_kind():
    for message in CLIENT_MESSAGES:
        with pytest.raises(msgspec.ValidationError):
            wire.decode_core_message(wire.encode(message))
    for message in CORE_MESSAGES:
        with pytest.raises(msgspec.ValidationError):
            wire.decode_client_message(wire.encode(message))


def values_of(parameter):
    """Return a strategy of values that a field of this declaration accepts."""
    token_ids = st.integers(0, 2**31 - 1)
    match parameter:
        case Integer(low, high, optional):
            numbers = st.integers(low, high)
            return st.none() | numbers if optional else numbers
        case Number(low, high, open_low):
            return st.floats(low, high, exclude_min=open_low)
        case Switch():
            return st.booleans()
        case Strings():
            return st.none() | st.lists(st.text(min_size=1))
        case TokenIds(_, optional):
            return st.none() | st.lists(token_ids, min_size=optional)
        case TokenBiases():
            return st.none() | st.dictionaries(token_ids, st.floats(-1e6, 1e6))
        case _:
            return st.none()


LIMITED_BY_OTHER_FIELDS = {
    "n": st.just(1),
    "best_of": st.none(),
    "min_tokens": st.just(0),
    "detokenize": st.just(True),
    "truncate_prompt_tokens": st.sampled_from([None, -1, 1, 2**31 - 1]),
    "stop": st.text(min_size=1) | values_of(PARAMETERS["stop"]),
    "output_kind": st.sampled_from(RequestOutputKind),
}


@given(
    st.builds(
        SamplingParams,
        **{name: values_of(parameter) for name, parameter in PARAMETERS.items()} | LIMITED_BY_OTHER_FIELDS,
    )
)
def test_valid_parameters_arrive_unchanged(params):
    message = wire.AddRequest(1, 0, "id", b"", params)
    assert wire.decode_client_message(wire.encode(message)) == message


@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name in PARAMETERS for value in invalid_values(name)], ids=str
)
def test_invalid_parameter_is_refused_by_name_on_arrival(field, value):
    frame = msgspec.msgpack.encode([2, 1, 0, "id", b"", {field: value}])
    with pytest.raises(msgspec.ValidationError, match=field):
        wire.decode_client_message(frame)
    wire.decode_client_message(msgspec.msgpack.encode([2, 1, 0, "id", b"", {}]))


def test_unknown_fields_are_ignored_and_missing_fields_take_their_default():
    fields = msgspec.msgpack.decode(wire.encode(wire.Reply(1, 2, "result", None)))
    assert wire.decode_core_message(msgspec.msgpack.encode([*fields, "of a later version"])) == wire.Reply(
        1, 2, "result"
    )
    assert wire.decode_core_message(msgspec.msgpack.encode(fields[:3])) == wire.Reply(1, 2)


def test_peers_of_another_version_or_schema_do_not_match():
    ours = f"vllm-mp {__version__} (protocol version {wire.PROTOCOL_VERSION}, schema {wire.SCHEMA})"
    assert wire.mismatch(wire.hello()) is None
    assert wire.mismatch(wire.welcome(1, 0, 1, b"{}")) is None
    remedy = "install the same vllm-mp for both"
    assert wire.mismatch(wire.Hello(wire.PROTOCOL_VERSION, "0" * 16, "9.9")) == (
        f"client and core do not match: the client is vllm-mp 9.9 (protocol version {wire.PROTOCOL_VERSION}, schema "
        f"{'0' * 16}), the core is {ours}; {remedy}"
    )
    assert wire.mismatch(wire.Welcome(2, 1, 0, 1, b"{}")) == (
        f"client and core do not match: the client is {ours}, the core is another vllm-mp (protocol version 2, schema "
        f"unknown); {remedy}"
    )
    assert wire.mismatch(wire.Hello(wire.PROTOCOL_VERSION + 1, wire.SCHEMA, __version__)) is not None


class Inner(msgspec.Struct, array_like=True):
    b: int
    a: "int | None" = None


class Outer(msgspec.Struct, array_like=True, tag=9):
    x: Annotated[list[tuple[str, Inner] | None], msgspec.Meta(max_length=3)] = []
    y: bytes = b""


def test_schema_is_a_digest_of_the_names_types_and_order_of_all_fields():
    lines = b"Inner None: b=int a=NoneType|int\nOuter 9: x=list[NoneType|tuple[str,Inner]] y=bytes"
    assert fingerprint([Outer]) == hashlib.sha256(lines).hexdigest()[:16]
    seen = fingerprint((*wire.ClientMessage.__args__, *wire.CoreMessage.__args__, VllmConfig))
    assert seen == wire.SCHEMA
    assert fingerprint(wire.CoreMessage.__args__) != seen


def test_schema_is_the_same_in_every_process():
    found = subprocess.run(
        [sys.executable, "-c", "from vllm_mp import wire; print(wire.SCHEMA)"],
        env={**os.environ, "PYTHONHASHSEED": "1"},  # this process has a random one
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == wire.SCHEMA


def test_another_type_of_a_field_changes_the_schema():
    kinds = (int, str, list[tuple[int, int]], list[tuple[int, int, int]], int | None)
    structs = [msgspec.defstruct("Message", [("x", kind)], array_like=True, tag=3) for kind in kinds]
    assert len({fingerprint([struct]) for struct in structs}) == len(kinds)


def test_field_of_the_configuration_belongs_to_the_schema():
    later = msgspec.defstruct("VllmConfig", [("fake", int, 0)], bases=(VllmConfig,), kw_only=True)
    assert fingerprint([later]) != fingerprint([VllmConfig])


def test_new_sampling_parameter_changes_the_schema():
    names = {field.encode_name for field in msgspec.structs.fields(SamplingParams)}
    later = msgspec.defstruct("SamplingParams", [*((name, int, 0) for name in names), ("fake", int, 0)])
    message = msgspec.defstruct("AddRequest", [("params", later)], array_like=True, tag=2)
    same = msgspec.defstruct("AddRequest", [("params", SamplingParams)], array_like=True, tag=2)
    assert fingerprint([message]) != fingerprint([same])


def test_decoder_of_large_frames_reads_every_client_message():
    for message in CLIENT_MESSAGES:
        assert msgspec.to_builtins(wire._large_client_decoder.decode(wire.encode(message))) == msgspec.to_builtins(
            message
        )


COLUMNS = st.lists(
    st.tuples(st.integers(0, wire.MAX_LIVE_REQUESTS - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**24)),
    max_size=40,
)


def step_output(rows):
    slots, tokens, positions = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    return wire.StepOutput(1, 5, *wire.pack_tokens(slots, tokens, positions))


def test_frame_that_is_larger_than_a_core_accepts_is_refused(monkeypatch):
    call = wire.Call(0, 1, "operation", ["value"])
    size = len(wire.encode(call))
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", size)
    assert wire.encode_bounded(call) == wire.encode(call)
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", size - 1)
    with pytest.raises(ValueError, match=f"too large: {size} bytes, the limit is {size - 1}; shorten it"):
        wire.encode_bounded(call)


@given(COLUMNS)
def test_tokens_arrive_with_slots_and_lower_bits_of_positions(rows):
    arrived = wire.decode_core_message(wire.encode(step_output(rows)))
    slots, tokens, positions = wire.unpack_tokens(arrived)
    assert slots == [slot for slot, _, _ in rows]
    assert tokens == [token for _, token, _ in rows]
    assert positions == [position % 2**16 for _, _, position in rows]


@pytest.mark.parametrize(("highest", "width"), [(0, 2), (65_535, 2), (65_536, 4), (wire.MAX_LIVE_REQUESTS - 1, 4)])
def test_slots_take_four_bytes_only_if_any_slot_is_above_65535(highest, width):
    output = step_output([(3, 1, 0), (highest, 2, 65_535), (4, 2**32 - 1, 65_536 + 7)])
    assert len(output.slots) == 3 * width
    assert wire.unpack_tokens(output) == ([3, highest, 4], [1, 2, 2**32 - 1], [0, 65_535, 7])


def test_token_takes_at_most_ten_bytes_with_1024_streams():
    rng = np.random.default_rng(1)
    rows = [(slot, int(rng.integers(0, 2**18)), int(rng.integers(0, 2**17))) for slot in range(1024)]
    output = step_output(rows)
    output.incarnation, output.step = 2**63 - 1, 2**40
    output.finished = [wire.Finished(slot, 70_000, "length") for slot in range(0, 1024, 64)]
    assert len(wire.encode(output)) / 1024 <= 10


@given(st.binary(max_size=24), st.binary(max_size=24), st.binary(max_size=24))
def test_columns_that_disagree_raise_value_error(slots, tokens, positions):
    count = len(tokens) / 4
    output = wire.StepOutput(1, 1, slots, tokens, positions)
    if len(positions) == 2 * count and len(slots) in (2 * count, 4 * count) and count % 1 == 0:
        assert {len(column) for column in wire.unpack_tokens(output)} == {count}
    else:
        with pytest.raises(ValueError, match="columns disagree"):
            wire.unpack_tokens(output)


@pytest.mark.parametrize("column", ["slots", "tokens", "positions"])
def test_column_that_lacks_a_byte_raises_value_error(column):
    output = step_output([(1, 2, 3), (4, 5, 6)])
    setattr(output, column, getattr(output, column)[:-1])
    with pytest.raises(ValueError, match="columns disagree"):
        wire.unpack_tokens(output)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_arrive_unchanged(ids):
    packed = wire.pack_ids(ids)
    assert len(packed) == 4 * len(ids)
    assert wire.unpack_ids(packed).tolist() == ids
    assert wire.unpack_ids(packed).flags.writeable


def test_truncated_token_ids_raise_value_error():
    with pytest.raises(ValueError):
        wire.unpack_ids(wire.pack_ids([1, 2])[:-1])


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_do_no_harm(frame):
    assert_no_harm(frame)


FRAMES = [wire.encode(message) for message in CLIENT_MESSAGES + CORE_MESSAGES]
EDITS = st.lists(
    st.tuples(st.sampled_from(["set", "insert", "delete", "cut"]), st.integers(0, 400), st.integers(0, 255)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150)
@given(st.sampled_from(FRAMES), EDITS)
def test_damaged_frames_do_no_harm(frame, edits):
    data = bytearray(frame)
    for kind, place, value in edits:
        if kind == "insert":
            data.insert(place % (len(data) + 1), value)
        elif data and kind == "set":
            data[place % len(data)] = value
        elif data and kind == "delete":
            del data[place % len(data)]
        elif data:
            del data[place % len(data) :]
    assert_no_harm(bytes(data))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.datetimes(timezones=st.just(datetime.UTC)),
    lambda inner: (
        st.lists(inner, max_size=8)
        | st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__) | st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=12,
)


@given(st.sampled_from([1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20]), st.lists(PLAIN, max_size=8))
def test_well_formed_nonsense_does_no_harm(tag, fields):
    assert_no_harm(msgspec.msgpack.encode([tag, *fields]))


@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), PLAIN, min_size=1, max_size=6))
def test_nonsense_in_parameters_does_no_harm(params):
    assert_no_harm(msgspec.msgpack.encode([2, 1, 0, "id", b"", params]))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x91" * 100_000,
        b"\x96\x02\x01\x00\xa1x\xc4\x00\x81\xaaextra_args\x81\xa1a" + b"\x91" * 100_000,
        b"\x94\x13\x01\x00" + b"\x91" * 100_000,
        b"\x96\x02\x01\x00\xa1\xff\xc4\x00\x80",
        b"\x92\x11\xa1\xff",
        b"\x94\x13\x01\x00\xa1\xff",
        b"\x94\x13\x01\x00\x81\x81\x80\x01\x01",
        b"\x94\x13\x01\x00\xc7\x0c\xff" + b"\xff" * 12,
        b"\xdd\xff\xff\xff\xff\x02",
        b"\x93\x03\x01\xdd\xff\xff\xff\xff",
        b"\x92\x11\xdb\xff\xff\xff\xffabc",
    ],
    ids=[
        "empty",
        "deep",
        "deep extra_args",
        "deep result",
        "request id not UTF-8",
        "reason not UTF-8",
        "result not UTF-8",
        "unhashable key",
        "time out of range",
        "huge array",
        "huge slots",
        "huge string",
    ],
)
def test_hostile_frames_do_no_harm(frame):
    assert_no_harm(frame)
