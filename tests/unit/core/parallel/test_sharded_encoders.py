"""Ranks that share an encoder return the vectors and the outputs for classes of one process."""

import numpy as np
import pytest
from support.local_engine import LocalEngine
from support.random_encoders import BERT, CLASSIFIERS, PROMPTS, random_encoder
from support.rank_threads import local_group
from transformers import BertConfig, BertModel

from vllm_mp.model_config.families.registry import NATIVE_MODELS

pytestmark = pytest.mark.usefixtures("one_torch_thread")

OPTIONS = {"max_model_len": 62, "max_num_seqs": 4, "max_num_batched_tokens": 80}
WANTED = (
    {},
    {"pooling_type": "cls", "normalize": True},
    {"task": "classify", "pooling_type": "cls", "use_activation": False},
)
TOLERANCE = 2e-5


def vectors(engine, wanted=WANTED):
    """Return [n] vectors of all prompts, alone and as pairs of texts if the model has a token type for them."""
    has_pairs = engine.config.model_config.architecture.num_token_types > 1
    pairs = [(prompt, at) for prompt in PROMPTS if has_pairs and len(prompt) > 2 for at in (1, len(prompt) - 1)]
    requests = [
        (prompt, {**params, "second_text_at": at})
        for prompt, at in [*((prompt, None) for prompt in PROMPTS), *pairs]
        for params in wanted
    ]
    for slot, (prompt, params) in enumerate(requests):
        engine.encode(slot, prompt, **params)
    engine.run()
    return [engine.vectors[slot] for slot in range(len(requests))]


def test_every_family_of_encoders_is_tested():
    families = {entry.model for entry in NATIVE_MODELS.values() if entry.model.startswith("bert:")}
    assert {NATIVE_MODELS[kind.__name__].model for kind, _ in CLASSIFIERS.values()} == families


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", CLASSIFIERS)
def test_vectors_classes_and_pairs_are_those_of_one_process(family, size, tmp_path):
    random_encoder(*CLASSIFIERS[family], tmp_path)
    whole = LocalEngine(tmp_path, **OPTIONS)
    expected = vectors(whole)
    with local_group(tmp_path, size, **OPTIONS) as group:
        found = vectors(group.engine)
        own, share = whole.runner.memory, group.followers[size - 1]._runner.memory
        assert share.num_parameters == own.num_parameters
        assert len(share.model.word_embeddings) < len(own.model.word_embeddings) / size + 1
    for vector, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(vector, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_weights_are_shared_out(quantization, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    random_encoder(BertModel, BertConfig(**{**BERT, **sizes}), tmp_path)
    options = {**OPTIONS, "quantization": quantization}
    expected = vectors(LocalEngine(tmp_path, **options), WANTED[1:2])
    with local_group(tmp_path, 2, **options) as group:
        found = vectors(group.engine, WANTED[1:2])
    assert min(vector @ wanted for vector, wanted in zip(found, expected, strict=True)) > 0.999
