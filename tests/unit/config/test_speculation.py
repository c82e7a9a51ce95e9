"""What `speculative_config` may say."""

import pytest

from vllm_mp.config import SpeculativeConfig
from vllm_mp.config.engine_args import EngineArgs
from vllm_mp.config.speculation import read_speculative_config


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
        ({"model": "a/small-model"}, NotImplementedError, "names a model, and drafts come from the texts"),
        ({"method": "draft_model", "model": "a"}, NotImplementedError, "'draft_model' is not served"),
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


def test_single_options_complete_the_object():
    args = EngineArgs(speculative_config={"prompt_lookup_max": 3}, spec_method="ngram", spec_tokens=5)
    assert args.speculative_config == {"prompt_lookup_max": 3, "method": "ngram", "num_speculative_tokens": 5}
