"""What cores say of their drafts, as metrics with vLLM's names."""

from types import SimpleNamespace

import pytest

from vllm_mp.client.stat_loggers.engine_metrics import EngineMetrics
from vllm_mp.client.stats import CoreReading, EngineStats

STATUS = {"num_drafts": 5, "num_draft_tokens": 12, "num_accepted_tokens": 9, "num_accepted_tokens_per_pos": [5, 3, 1]}
OTHER = {"num_drafts": 1, "num_draft_tokens": 4, "num_accepted_tokens": 2, "num_accepted_tokens_per_pos": [1, 1, 0]}


def metrics(speculative_config, *statuses):
    """Return the samples of an engine whose cores have said `statuses`, as (name, labels): value."""
    cache = SimpleNamespace(
        block_size=16, cache_dtype="auto", enable_prefix_caching=True, gpu_memory_utilization=0.9, num_blocks=5
    )
    engine = SimpleNamespace(
        stats=EngineStats(100, True),
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="m"),
            cache_config=cache,
            lora_config=None,
            speculative_config=speculative_config,
        ),
        core_loads=lambda: {rank: CoreReading.of(1, status) for rank, status in enumerate(statuses)},
    )
    return {
        (sample.name, sample.labels["engine"], sample.labels.get("position")): sample.value
        for metric in EngineMetrics(engine).read()
        for sample in metric.samples
        if sample.name.startswith("vllm:spec_decode")
    }


def test_each_core_counts_drafts_and_accepted_tokens_by_position():
    found = metrics("a configuration", STATUS, OTHER)
    assert found["vllm:spec_decode_num_drafts_total", "0", None] == 5
    assert found["vllm:spec_decode_num_draft_tokens_total", "0", None] == 12
    assert found["vllm:spec_decode_num_accepted_tokens_total", "1", None] == 2
    per_position = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "0", str(i)] for i in range(3)]
    assert per_position == [5, 3, 1]


def test_without_speculation_there_are_no_such_metrics():
    assert metrics(None, {}) == {}


def test_readings_of_several_cores_are_added_up():
    total = CoreReading.total([CoreReading.of(1, STATUS), CoreReading.of(1, OTHER), CoreReading.of(1, {})])
    assert total is not None
    assert (total.num_drafts, total.num_accepted_tokens, total.num_accepted_tokens_per_pos) == (6, 11, [6, 4, 1])
    assert total.accepted_drafts == pytest.approx(11 / 16)
    assert CoreReading.of(1, {}).accepted_drafts is None
