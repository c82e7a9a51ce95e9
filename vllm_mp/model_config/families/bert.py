"""BERT, RoBERTa, XLM-R and DistilBERT: the readers of their `config.json`, and their linear layers.

The architectures with the ending ForSequenceClassification have a head that tells classes apart; with a single class
they are cross-encoders, which score pairs of texts. A field that a configuration leaves out takes the default of the
transformers class that would have read it.
"""

from typing import Final

import msgspec

from vllm_mp.model_config.architecture import NativeArchitecture
from vllm_mp.model_config.config_json import (
    Config,
    activation,
    dtype,
    even_split,
    flag,
    integer,
    number,
    shorten,
    with_own_names,
)
from vllm_mp.model_config.linear_layers import ATTENDED, HEADS, INNER, VOCABULARY, FamilyLayers, LinearLayer

LAYERS: Final = FamilyLayers(
    "layer",
    (
        LinearLayer("attention.self.query", HEADS),
        LinearLayer("attention.self.key", HEADS),
        LinearLayer("attention.self.value", HEADS),
        LinearLayer("attention.output.dense", ATTENDED, by_inputs=True),
        LinearLayer("intermediate.dense", INNER),
        LinearLayer("output.dense", INNER, by_inputs=True),
        LinearLayer("q_lin", HEADS),
        LinearLayer("k_lin", HEADS),
        LinearLayer("v_lin", HEADS),
        LinearLayer("out_lin", ATTENDED, by_inputs=True),
        LinearLayer("lin1", INNER),
        LinearLayer("lin2", INNER, by_inputs=True),
        LinearLayer("word_embeddings", VOCABULARY),
    ),
)
"""The linear layers of BERT and RoBERTa, then those of DistilBERT."""
_PROBLEM_ACTIVATIONS = {"regression": "none", "multi_label_classification": "sigmoid"}
"""The activation of a `problem_type`; for others it depends on the number of classes."""
_LIBRARY_ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid"}
"""The activations that sentence-transformers names for cross-encoders."""


def read_bert(name: str, config: Config) -> NativeArchitecture:
    return _encoder(
        name,
        config,
        norm_eps=number(config, "layer_norm_eps", 1e-12),
        activation=activation(config, "hidden_act", "gelu"),
        intermediate_size=integer(config, "intermediate_size"),
        num_token_types=integer(config, "type_vocab_size", 2),
    )


def read_roberta(name: str, config: Config) -> NativeArchitecture:
    # The first rows of the table of positions belong to padding and to the ids below it.
    offset = integer(config, "pad_token_id", 1, minimum=0) + 1
    bert = read_bert(name, config)
    if bert.max_position <= offset:
        raise ValueError(
            f"config field 'max_position_embeddings' is {bert.max_position}; it must be above pad_token_id + 1 = "
            f"{offset}, the number of rows that hold no position"
        )
    return msgspec.structs.replace(bert, position_offset=offset, max_position=bert.max_position - offset)


def read_distilbert(name: str, config: Config) -> NativeArchitecture:
    config = with_own_names(
        config, {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    )
    return _encoder(
        name,
        config,
        fields=("dim", "n_layers", "n_heads"),
        norm_eps=1e-12,
        activation=activation(config, "activation", "gelu"),
        intermediate_size=integer(config, "hidden_dim", 3072),
        num_token_types=0,
    )


def _encoder(
    name: str,
    config: Config,
    *,
    fields: tuple[str, str, str] = ("hidden_size", "num_hidden_layers", "num_attention_heads"),
    norm_eps: float,
    activation: str,
    intermediate_size: int,
    num_token_types: int,
) -> NativeArchitecture:
    """Read the fields that all encoders have; `fields` names the hidden size and the numbers of layers and heads."""
    if flag(config, "is_decoder", False):
        raise ValueError("config field 'is_decoder' is true; models of this family are supported as encoders (false)")
    kind = config.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise ValueError(f"config field 'position_embedding_type' is {shorten(kind)}; supported is absolute")
    hidden_size, num_layers, num_heads = (integer(config, field) for field in fields)
    head_dim = even_split(config, hidden_size, num_heads, fields[0], fields[2])
    num_classes = _num_classes(config) if name.endswith("ForSequenceClassification") else 0
    return NativeArchitecture(
        name=name,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_position=integer(config, "max_position_embeddings", 512),
        norm_eps=norm_eps,
        activation=activation,
        tie_word_embeddings=True,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        sliding_window=(None,) * num_layers,
        attention_scale=(head_dim**-0.5,) * num_layers,
        rope=None,
        dtype=dtype(config),
        is_encoder=True,
        num_token_types=num_token_types,
        num_classes=num_classes,
        class_activation=_class_activation(config, num_classes),
    )


def _num_classes(config: Config) -> int:
    """Return the number of labels, which transformers leaves out if it is 2."""
    labels = config.get("id2label")
    if labels is None:
        return integer(config, "num_labels", 2)
    if not isinstance(labels, dict) or not labels:
        raise ValueError(
            f"config field 'id2label' is {shorten(labels)}; it must be an object with a name for each class"
        )
    return len(labels)


def _class_activation(config: Config, num_classes: int) -> str:
    """Return the activation of the classes, from the field of sentence-transformers or of transformers."""
    settings = config.get("sentence_transformers")
    name = settings.get("activation_fn") if isinstance(settings, dict) else None
    name = name or config.get("sbert_ce_default_activation_function")
    if num_classes and name is not None:
        kind = str(name).rpartition(".")[2]
        if not str(name).startswith("torch.nn.modules.") or kind not in _LIBRARY_ACTIVATIONS:
            raise ValueError(
                f"config names the activation {shorten(name)}; supported are Identity and Sigmoid of torch.nn.modules"
            )
        return _LIBRARY_ACTIVATIONS[kind]
    problem = config.get("problem_type")
    return _PROBLEM_ACTIVATIONS.get(str(problem), "softmax" if num_classes != 1 else "sigmoid")
