"""Small encoders with random weights, made and saved by transformers."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

SIZES = {"vocab_size": 97, "max_position_embeddings": 66}
BERT = {**SIZES, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
DISTILBERT = {**SIZES, "dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 4}
CLASSIFIERS = {
    "bert": (BertForSequenceClassification, BertConfig(**BERT, num_labels=3)),
    "roberta": (RobertaForSequenceClassification, RobertaConfig(**BERT, num_labels=2)),
    "xlm-roberta": (
        XLMRobertaForSequenceClassification,
        XLMRobertaConfig(**BERT, pad_token_id=3, num_labels=4, problem_type="multi_label_classification"),
    ),
    "distilbert": (DistilBertForSequenceClassification, DistilBertConfig(**DISTILBERT, num_labels=5)),
}
"""Class and configuration of an encoder of each family, with a head for classes."""
# None contains RoBERTa's padding token, which transformers leaves out when it counts positions.
PROMPTS = [[4 + (7 * i + length) % 90 for i in range(length)] for length in (1, 2, 17, 40, 5, 62, 33, 9)]


def random_encoder(kind, config, folder):
    """Return a transformers model whose parameters are all random, norms and biases too; save it in `folder`."""
    model = kind(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            parameter.copy_(centre + 0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model
