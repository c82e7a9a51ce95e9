"""Sampling parameters out of range are refused with field, value and range."""

import math
import random
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pytest

from vllm_mp import wire
from vllm_mp.arguments.parameters import Integer, Number, Switch
from vllm_mp.requests.sampling_params import PARAMETERS, SamplingParams, _declared
from vllm_mp.testing.sampling_cases import CASES, SHOWN_ELSEWHERE, every_field, random_params

REPOSITORY = Path(__file__).parents[3]

BOOLEANS = [name for name, parameter in PARAMETERS.items() if isinstance(parameter, Switch)]
RANGES = [(name, *case.range) for name, case in CASES.items() if case.range is not None]
"""(field, low, high, the range in the text of the error); low and high are valid values."""
INTEGERS = [name for name, parameter in PARAMETERS.items() if isinstance(parameter, Integer)]
NUMBERS = [name for name, parameter in PARAMETERS.items() if isinstance(parameter, Number)]


def refusal(error, **fields):
    """Return the message with which parameters are refused."""
    with pytest.raises(error) as caught:
        SamplingParams(**fields)
    return str(caught.value)


def test_every_field_has_a_case():
    """A new field needs a case that shows what it changes."""
    fields = set(SamplingParams.__struct_fields__)
    assert CASES.keys() | SHOWN_ELSEWHERE.keys() == fields
    assert len(CASES) + len(SHOWN_ELSEWHERE) == len(fields), "a field is in two places"
    for name, path in SHOWN_ELSEWHERE.items():
        assert name in (REPOSITORY / path).read_text()


def test_every_number_has_a_range_in_its_case():
    assert {name for name, *_ in RANGES} == {*NUMBERS, *INTEGERS} - {"best_of"}


@pytest.mark.parametrize("name", CASES)
def test_values_of_every_case_are_valid_and_the_first_is_not_the_default(name):
    given = [getattr(SamplingParams(**{name: value}), name) for value in CASES[name].values]
    assert given[0] != getattr(SamplingParams(), name)
    SamplingParams(**every_field())


def test_random_parameters_are_valid_and_cover_every_field():
    seen = set()
    for seed in range(300):
        params = random_params(random.Random(seed), 0.3)
        SamplingParams(**params)
        seen |= params.keys()
    assert seen == CASES.keys()


def test_field_without_a_declaration_is_an_error():
    undeclared = msgspec.defstruct("SamplingParams", [("fake", float, 0.0)])
    with pytest.raises(TypeError, match=r"SamplingParams\.fake has no declaration"):
        _declared(msgspec.structs.fields(undeclared)[0])


@pytest.mark.parametrize(("name", "low", "high", "limits"), RANGES)
def test_both_ends_of_a_range_are_accepted_and_values_beyond_them_are_refused(name, low, high, limits):
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    least = 0 if limits.startswith("(") else low
    for value in (least - 1, *([0] if limits.startswith("(") else []), *([] if name == "min_tokens" else [high + 1])):
        assert refusal(ValueError, **{name: value}) == f"{name} must be in {limits}, got {value}"


@pytest.mark.parametrize(
    ("name", "value", "limits"),
    [
        ("best_of", 0, "[1, 1024]"),
        ("presence_penalty", 2.1, "[-2, 2]"),
        ("presence_penalty", -2.1, "[-2, 2]"),
        ("frequency_penalty", 3, "[-2, 2]"),
        ("repetition_penalty", 0.0, "[1e-06, 1e+06]"),
        ("repetition_penalty", -1.0, "[1e-06, 1e+06]"),
        ("repetition_penalty", 1e-50, "[1e-06, 1e+06]"),
        ("temperature", -0.1, "[0, 1e+06]"),
        ("temperature", 1e7, "[0, 1e+06]"),
        ("top_p", 0.0, "(0, 1]"),
        ("top_p", 1.01, "(0, 1]"),
        ("min_p", -0.1, "[0, 1]"),
        ("min_p", 1.5, "[0, 1]"),
        ("max_tokens", -1, "[1, 2147483647]"),
        ("min_tokens", 17, "at most max_tokens=16"),
        ("truncate_prompt_tokens", 0, "-1 or at least 1"),
    ],
)
def test_number_out_of_range_is_refused_with_field_value_and_range(name, value, limits):
    message = refusal(ValueError, **{name: value})
    assert message.startswith(f"{name} must be")
    assert limits in message
    assert f"got {value}" in message


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(10**400), np.float32("nan")], ids=repr)
def test_number_that_is_not_finite_is_refused_by_name(name, value):
    message = refusal(ValueError, **{name: value})
    assert message.startswith(f"{name} must be in")
    assert f"got {value}" in message


