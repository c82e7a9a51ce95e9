"""The endpoints for scores, ranks, classes and vectors, with small random models that transformers computes too."""

import asyncio
import base64
import shutil

import httpx
import numpy as np
import pytest
import torch
from support.pooling_parity import TOLERANCE
from support.random_encoders import BERT, random_encoder
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from vllm_mp.core.torch_threads import one_thread
from vllm_mp.server.app import build_app
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.testing.engines import ENGINE, running_engine

pytestmark = [pytest.mark.usefixtures("forked_cores"), pytest.mark.extended]

QUERY = "How far away is the moon?"
DOCUMENTS = ["Cheese is made of milk.", "The moon is 384,400 km away.", "Three days."]
OPTIONS = {
    **ENGINE,
    "max_model_len": 64,
    "device": "cpu",
    "num_threads": 1,
    "chat_template": "{{ messages[0].content }}",
}


@pytest.fixture
def classifier(minilm, tmp_path):
    """A function that makes a random model with a number of classes; it returns the model and its tokenizer."""

    def make(num_labels):
        tokenizer = AutoTokenizer.from_pretrained(minilm)
        names = {index: f"kind {index}" for index in range(num_labels)}
        config = BertConfig(**{**BERT, "vocab_size": len(tokenizer)}, num_labels=num_labels, id2label=names)
        model = random_encoder(BertForSequenceClassification, config, tmp_path)
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
            if (minilm / name).exists():
                shutil.copy(minilm / name, tmp_path)
        return model, tokenizer

    return make


def answers(folder, *requests):
    """Return the responses of a server of the model in `folder` to `requests`, each a path and a body."""

    async def ask(engine):
        transport = httpx.ASGITransport(build_app(engine, ServerOptions()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.post(path, json=body) for path, body in requests]

    with one_thread(), running_engine(folder, **OPTIONS) as engine:
        return asyncio.run(ask(engine))


def test_cross_encoder_scores_and_ranks_documents(classifier, tmp_path):
    model, tokenizer = classifier(1)
    with torch.inference_mode():
        logits = [float(model(**tokenizer(QUERY, text, return_tensors="pt")).logits[0, 0]) for text in DOCUMENTS]
    expected = torch.sigmoid(torch.tensor(logits)).tolist()
    best_first = sorted(range(3), key=lambda index: -logits[index])
    score, raw, ranks, best, late, empty = answers(
        tmp_path,
        ("/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
        ("/v1/score", {"queries": [QUERY] * 3, "documents": DOCUMENTS, "use_activation": False}),
        ("/v1/rerank", {"query": QUERY, "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]}),
        ("/v2/rerank", {"query": QUERY, "documents": DOCUMENTS, "top_n": 1, "return_documents": False}),
        ("/rerank", {"query": QUERY, "documents": [DOCUMENTS[0], "milk " * 100]}),
        ("/score", {"text_1": QUERY, "text_2": []}),
    )
    assert [pair["score"] for pair in score.json()["data"]] == pytest.approx(expected, abs=TOLERANCE)
    assert [pair["score"] for pair in raw.json()["data"]] == pytest.approx(logits, abs=10 * TOLERANCE)
    results = ranks.json()["results"]
    assert [result["index"] for result in results] == best_first
    assert [result["document"]["text"] for result in results] == [DOCUMENTS[index] for index in best_first]
    assert [result["index"] for result in best.json()["results"]] == best_first[:1]
    assert "document" not in best.json()["results"][0]
    assert (late.status_code, late.json()["error"]["param"]) == (400, "documents[1]")
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "text_2")


def test_classes_have_the_names_of_the_model(classifier, tmp_path):
    model, tokenizer = classifier(3)
    with torch.inference_mode():
        logits = torch.stack([model(**tokenizer(text, return_tensors="pt")).logits[0] for text in DOCUMENTS])
    probabilities = torch.softmax(logits, -1)
    classes, of_messages, raw, vectors, score = answers(
        tmp_path,
        ("/classify", {"input": DOCUMENTS}),
        ("/classify", {"messages": [{"role": "user", "content": DOCUMENTS[0]}], "add_special_tokens": True}),
        ("/pooling", {"input": DOCUMENTS[0], "use_activation": False, "encoding_format": "base64"}),
        ("/pooling", {"input": DOCUMENTS, "task": "embed"}),
        ("/score", {"text_1": QUERY, "text_2": DOCUMENTS}),
    )
    for found, expected in zip(classes.json()["data"], probabilities, strict=True):
        assert found["probs"] == pytest.approx(expected.tolist(), abs=TOLERANCE)
        assert (found["label"], found["num_classes"]) == (f"kind {int(expected.argmax())}", 3)
    assert of_messages.json()["data"] == classes.json()["data"][:1]
    of_head = np.frombuffer(base64.b64decode(raw.json()["data"][0]["data"]), "<f4")
    np.testing.assert_allclose(of_head, logits[0], atol=10 * TOLERANCE)
    assert [len(vector["data"]) for vector in vectors.json()["data"]] == [48] * 3
    assert score.status_code == 400
    assert "3 classes, not a score" in score.json()["error"]["message"]
