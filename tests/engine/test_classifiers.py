"""Encoders with a head for classes, in a real core: a small random model of each family, equal to transformers."""

import shutil

import numpy as np
import pytest
import torch
from support.pooling_parity import TOLERANCE, vectors
from support.random_encoders import BERT, CLASSIFIERS, PROMPTS, random_encoder
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from vllm_mp import LLM, PoolingParams, RequestFailure
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.testing.engines import ENGINE, running_engine

pytestmark = pytest.mark.usefixtures("forked_cores")

ENCODER = {"skip_tokenizer_init": True, "device": "cpu", "num_threads": 1, "max_model_len": 62, "max_num_seqs": 4}
QUESTION = "How far away is the moon?"
TEXTS = ["Cheese is made of milk.", "The moon is 384,400 km away.", "Three days."]


@torch.inference_mode()
def head_outputs(model, prompt, second_text_at=None):
    """Return the outputs of the head for token ids, of which those from `second_text_at` on have token type 1."""
    types = {}
    if second_text_at is not None:
        types["token_type_ids"] = torch.tensor([[int(place >= second_text_at) for place in range(len(prompt))]])
    return model(torch.tensor([prompt]), **types).logits[0]


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_classes_of_each_family_equal_those_of_transformers(family, tmp_path):
    kind, config = CLASSIFIERS[family]
    model = random_encoder(kind, config, tmp_path)
    activation = torch.sigmoid if config.problem_type else softmax
    with one_thread(), running_engine(tmp_path, **ENCODER) as engine:
        raw = PoolingParams(use_activation=False)
        for concurrent in (True, False):
            outputs = vectors(engine, [*PROMPTS, *PROMPTS], [None] * len(PROMPTS) + [raw] * len(PROMPTS), concurrent)
            for prompt, output, of_head in zip(PROMPTS, outputs[: len(PROMPTS)], outputs[len(PROMPTS) :], strict=True):
                expected = head_outputs(model, prompt)
                np.testing.assert_allclose(output.outputs.data, activation(expected), atol=TOLERANCE)
                np.testing.assert_allclose(of_head.outputs.data, expected, atol=10 * TOLERANCE)
        # Embeddings of the same model, in the same steps.
        embedding, classes = vectors(
            engine, PROMPTS[2:4], [PoolingParams(task="embed"), PoolingParams(task="classify")]
        )
        assert (len(embedding.outputs.data), len(classes.outputs.data)) == (48, config.num_labels)
        if family == "bert":
            check_pairs_and_refusals(engine, model)


def softmax(outputs):
    return torch.softmax(outputs, -1)


def check_pairs_and_refusals(engine, model):
    prompt = PROMPTS[2]
    params = [PoolingParams(use_activation=False, second_text_at=at) for at in (None, 1, 9, 16)]
    for each, output in zip(params, vectors(engine, [prompt] * 4, params), strict=True):
        expected = head_outputs(model, prompt, each.second_text_at)
        np.testing.assert_allclose(output.outputs.data, expected, atol=10 * TOLERANCE)
    for fields, words in (
        ({"second_text_at": 17}, "second_text_at must be below 17"),
        ({"dimensions": 3}, "dimensions must be None for classes, got 3"),
        ({"pooling_type": "mean"}, "pooling_type must be None for classes"),
    ):
        with pytest.raises(ValueError, match=words):
            vectors(engine, [prompt], PoolingParams(**fields))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_cross_encoder_scores_pairs_as_transformers_does(num_ranks, minilm, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    config = BertConfig(**{**BERT, "vocab_size": len(tokenizer)}, num_labels=1)
    model = random_encoder(BertForSequenceClassification, config, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        if (minilm / name).exists():
            shutil.copy(minilm / name, tmp_path)
    expected = []
    for text in TEXTS:
        with torch.inference_mode():
            expected.append(float(torch.sigmoid(model(**tokenizer(QUESTION, text, return_tensors="pt")).logits[0, 0])))
    options = {**ENGINE, "max_model_len": 64, "device": "cpu", "num_threads": 1, "tensor_parallel_size": num_ranks}
    with one_thread(), LLM(str(tmp_path), **options) as llm:
        scores = llm.score(QUESTION, TEXTS)
        assert [score.outputs.score for score in scores] == pytest.approx(expected, abs=TOLERANCE)
        assert scores[0].prompt_token_ids == tokenizer(QUESTION, TEXTS[0]).input_ids
        (alone,) = llm.score([QUESTION], TEXTS[:1])
        assert alone.outputs.score == pytest.approx(expected[0], abs=TOLERANCE)
        late = llm.score(QUESTION, [TEXTS[0], "milk " * 100])
        assert isinstance(late[1], RequestFailure)
        assert late[0].outputs.score == pytest.approx(expected[0], abs=TOLERANCE)
        cut = llm.score(QUESTION, ["milk " * 100], pooling_params=PoolingParams(truncate_prompt_tokens=-1))
        assert len(cut[0].prompt_token_ids) == 64
        (shorter,) = llm.score(QUESTION, TEXTS[0], truncate_prompt_tokens=12)
        assert len(shorter.prompt_token_ids) == 12
        assert len(llm.classify(QUESTION, truncate_prompt_tokens=4)[0].prompt_token_ids) == 4
        (classes,) = llm.classify(QUESTION)
        assert (classes.outputs.num_classes, 0 < classes.outputs.probs[0] < 1) == (1, True)
        assert len(llm.embed(QUESTION)[0].outputs.embedding) == 48
        with pytest.raises(TypeError, match="a cross-encoder scores pairs of str"):
            llm.score([[5]], [[6]])
