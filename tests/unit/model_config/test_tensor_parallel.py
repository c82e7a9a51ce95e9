"""Which models a number of ranks can share, and what each rank gets."""

import msgspec
import pytest
from transformers import BertConfig

from vllm_mp.machine.host_cpus import cpu_share
from vllm_mp.model_config.families.registry import read_architecture
from vllm_mp.model_config.tensor_parallel import check_tensor_parallel, shard_of
from vllm_mp.testing.random_models import CONFIGS

LLAMA = read_architecture(CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]})
MIXTURE = read_architecture(CONFIGS["qwen2-moe"].to_dict() | {"architectures": ["Qwen2MoeForCausalLM"]})

ENCODER = read_architecture(BertConfig().to_dict() | {"architectures": ["BertModel"]})


def changed(**sizes):
    return msgspec.structs.replace(LLAMA, **sizes)


@pytest.mark.parametrize(
    ("architecture", "size", "cause"),
    [
        (LLAMA, 4, "num_attention_heads=6 of tiny is not a multiple"),
        (changed(num_heads=12, num_kv_heads=4), 3, "intermediate_size=80 of tiny is not a multiple"),
        (changed(num_heads=12, num_kv_heads=4, intermediate_size=96), 6, "num_key_value_heads=4 of tiny is neither"),
        (changed(num_heads=4, vocab_size=3), 4, "vocab_size=3 of tiny is too small"),
        (ENCODER, 5, "num_attention_heads=12 of tiny is not a multiple"),
        (
            msgspec.structs.replace(ENCODER, intermediate_size=3073),
            2,
            "intermediate_size=3073 of tiny is not a multiple",
        ),
        (changed(blocks="int4"), 2, r"the weights in blocks \(int4\) of tiny cannot be cut into 24 inputs"),
        (changed(fp8="block"), 2, "the FP8 weights with a scale for each 128 x 128 of tiny"),
        (
            changed(fp8="block", num_heads=8, head_dim=64, intermediate_size=256),
            2,
            "the FP8 weights .* of tiny cannot be cut into 64 outputs of keys and values .num_key_value_heads=2",
        ),
        (msgspec.structs.replace(MIXTURE, num_heads=32, num_kv_heads=2), 16, "intermediate_size of the experts=24"),
    ],
)
def test_number_of_ranks_that_a_model_does_not_allow_is_refused_with_the_size(architecture, size, cause):
    with pytest.raises(ValueError, match=f"tensor_parallel_size={size}: .*{cause}"):
        check_tensor_parallel(architecture, size, "tiny")


def test_every_model_has_room_for_one_rank():
    check_tensor_parallel(LLAMA, 1, "tiny")
    assert shard_of(LLAMA, 0, 1) is LLAMA


def test_ranks_cover_heads_and_vocabulary():
    arch = changed(num_heads=8, num_kv_heads=2)
    shards = [shard_of(arch, rank, 4) for rank in range(4)]
    assert [share.shard.heads for share in shards] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [share.shard.kv_heads for share in shards] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [share.shard.vocabulary for share in shards] == [(0, 25), (25, 50), (50, 75), (75, 97)]
    assert [share.vocab_size for share in shards] == [25, 25, 25, 22]
    assert {share.kv_shapes[0] for share in shards} == {((1, 8), (1, 8))}
    assert {(share.intermediate_size, share.hidden_size) for share in shards} == {(20, 48)}


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [
        (range(8), [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        (range(6), [{0}, {1, 2}, {3}, {4, 5}]),
        ((3, 9), [{3}, {9}, {3}, {9}]),
    ],
)
def test_ranks_share_out_cpus(cpus, expected, monkeypatch):
    monkeypatch.setattr("vllm_mp.machine.host_cpus.numa_nodes", dict)
    assert [cpu_share(frozenset(cpus), rank, 4) for rank in range(4)] == expected


def test_ranks_share_out_cpus_node_by_node(monkeypatch):
    nodes = {0: frozenset({0, 2, 4, 6}), 1: frozenset({1, 3, 5, 7})}
    monkeypatch.setattr("vllm_mp.machine.host_cpus.numa_nodes", lambda: nodes)
    assert [cpu_share(frozenset(range(8)), rank, 2) for rank in range(2)] == [nodes[0], nodes[1]]
