"""The template process with the model: which core may use its model, and how a load before all threads ends."""

import threading

import pytest
import torch

from vllm_mp import AsyncEngineArgs
from vllm_mp.core import model_template
from vllm_mp.core.model_template import _identity, held_model
from vllm_mp.core.torch_threads import limit_this_thread
from vllm_mp.core.worker.memory.loaded_model import LoadedModel
from vllm_mp.testing.random_models import CONFIGS, save_random_model
from vllm_mp.wire import ModelDigest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_random_model(CONFIGS["llama"], path)
    return path


def config_of(folder, **options):
    return AsyncEngineArgs(str(folder), skip_tokenizer_init=True, **options).create_engine_config()


@pytest.mark.parametrize(
    ("options", "dtype", "is_used"),
    [
        ({}, torch.float32, True),
        ({"max_num_seqs": 3}, torch.float32, True),
        ({"max_model_len": 32}, torch.float32, False),
        ({"quantization": "int8"}, torch.float32, False),
        ({"kv_cache_dtype": "fp8"}, torch.float32, False),
        ({"load_format": "dummy"}, torch.float32, False),
        ({"spec_method": "ngram"}, torch.float32, True),
        ({"spec_model": "draft"}, torch.float32, False),
        ({}, torch.bfloat16, False),
    ],
    ids=["same", "same model", "other length", "quantized", "other cache", "dummy", "n-grams", "draft", "other dtype"],
)
def test_core_uses_the_model_of_its_template_only_for_the_same_configuration(
    folder, monkeypatch, options, dtype, is_used
):
    held = LoadedModel(_identity(config_of(folder), torch.float32), object(), ModelDigest("", "", ""))
    monkeypatch.setattr(model_template, "_held", held)
    if "spec_model" in options:
        options = {"spec_model": str(folder)}
    shares = []
    used = held_model(config_of(folder, **options), dtype, shares.append)
    assert (used is held) == is_used
    assert shares == ([0.0, 1.0] if is_used else []), "what watches a load sees this one too"
    assert model_template._held is None, "a model that is not used takes no memory"


def test_limit_of_threads_holds_for_one_thread_alone():
    before = torch.get_num_threads()
    found = []

    def look():
        limit_this_thread(before + 3)
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before + 3]
    assert torch.get_num_threads() == before
