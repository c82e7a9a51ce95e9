"""Which models a number of stages can share, and which layers each stage gets."""

import msgspec
import pytest
from transformers import BertConfig

from vllm_mp.core.weights.cuts import is_of_stage
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.model_config.pipeline_parallel import check_pipeline_parallel, share_layers, stage_of
from vllm_mp.testing.random_models import CONFIGS

LLAMA = read_architecture(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
GPT2 = read_architecture(CONFIGS["gpt2"].to_dict() | {"architectures": ["GPT2LMHeadModel"]})
MIXTURE = read_architecture(CONFIGS["qwen2-moe"].to_dict() | {"architectures": ["Qwen2MoeForCausalLM"]})


def test_model_that_cannot_be_divided_is_refused_by_name():
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=4: tiny has 3 layers, .* set it to at most 3"):
        check_pipeline_parallel(LLAMA, 4, "tiny")
    encoder = read_architecture(BertConfig().to_dict() | {"architectures": ["BertModel"]})
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=2: .* bert \(BertModel\) is an encoder; set it to 1"):
        check_pipeline_parallel(encoder, 2, "bert")
    check_pipeline_parallel(encoder, 1, "bert")


@pytest.mark.parametrize(
    ("num_layers", "head_layers", "counts"),
    [
        (32, 0.0, [32]),
        (32, 0.0, [16, 16]),
        (32, 2.0, [15, 17]),  # as of a model with 8B parameters
        (30, 8.0, [11, 19]),  # as of a small model with a large vocabulary
        (32, 2.0, [6, 8, 9, 9]),
        (4, 30.0, [1, 3]),  # the head outweighs the layers
        (4, 30.0, [1, 1, 1, 1]),
        (3, 0.0, [1, 1, 1]),
    ],
)
def test_first_stage_has_fewer_layers_by_the_weight_of_the_head(num_layers, head_layers, counts):
    stages = share_layers(num_layers, len(counts), head_layers)
    assert [stage.last - stage.first for stage in stages] == counts
    assert [stage.first for stage in stages] == [0, *(stage.last for stage in stages[:-1])]
    assert stages[-1].last == num_layers
    assert [stage.is_first for stage in stages] == [True] + [False] * (len(counts) - 1)
    assert [stage.is_last for stage in stages] == [False] * (len(counts) - 1) + [True]


def test_stage_has_the_properties_of_its_layers():
    whole = msgspec.structs.replace(MIXTURE, sliding_window=(7, None, 9), attention_scale=(1.0, 2.0, 3.0))
    first, last = (stage_of(whole, place, 2) for place in range(2))
    assert first.sliding_window + last.sliding_window == whole.sliding_window
    assert first.attention_scale + last.attention_scale == whole.attention_scale
    assert first.experts.layers + last.experts.layers == whole.experts.layers
    assert (first.first_layer, last.first_layer) == (0, first.num_layers)
    assert first.kv_shapes + last.kv_shapes == whole.kv_shapes
    assert stage_of(whole, 0, 1) is whole


def test_stage_reads_its_tensors_only():
    first, middle, last = stages = share_layers(6, 3, 0.0)
    of_llama = {
        "model.embed_tokens.weight": [first],
        "lm_head.weight": [first],
        "model.layers.1.mlp.down_proj.weight": [first],
        "model.layers.2.input_layernorm.weight": [middle],
        "model.norm.weight": [last],
        "model.layers.6.mlp.down_proj.weight": [first, middle, last],  # to be refused as unexpected
        "unknown": [first, middle, last],
    }
    of_gpt2 = {
        "transformer.wte.weight": [first],
        "transformer.wpe.weight": [first],
        "lm_head.weight": [first],
        "transformer.h.5.attn.c_attn.bias": [last],
        "transformer.ln_f.bias": [last],
        "transformer.h.6.mlp.c_proj.weight": [first, middle, last],
        "unknown": [first, middle, last],
    }
    for arch, tensors in ((LLAMA, of_llama), (GPT2, of_gpt2)):
        shares = {stage: msgspec.structs.replace(arch, stage=stage) for stage in stages}
        found = {name: [stage for stage in stages if is_of_stage(name, shares[stage])] for name in tensors}
        assert found == tensors
    assert is_of_stage("model.norm.weight", LLAMA)