@pytest.mark.parametrize("name", [name for name, *_ in RANGES])
def test_number_of_the_wrong_type_is_refused_by_name(name):
    wrong = [np.bool_(True), "1", [1], 1j, *([1.5] if name in INTEGERS else [])]
    wrong.append(name not in ("logprobs", "prompt_logprobs"))  # True stands for 1 in these
    for value in wrong:
        message = refusal(TypeError, **{name: value})
        assert message.startswith(f"{name} must be a")
        assert repr(value) in message


def test_true_asks_for_one_log_probability():
    assert SamplingParams(logprobs=True, prompt_logprobs=True) == SamplingParams(logprobs=1, prompt_logprobs=1)


def test_none_stands_for_defaults_in_from_optional():
    assert SamplingParams.from_optional(**dict.fromkeys(SamplingParams.__struct_fields__)) == SamplingParams(
        max_tokens=None
    )
    assert SamplingParams.from_optional(temperature=0.5, top_p=None, stop="x") == SamplingParams(
        temperature=0.5, stop="x"
    )
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams.from_optional(temprature=None)


def test_biases_are_clamped_in_from_optional():
    params = SamplingParams.from_optional(logit_bias={"7": math.inf, 8: -1e9, 9: 2.5})
    assert params.logit_bias == {7: 100.0, 8: -100.0, 9: 2.5}
    with pytest.raises(ValueError, match=r"logit_bias\[7\] must be in"):
        SamplingParams.from_optional(logit_bias={7: math.nan})
    with pytest.raises(TypeError, match=r"logit_bias\[7\] must be a number"):
        SamplingParams.from_optional(logit_bias={7: "much"})


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("value", [1, 0, None, "yes", np.bool_(True)], ids=repr)
def test_switch_accepts_only_true_and_false(name, value):
    assert refusal(TypeError, **{name: value}) == f"{name} must be True or False, got {value!r}"


def test_numbers_of_other_libraries_become_int_and_float():
    params = SamplingParams(
        n=np.int64(3),
        temperature=np.float32(0.5),
        top_p=Fraction(1, 2),
        seed=np.uint32(7),
        stop_token_ids=[np.int32(4)],
        allowed_token_ids=(np.int64(5), 6),
        logit_bias={np.int64(7): np.float32(1.5), "8": 2},
    )
    assert params == SamplingParams(
        n=3,
        temperature=0.5,
        top_p=0.5,
        seed=7,
        stop_token_ids=[4],
        allowed_token_ids=[5, 6],
        logit_bias={7: 1.5, 8: 2.0},
    )
    assert {type(key) for key in params.logit_bias} == {int}
    assert {type(bias) for bias in params.logit_bias.values()} == {float}
    msgspec.msgpack.encode(params)


@pytest.mark.parametrize(("name", "max_count"), [("stop", 64), ("bad_words", 1024)])
def test_lists_of_strings_have_limits_of_count_and_length(name, max_count):
    texts = ["x" * 256] + [str(i) for i in range(max_count - 1)]
    assert getattr(SamplingParams(**{name: texts}), name) == texts
    assert f"at most {max_count} strings, got {max_count + 1}" in refusal(ValueError, **{name: [*texts, "y"]})
    for text, size in (("", 0), ("y" * 257, 257)):
        message = refusal(ValueError, **{name: ["fine", text]})
        assert message.startswith(f"{name} must hold strings of 1 to 256 characters, got {size}")
        assert message.endswith("; give a part of the string" if text else "; leave it out")
        assert len(message) < 200, "the error does not repeat the whole text"
    assert refusal(ValueError, **{name: ["\ud800"]}).startswith(f"{name} must hold valid Unicode")
    assert refusal(TypeError, **{name: ["a", 3]}) == f"{name} must hold strings, got 3"


