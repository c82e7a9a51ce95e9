"""Reading the `config.json` of an encoder."""

from typing import Any

import pytest

from vllm_mp.model_config.architecture import Architecture
from vllm_mp.model_config.families.registry import read_architecture

BERT = {
    "architectures": ["BertModel"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
}
DISTILBERT = {"model_type": "distilbert", "vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}


def read(base: dict[str, Any] = BERT, /, **changes: Any) -> Architecture:
    return read_architecture({**base, **changes})


def test_missing_fields_take_the_defaults_of_the_encoder() -> None:
    arch = read()
    assert arch.is_encoder
    assert (arch.norm_eps, arch.activation, arch.num_token_types, arch.position_offset) == (1e-12, "gelu", 2, 0)
    assert (arch.num_kv_heads, arch.head_dim, arch.max_position) == (4, 8, 66)
    assert read(DISTILBERT).name == "DistilBertModel"
    assert (read(DISTILBERT).intermediate_size, read(DISTILBERT).num_token_types) == (48, 0)


def test_first_rows_of_robertas_position_table_are_skipped() -> None:
    arch = read(architectures=["XLMRobertaModel"], pad_token_id=1)
    assert (arch.position_offset, arch.max_position) == (2, 64)


CLASSIFIER = {**BERT, "architectures": ["BertForSequenceClassification"]}
SIGMOID = "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("changes", "num_classes", "activation"),
    [
        ({}, 2, "softmax"),
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3, "softmax"),
        ({"id2label": {"0": "score"}}, 1, "sigmoid"),
        ({"id2label": {"0": "score"}, "problem_type": "regression"}, 1, "none"),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, 4, "sigmoid"),
        (
            {"id2label": {"0": "score"}, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            1,
            "none",
        ),
        ({"sentence_transformers": {"activation_fn": SIGMOID}}, 2, "sigmoid"),
        ({"architectures": ["BertModel"], "id2label": {"0": "a"}}, 0, "softmax"),
    ],
)
def test_classes_and_their_activation_are_read(changes: dict[str, Any], num_classes: int, activation: str) -> None:
    arch = read(CLASSIFIER, **changes)
    assert arch.num_classes == num_classes
    assert not num_classes or arch.class_activation == activation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {}}, "'id2label' is {}"),
        ({"num_labels": 0}, "'num_labels' is 0"),
        ({"sentence_transformers": {"activation_fn": "os.system"}}, "activation 'os.system'; supported are Identity"),
    ],
)
def test_unsupported_classes_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(CLASSIFIER, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "'position_embedding_type' is 'relative_key'"),
        ({"is_decoder": True}, "'is_decoder' is true"),
        ({"hidden_act": "quick_gelu"}, "'hidden_act' is 'quick_gelu'"),
        ({"num_attention_heads": 5}, "'hidden_size' is 32"),
        ({"architectures": ["RobertaModel"], "max_position_embeddings": 2}, "'max_position_embeddings' is 2"),
    ],
)
def test_unsupported_field_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)
