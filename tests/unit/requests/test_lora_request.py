"""The name of an adapter in requests and calls."""

import msgspec
import pytest

from vllm_mp import LoRARequest


def test_adapter_is_named_by_position_as_in_vllm():
    request = LoRARequest("sql", 3, "/adapters/sql")
    assert (request.lora_name, request.lora_int_id, request.lora_path) == ("sql", 3, "/adapters/sql")
    assert (request.name, request.adapter_id, request.path) == ("sql", 3, "/adapters/sql")
    assert not request.load_inplace


def test_adapters_with_the_same_name_are_equal():
    same, other = LoRARequest("sql", 2, "/b"), LoRARequest("other", 1, "/a")
    assert LoRARequest("sql", 1, "/a") == same
    assert LoRARequest("sql", 1, "/a") != other
    assert len({LoRARequest("sql", 1, "/a"), same, other}) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("", 1, "/a"), ValueError, "lora_name must have 1 to 256 characters"),
        (("x" * 257, 1, "/a"), ValueError, "lora_name must have 1 to 256 characters, got 257"),
        (("x", 1), ValueError, "lora_path must have 1 to 4096 characters, got 0"),
        (("x", 1, "a\0b"), ValueError, "lora_path must be valid Unicode"),
        (("\ud800", 1, "/a"), ValueError, "lora_name must be valid Unicode"),
        (("x", 0, "/a"), ValueError, "lora_int_id must be at least 1"),
        (("x", -1, "/a"), ValueError, "lora_int_id must be at least 1"),
        (("x", 2**31, "/a"), ValueError, "lora_int_id must be at least 1 and at most 2147483647"),
        (("x", True, "/a"), TypeError, "lora_int_id must be an integer, got True"),
        (("x", "1", "/a"), TypeError, "lora_int_id must be an integer, got '1'"),
        ((b"x", 1, "/a"), TypeError, "lora_name must be a string"),
        (("x", 1, None), TypeError, "lora_path must be a string"),
        (("x", 1, "/a", None, {"key": 1}), NotImplementedError, "tensorizer_config_dict"),
        (("x", 1, "/a", None, None, 1), TypeError, "load_inplace must be a bool"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(arguments, error, words):
    with pytest.raises(error, match=words):
        LoRARequest(*arguments)


def test_values_that_cannot_work_are_refused_when_a_message_is_decoded():
    for values in (["x", 0, "/a"], ["", 1, "/a"], ["x", 1], ["x" * 257, 1, "/a"]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(values), type=LoRARequest)