def test_single_stop_string_becomes_a_list_and_lists_are_empty_by_default():
    assert SamplingParams(stop="END").stop == ["END"]
    assert refusal(ValueError, stop="").startswith("stop must hold strings of 1 to")
    params = SamplingParams()
    assert (params.stop, params.stop_token_ids, params.bad_words, params.allowed_token_ids) == ([], [], [], None)


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "bad_words", "allowed_token_ids"])
@pytest.mark.parametrize("value", [5, 0, {1: 2}, np.array([1, 2]), 1.5], ids=repr)
def test_value_that_is_not_a_list_is_refused_by_name(name, value):
    message = refusal(TypeError, **{name: value})
    assert message.startswith(f"{name} must be a list")
    assert repr(value) in message


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_id_out_of_range_or_of_the_wrong_type_is_refused_by_name(name):
    assert getattr(SamplingParams(**{name: [0, 2**31 - 1]}), name) == [0, 2**31 - 1]
    for value in (-1, 2**31, 10**400):
        message = refusal(ValueError, **{name: [3, value]})
        assert message == f"{name} must hold token ids, integers in [0, 2**31), got {value}"
    for value in (True, 1.0, "1", None):
        assert refusal(TypeError, **{name: [3, value]}) == f"{name} must hold token ids, got {value!r}"


def test_empty_list_of_allowed_tokens_is_refused():
    assert refusal(ValueError, allowed_token_ids=[]).startswith("allowed_token_ids must not be empty")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.1e6, -1.1e6, 10**400], ids=lambda v: repr(v)[:15])
def test_bias_out_of_range_is_refused_by_name(value):
    message = refusal(ValueError, logit_bias={1: 0.5, 7: value})
    assert message == f"logit_bias[7] must be in [-1e+06, 1e+06], got {value!r}"


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ([1], TypeError, "logit_bias must be a dict of token ids and numbers, got [1]"),
        ({1: True}, TypeError, "logit_bias[1] must be a number, got True"),
        ({1: "2"}, TypeError, "logit_bias[1] must be a number, got '2'"),
        ({1: None}, TypeError, "logit_bias[1] must be a number, got None"),
        ({"3.5": 1}, TypeError, "logit_bias must have token ids as keys, got '3.5'"),
        ({"x": 1}, TypeError, "logit_bias must have token ids as keys, got 'x'"),
        ({1.0: 1}, TypeError, "logit_bias must have token ids as keys, got 1.0"),
        ({True: 1}, TypeError, "logit_bias must have token ids as keys, got True"),
        ({None: 1}, TypeError, "logit_bias must have token ids as keys, got None"),
        ({-1: 1}, ValueError, "logit_bias must have token ids as keys, integers in [0, 2**31), got -1"),
        ({"-1": 1}, ValueError, "logit_bias must have token ids as keys, integers in [0, 2**31), got -1"),
        ({2**31: 1}, ValueError, "logit_bias must have token ids as keys, integers in [0, 2**31), got 2147483648"),
    ],
    ids=repr,
)
def test_bias_of_the_wrong_type_is_refused_by_name(value, error, words):
    assert refusal(error, logit_bias=value) == words


def test_best_of_is_refused_with_a_reason_unless_it_equals_n():
    assert SamplingParams(n=3, best_of=3).best_of == 3
    message = refusal(ValueError, n=2, best_of=4)
    assert message.startswith(
        "best_of must be None or equal to n=2, got 4: no completions are drawn that are not returned"
    )


def test_several_greedy_answers_are_refused():
    assert SamplingParams(n=1, temperature=0).n == 1
    message = refusal(ValueError, n=2, temperature=0)
    assert message.startswith("n must be 1 with temperature=0, got 2: all completions would be the same")


def test_stop_strings_without_detokenization_are_refused():
    message = refusal(ValueError, stop="x", detokenize=False)
    assert message.startswith("stop needs detokenize=True")
    assert SamplingParams(stop_token_ids=[1], detokenize=False).stop_token_ids == [1]


def test_min_tokens_may_equal_max_tokens_and_has_no_limit_without_max_tokens():
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=5000, max_tokens=None).min_tokens == 5000


