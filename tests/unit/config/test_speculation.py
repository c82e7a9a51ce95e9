"""What `speculative_config` may say."""

import json
from pathlib import Path

import pytest
from transformers import BertConfig, LlamaConfig, OPTConfig

from vllm_mp.config import SpeculativeConfig
from vllm_mp.config.engine_args import EngineArgs
from vllm_mp.config.speculation import read_speculative_config
from vllm_mp.testing.random_models import save_config


def test_defaults_are_those_of_the_page():
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=8, prompt_lookup_min=2, prompt_lookup_max=5)
    assert read_speculative_config({"method": "ngram"}) == expected
    assert read_speculative_config({"model": "ngram", "num_speculative_tokens": 8}) == expected
    assert read_speculative_config({"method": "ngram", "prompt_lookup_max": None}) == expected
    assert read_speculative_config({}) is None


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 3}, (3, 3)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 6}, (1, 6)),
    ],
)
def test_one_bound_of_the_lookup_stands_for_both(given, lookup):
    config = read_speculative_config({"method": "ngram", **given})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == lookup


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"method": "eagle3"}, NotImplementedError, r"\['method'\]='eagle3' is not served: drafts come from the texts"),
        ({"method": "ngrams"}, NotImplementedError, "did you mean `ngram`"),
        ({"method": "draft_model"}, ValueError, "needs the name or path of a smaller model; set model"),
        ({"method": "ngram", "model": "a"}, ValueError, r"\['model'\]='a' belongs to method='draft_model'.*is 'ngram'"),
        ({"method": "suffix", "quantization": "int8"}, ValueError, r"\['quantization'\]='int8' belongs to"),
        ({"model": 3}, TypeError, r"\['model'\] must be of type str, got 3"),
        ({"model": "a", "quantization": "int3"}, ValueError, r"\['quantization'\] must be one of int8.*got 'int3'"),
        (
            {"model": "a", "draft_tensor_parallel_size": 2},
            NotImplementedError,
            "=2 is not served: a draft",
        ),
        ({"model": "a", "max_model_len": 99}, NotImplementedError, r"\['max_model_len'\]=99 is not served: the draft"),
        ({"method": 3}, TypeError, r"\['method'\] must be one of ngram"),
        ({"method": "ngram", "disable_by_batch_size": 4}, NotImplementedError, "'disable_by_batch_size'.*leave it out"),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, NotImplementedError, "'draft_tensor_parallel_size'"),
        ({"method": "ngram", "num_speculative_token": 1}, ValueError, "no field 'num_speculative_token'.*did you mean"),
        ({"method": "ngram", "num_speculative_tokens": 0}, ValueError, "must be from 1 to 64, got 0"),
        ({"method": "ngram", "num_speculative_tokens": True}, TypeError, "must be of type int, got True"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, ValueError, "min=5 is above.*max=3"),
    ],
)
def test_what_is_not_served_is_refused_by_name(given, error, message):
    with pytest.raises(error, match=message):
        EngineArgs(speculative_config=given)


def test_a_model_means_the_method_draft_model():
    for given in ({"model": "a/b"}, {"model": "a/b", "method": "draft_model", "draft_tensor_parallel_size": 1}):
        config = read_speculative_config(given)
        assert (config.method, config.model) == ("draft_model", "a/b")
    assert EngineArgs(spec_model="a/b").speculative_config == {"model": "a/b"}


def models(folder):
    """Save a model, and others that might draft for it, under names that tell how they differ."""
    small = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    saved = {
        "model": LlamaConfig(**small, num_hidden_layers=2),
        "small": LlamaConfig(**small, num_hidden_layers=1),
        "more-tokens": LlamaConfig(**{**small, "vocab_size": 98}, num_hidden_layers=1),
        "encoder": BertConfig(**small, num_hidden_layers=1),
        "unknown": OPTConfig(vocab_size=97, hidden_size=16, architectures=["OPTForCausalLM"]),
    }
    return {name: str(save_config(config, folder / name)) for name, config in saved.items()}


def drafted(folders, draft, **options):
    """Return the configuration of an engine with a draft model."""
    speculation = {"model": folders[draft], "num_speculative_tokens": 3}
    args = EngineArgs(model=folders["model"], load_format="dummy", speculative_config=speculation, **options)
    return args.create_engine_config()


def test_draft_model_is_found_and_configured_like_the_model(tmp_path):
    folders = models(tmp_path)
    config = drafted(folders, "small", skip_tokenizer_init=True, seed=5, max_model_len=64)
    draft = config.speculative_config.draft_model_config
    assert draft.path == folders["small"]
    assert draft.architecture.num_layers == 1
    assert (draft.max_model_len, draft.weights_seed, draft.load_format) == (64, 5, "dummy")
    assert config.model_config.architecture.num_layers == 2


@pytest.mark.parametrize(
    ("draft", "options", "error", "message"),
    [
        ("more-tokens", {}, ValueError, "has a vocabulary of 98 tokens, and model=.* one of 97; name a smaller"),
        ("encoder", {}, ValueError, "generates no text; name a smaller model that does"),
        ("unknown", {}, ValueError, "has no native model, which a draft model needs; name another"),
        ("small", {"tensor_parallel_size": 2}, NotImplementedError, "'draft_model'.*but tensor_parallel_size=2; leave"),
        ("small", {"pipeline_parallel_size": 2}, NotImplementedError, "but pipeline_parallel_size=2; leave"),
        ("small", {"data_parallel_backend": "ray"}, NotImplementedError, "but data_parallel_backend='ray'; leave"),
        ("small", {"async_scheduling": True}, ValueError, "async_scheduling=True: drafts follow the last token"),
    ],
)
def test_draft_models_that_cannot_serve_are_refused_by_name(tmp_path, draft, options, error, message):
    with pytest.raises(error, match=message):
        drafted(models(tmp_path), draft, skip_tokenizer_init=True, **options)


def test_errors_of_a_draft_model_name_it(tmp_path):
    folders = {**models(tmp_path), "missing": str(tmp_path / "missing")}
    with pytest.raises(ValueError, match=r"speculative_config\['model'\]='.*missing': .*no such file or folder"):
        drafted(folders, "missing")


def test_draft_model_with_another_tokenizer_is_refused(tmp_path):
    folders = models(tmp_path)

    def write(name, **changes):
        vocabulary = {f"t{number}": number for number in range(97)} | changes
        content = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "name": name, "added_tokens": []}
        Path(folders[name], "tokenizer.json").write_text(json.dumps(content))

    write("model")
    write("small")
    assert drafted(folders, "small").speculative_config.draft_model_config is not None
    write("small", t5=6, t6=5)
    with pytest.raises(ValueError, match=r"another tokenizer than model=.*: the token 't5' has the ids 6 and 5"):
        drafted(folders, "small")


def test_single_options_complete_the_object():
    args = EngineArgs(speculative_config={"prompt_lookup_max": 3}, spec_method="ngram", spec_tokens=5)
    assert args.speculative_config == {"prompt_lookup_max": 3, "method": "ngram", "num_speculative_tokens": 5}
