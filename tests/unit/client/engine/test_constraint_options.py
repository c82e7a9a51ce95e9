"""The engine's options of structured output are what a request gets that leaves them open."""

import asyncio

import pytest

from vllm_mp import EngineArgs, SamplingParams, StructuredOutputsParams
from vllm_mp.client.prompts.request import CallerRequest


@pytest.fixture
def json_options(input_processor):
    """A function that returns what the core is told of JSON, for options of the engine and fields of a request."""

    def found(engine_options, **fields):
        form = StructuredOutputsParams(json_object=True, **fields)
        inputs = input_processor(**engine_options)
        given = CallerRequest("id", None, [1, 2], 0, 0.0, {})
        stream = asyncio.run(inputs.generation(given, SamplingParams(structured_outputs=form)))
        constraint = stream._request.constraint
        return constraint.any_whitespace, constraint.whitespace_pattern, constraint.additional_properties

    return found


@pytest.mark.parametrize(
    "options",
    [
        {"guided_decoding_disable_any_whitespace": True, "guided_decoding_disable_additional_properties": True},
        {"structured_outputs_config": {"disable_any_whitespace": True, "disable_additional_properties": True}},
    ],
    ids=["older names", "newer name"],
)
def test_engine_can_forbid_whitespace_and_other_properties_by_default(json_options, options):
    assert json_options(options) == (False, "", False)
    assert json_options(options, whitespace_pattern=" *") == (True, " *", False)


def test_engine_can_set_the_pattern_of_whitespace(json_options):
    for options in ({"guided_whitespace_pattern": "\n?"}, {"structured_outputs_config": {"whitespace_pattern": "\n?"}}):
        assert json_options(options) == (True, "\n?", True)
        assert json_options(options, disable_any_whitespace=True) == (False, "", True)
        assert json_options(options, whitespace_pattern=" ?") == (True, " ?", True)


def test_without_options_the_core_chooses(json_options):
    assert json_options({}) == (True, "", True)


@pytest.mark.parametrize("name", ["auto", "llguidance", "xgrammar", "guidance"])
def test_each_name_of_a_backend_is_accepted(name):
    for options in ({"guided_decoding_backend": name}, {"structured_outputs_config": {"backend": name}}):
        assert EngineArgs(**options).guided_decoding_backend == name


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ({"reasoning_parser": "deepseek_r1"}, NotImplementedError, r"structured_outputs_config\['reasoning_parser'\]"),
        ({"backend": "outlines"}, ValueError, "guided_decoding_backend must be one of"),
        ({"whitespace_pattern": 3}, TypeError, "guided_whitespace_pattern must be of type str"),
        ({"whitespace_pattern": "x" * 257}, ValueError, "whitespace_pattern must have at most 256"),
    ],
    ids=str,
)
def test_values_that_are_not_served_are_refused_by_name(value, error, words):
    with pytest.raises(error, match=words):
        EngineArgs(structured_outputs_config=value)