def test_extra_args_are_copied_as_plain_data():
    given = {"a": (1, 2.5), "b": {"c": [None, True, b"x"]}}
    found = SamplingParams(extra_args=given).extra_args
    assert found == {"a": [1, 2.5], "b": {"c": [None, True, b"x"]}}
    given["b"]["c"].append(1)
    assert len(found["b"]["c"]) == 3
    assert SamplingParams(extra_args={}).extra_args == {}


@pytest.mark.parametrize(
    ("value", "error", "why"),
    [
        (["a"], TypeError, "extra_args must be a dict, got ['a']"),
        ({"a": object}, TypeError, "extra_args must be a dict of plain data"),
        ({1: 2}, ValueError, "extra_args must be a dict of plain data with strings as keys"),
        ({"a": "x" * 2**14}, ValueError, "extra_args must be of at most 16384 bytes, got 16390"),
    ],
    ids=["list", "class", "key", "size"],
)
def test_other_extra_args_are_refused(value, error, why):
    assert refusal(error, extra_args=value).startswith(why)


def test_logits_processors_are_names_and_a_callable_is_refused_with_the_remedy():
    assert SamplingParams(logits_processors=("a", "b")).logits_processors == ["a", "b"]
    for value in (lambda logits: logits, [lambda logits: logits], [Integer]):
        message = refusal(TypeError, logits_processors=value)
        assert message.startswith("logits_processors must hold names of logits processors, got ")
        assert "no code travels to the core; start the engine with logits_processors=['name=module:Class']" in message
    assert "must be a list, got 'a'" in refusal(TypeError, logits_processors="a")


def test_seed_of_minus_one_means_no_seed():
    assert SamplingParams(seed=-1).seed is None


@pytest.mark.parametrize("value", [3, "DELTA", None])
def test_unknown_output_kind_is_refused(value):
    assert refusal(ValueError, output_kind=value) == f"output_kind must be a RequestOutputKind, got {value!r}"


def test_parameters_copy_the_lists_that_they_are_given():
    ids, bias, stop = [1], {1: 1.0}, ["x"]
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, logit_bias=bias, stop=stop)
    copy = params.clone()
    ids.append(2)
    bias[2] = 2.0
    stop.append("y")
    assert (params.stop_token_ids, params.allowed_token_ids, params.logit_bias, params.stop) == (
        [1],
        [1],
        {1: 1},
        ["x"],
    )
    copy.temperature = 0.0
    assert params.temperature == 1.0


FULL = every_field() | {
    "n": 3,
    "best_of": 3,
    "seed": -(2**63),
    "stop": ["é", "\0"],
    "max_tokens": None,
    "logprobs": -1,
    "truncate_prompt_tokens": -1,
    "spaces_between_special_tokens": False,
    "logit_bias": {0: -1e6, 2**31 - 1: 0.1},
    "allowed_token_ids": [2, 1, 2],
    "extra_args": {"a": 1},
    "logits_processors": ["a"],
}


def test_parameters_cross_the_wire_unchanged():
    for params in (SamplingParams(), SamplingParams(**FULL), SamplingParams(stop_token_ids=[1], detokenize=False)):
        message = wire.AddRequest(1, 0, "id", b"", params)
        assert wire.decode_client_message(wire.encode(message)).params == params
    by_constraint = {"structured_outputs", "guided_decoding"}
    assert FULL.keys() | {"detokenize"} | by_constraint == set(SamplingParams.__struct_fields__)


def test_bias_in_json_has_string_keys_that_become_token_ids():
    text = '{"logit_bias": {"17": -100, "3": 2.5}}'
    assert msgspec.json.decode(text, type=SamplingParams).logit_bias == {17: -100.0, 3: 2.5}


def test_lists_of_token_ids_have_a_limit_and_stop_token_ids_have_no_duplicates():
    assert SamplingParams(stop_token_ids=[5, 3, 5, 3]).stop_token_ids == [5, 3]
    assert "at most 1024 token ids, got 1025" in refusal(ValueError, stop_token_ids=[1] * 1025)
    assert "at most 262144 token ids, got 262145" in refusal(ValueError, allowed_token_ids=[1] * (2**18 + 1))
    assert "at most 262144 token ids" in refusal(ValueError, logit_bias=dict.fromkeys(range(2**18 + 1), 0.0))
