"""The sampling parameters that a model's folder proposes for requests without parameters."""

import json

import msgspec
import numpy as np
import pytest

from vllm_mp.config import VllmConfig
from vllm_mp.config import resolution as config_resolution
from vllm_mp.config.engine_args import AsyncEngineArgs
from vllm_mp.requests.sampling_params import PARAMETERS, SamplingParams
from vllm_mp.testing.sampling_cases import CASES, invalid_values

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
SAMPLED = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 300,
    "bos_token_id": 1,
    "transformers_version": "4.51.0",
}
PROPOSED = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_tokens": 300,
}


@pytest.fixture
def configure(tmp_path):
    """Return a function that configures an engine whose model's folder holds `generation`."""

    def make(generation, **options):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return AsyncEngineArgs(model=str(tmp_path), load_format="dummy", **options).create_engine_config().model_config

    return make


@pytest.fixture
def defaults(configure):
    """Return a function like `configure` that returns the default sampling parameters."""
    return lambda *args, **options: configure(*args, **options).default_sampling_params


def test_values_of_the_folder_get_the_names_of_sampling_params(defaults):
    assert defaults(SAMPLED) == PROPOSED
    SamplingParams(**defaults(SAMPLED))


def test_every_field_with_a_name_in_generation_config_is_read_and_checked(defaults):
    names = {
        field: name for field, parameter in PARAMETERS.items() if (name := parameter.generation_config) is not None
    }
    assert PROPOSED.keys() <= names.keys()
    for field, name in names.items():
        for value in CASES[field].values:
            assert defaults({name: value}) == {field: value}
        for value in invalid_values(field):
            with pytest.raises(ValueError, match=rf"^generation_config.json: {name}="):
                defaults({name: value})


@pytest.mark.parametrize("generation", [None, {}, {"temperature": None, "eos_token_id": 5}], ids=str)
def test_folder_without_values_gives_no_defaults(defaults, generation):
    assert defaults(generation) == {}


def test_folder_that_samples_without_a_temperature_gets_temperature_1(defaults):
    assert defaults({"do_sample": True, "top_k": 5}) == {"temperature": 1.0, "top_k": 5}
    assert defaults({"temperature": 0.5}, override_generation_config={"do_sample": True}) == {"temperature": 0.5}


def test_defaults_of_the_folder_can_be_ignored(defaults):
    assert defaults(SAMPLED, generation_config="vllm") == {}
    override = {"top_k": 3}
    assert defaults(SAMPLED, generation_config="vllm", override_generation_config=override) == {"top_k": 3}


def test_alias_has_the_defaults_that_its_makers_recommend_and_a_file_replaces_them(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(config_resolution, "resolve_model", lambda *_, **__: tmp_path)

    def defaults(**options):
        args = AsyncEngineArgs(model="SmolLM2-135M-Instruct", load_format="dummy", **options)
        return args.create_engine_config().model_config.default_sampling_params

    assert defaults() == {"temperature": 0.2, "top_p": 0.9}
    assert defaults(override_generation_config={"temperature": 0.5}) == {"temperature": 0.5, "top_p": 0.9}
    assert defaults(generation_config="vllm") == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3}')
    assert defaults() == {"temperature": 0.3, "top_p": 0.9}
    assert defaults(generation_config=str(tmp_path)) == {"temperature": 0.3}


def test_defaults_can_come_from_another_folder(defaults, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.25}')
    assert defaults(SAMPLED, generation_config=str(other)) == {"temperature": 0.25}


def test_values_of_the_user_replace_single_values_of_the_folder(defaults):
    override = {"temperature": 0.1, "max_new_tokens": 7, "top_p": None}
    expected = {**PROPOSED, "temperature": 0.1, "max_tokens": 7}
    del expected["top_p"]
    assert defaults(SAMPLED, override_generation_config=override) == expected
    assert defaults(None, override_generation_config={"min_p": 0.5}) == {"min_p": 0.5}
    assert defaults(SAMPLED, override_generation_config={}) == PROPOSED


def test_user_can_replace_the_end_of_sequence_ids(configure):
    assert configure({"eos_token_id": 5}, override_generation_config={"eos_token_id": [6, 7]}).eos_token_ids == [6, 7]


def test_folder_that_does_not_sample_gives_greedy_defaults_without_filters(defaults):
    greedy = {"temperature": 0.0, "repetition_penalty": 1.1, "max_tokens": 300}
    assert defaults({**SAMPLED, "do_sample": False}) == greedy
    assert defaults({"do_sample": False}) == {"temperature": 0.0}
    assert defaults(SAMPLED, override_generation_config={"do_sample": False}) == greedy


def test_user_can_switch_sampling_on_for_a_folder_that_does_not_sample(defaults):
    folder = {**SAMPLED, "do_sample": False}
    asked = {"temperature": 0.7, "top_k": 4}
    expected = {"temperature": 0.7, "top_k": 4, "repetition_penalty": 1.1, "max_tokens": 300}
    assert defaults(folder, override_generation_config=asked) == expected
    assert defaults(folder, override_generation_config={"do_sample": True}) == PROPOSED


BAD = [
    ("temperature", -1.0, "[0, 1e+06]"),
    ("temperature", "hot", "a number"),
    ("temperature", True, "a number"),
    ("top_p", 0.0, "(0, 1]"),
    ("top_k", 50.5, "an integer"),
    ("min_p", 2, "[0, 1]"),
    ("repetition_penalty", 0, "[1e-06, 1e+06]"),
    ("max_new_tokens", 0, "[1, 2147483647]"),
    ("max_new_tokens", [5], "an integer"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_invalid_value_is_refused_with_its_name_and_source(defaults, name, value, allowed):
    with pytest.raises(ValueError) as caught:
        defaults({**SAMPLED, name: value})
    assert str(caught.value).startswith(f"generation_config.json: {name}={value!r}: ")
    assert allowed in str(caught.value)
    assert "generation_config='vllm'" in str(caught.value)
    assert defaults({**SAMPLED, name: value}, generation_config="vllm") == {}
    with pytest.raises(ValueError) as caught:
        defaults(SAMPLED, override_generation_config={name: value})
    assert str(caught.value).startswith(f"override_generation_config: {name}={value!r}: ")
    assert allowed in str(caught.value)
    assert defaults({**SAMPLED, name: value}, override_generation_config={name: None}) is not None


def test_unknown_name_is_ignored_with_a_warning_if_it_comes_from_the_user(defaults, caplog):
    assert defaults({**SAMPLED, "num_beams": 4}) == PROPOSED
    assert not caplog.messages
    assert defaults(SAMPLED, override_generation_config={"temprature": 0.1}) == PROPOSED
    assert caplog.messages == [
        "override_generation_config: 'temprature' is ignored, as no sampling parameter has this name"
    ]


def test_numbers_of_other_libraries_reach_the_core_as_plain_numbers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    override = {"top_k": np.int64(3), "temperature": np.float32(0.5)}
    args = AsyncEngineArgs(model=str(tmp_path), load_format="dummy", override_generation_config=override)
    config = args.create_engine_config()
    assert msgspec.json.decode(msgspec.json.encode(config), type=VllmConfig) == config
    assert config.model_config.default_sampling_params == {"top_k": 3, "temperature": 0.5}
