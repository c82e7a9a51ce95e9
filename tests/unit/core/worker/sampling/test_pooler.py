"""Pooling in steps of a real scheduler; the stand-in for the model makes hidden states from the token id alone."""

import numpy as np
import pytest
import torch

from vllm_mp.config import SchedulerConfig
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.cache.block_pool import root_hash
from vllm_mp.core.scheduler.cache.kv_cache_manager import KVCacheManager
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.scheduler import Scheduler
from vllm_mp.core.scheduler.step import ModelOutput
from vllm_mp.core.worker.sampling.pooler import Pooler
from vllm_mp.requests.pooling_params import PoolingParams
from vllm_mp.requests.sampling_params import SamplingParams

BLOCK = 4
HIDDEN = 6
VOCAB = 50
STATES = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))
TYPES = ("last", "mean", "cls")


class Engine:
    """A scheduler and a pooler, with a model that has no context."""

    def __init__(self, num_blocks=100, max_num_seqs=8, budget=16, dtype=torch.float32, **config):
        settings = {"max_num_partial_prefills": 1, "enable_chunked_prefill": True, "policy": "fcfs"}
        self.batch = Batch(max_num_seqs, 64, BLOCK, [])
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, stream_interval=1, **{**settings, **config}
        )
        self.scheduler = Scheduler(config, self.batch, KVCacheManager(self.batch, num_blocks + 1, BLOCK))
        self.blocks = self.scheduler.cache.pool
        self.states = STATES.to(dtype)
        self.pooler = Pooler()
        self.vectors = {}
        self.ends = {}
        self.cached = {}

    def add(self, slot, prompt, pooling_type=None, max_tokens=8, **params):
        """Add a pooling request, or without `pooling_type` a request that generates."""
        pooling = None
        if pooling_type is not None:
            pooling = PoolingParams(pooling_type=pooling_type, **{"normalize": False, **params})
        tokens = np.array(prompt, np.int32)
        self.scheduler.add(
            Request(
                client=0,
                slot=slot,
                request_id=str(slot),
                params=pooling or SamplingParams(max_tokens=max_tokens, seed=1),
                tokens=tokens,
                num_prompt_tokens=len(tokens),
                max_total_tokens=len(tokens) + max_tokens,
                hashes=[root_hash("")],
                reads_cache=pooling is None or pooling.pooling_type == "last",
                order=self.scheduler.order_of(0),
            )
        )

    def step(self):
        step = self.scheduler.schedule()
        if step is None:
            return None
        ids = [
            token
            for row, count in zip(step.rows.tolist(), step.counts.tolist(), strict=True)
            for token in self.batch.token_ids[row, self.batch.num_computed_tokens[row] :][:count].tolist()
        ]
        vectors = self.pooler.pool(self.states[ids], step, self.batch)()
        self.scheduler.launched(step, None, 1)
        result = self.scheduler.update(ModelOutput(np.full(int(step.samples.sum()), 7), vectors=vectors))
        self.vectors |= {slot: vector for _, slot, vector in result.vectors}
        self.ends |= {end.slot: end for _, end in result.finished}
        self.cached |= {slot: count for _, slot, count in result.cached}
        return step

    def run(self):
        for _ in range(1000):
            if self.step() is None:
                return
        raise AssertionError("the scheduler has work after 1000 steps")


def expected(prompt, pooling_type):
    states = STATES[prompt]
    return {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling_type].numpy()


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@pytest.mark.parametrize("pooling_type", TYPES)
@pytest.mark.parametrize("budget", [8, 64])
def test_prompts_of_all_lengths_are_pooled_whole_or_in_chunks(pooling_type, budget):
    engine = Engine(budget=budget, max_num_partial_prefills=2)
    prompts = [prompt_of(length, length) for length in (1, 30, 2, 9, 8, 17, 1, 33, 16)]
    for slot, prompt in enumerate(prompts):
        engine.add(slot, prompt, pooling_type)
    engine.run()
    for slot, prompt in enumerate(prompts):
        np.testing.assert_allclose(engine.vectors[slot], expected(prompt, pooling_type), atol=1e-6)
        assert (engine.ends[slot].reason, engine.ends[slot].num_output_tokens) == ("stop", 0)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert not engine.scheduler.has_work


def test_pooling_request_takes_no_decode_step_and_draws_no_token():
    engine = Engine(budget=64)
    engine.add(0, prompt_of(10), "mean")
    engine.add(1, prompt_of(5), None, max_tokens=3)
    step = engine.step()
    assert step.samples.tolist() == [False, True]
    assert step.pools.tolist() == [True, False]
    assert set(engine.vectors) == {0}
    assert engine.scheduler.num_running == 1
    engine.run()
    assert engine.ends[1].reason == "length"


@pytest.mark.parametrize("pooling_type", TYPES)
def test_request_preempted_in_its_prompt_is_pooled_from_the_beginning(pooling_type):
    engine = Engine(num_blocks=16, budget=6)
    prompt = prompt_of(36, 5)
    for slot in (0, 1):
        engine.add(slot, prompt_of(4, slot), None, max_tokens=16)
    engine.step()
    engine.step()
    engine.add(2, prompt, pooling_type)
    engine.run()
    assert engine.scheduler.num_preemptions == 1
    np.testing.assert_allclose(engine.vectors[2], expected(prompt, pooling_type), atol=1e-6)


@pytest.mark.parametrize("pooling_type", TYPES)
def test_only_last_token_pooling_uses_the_prefix_cache(pooling_type):
    engine = Engine(budget=64)
    prompt = prompt_of(20, 3)
    engine.add(0, prompt, None, max_tokens=1)
    engine.run()
    engine.add(1, prompt, pooling_type)
    assert engine.step().counts.tolist() == ([4] if pooling_type == "last" else [20])
    assert engine.cached == ({1: 16} if pooling_type == "last" else {})
    np.testing.assert_allclose(engine.vectors[1], expected(prompt, pooling_type), atol=1e-6)


def test_partial_result_of_an_aborted_request_reaches_no_other_request():
    engine = Engine(budget=8, max_num_seqs=1)
    engine.add(0, prompt_of(30, 1), "mean")
    engine.step()
    assert engine.scheduler.abort(0, 0).reason == "abort"
    prompt = prompt_of(12, 2)
    engine.add(1, prompt, "mean")
    engine.run()
    np.testing.assert_allclose(engine.vectors[1], expected(prompt, "mean"), atol=1e-6)


def test_vectors_are_cut_before_they_are_normalized():
    engine = Engine(budget=64)
    prompt = prompt_of(9)
    engine.add(0, prompt, "mean", dimensions=4, normalize=True)
    engine.add(1, prompt, "mean", dimensions=4)
    engine.add(2, prompt, "mean", normalize=True)
    engine.run()
    whole = expected(prompt, "mean")
    np.testing.assert_allclose(engine.vectors[0], whole[:4] / np.linalg.norm(whole[:4]), atol=1e-6)
    np.testing.assert_allclose(engine.vectors[1], whole[:4], atol=1e-6)
    np.testing.assert_allclose(engine.vectors[2], whole / np.linalg.norm(whole), atol=1e-6)
    assert all(vector.dtype == np.float32 for vector in engine.vectors.values())


def test_sums_of_float16_states_are_float32():
    engine = Engine(budget=64, dtype=torch.float16)
    engine.states = torch.full((VOCAB, HIDDEN), 30_000.0, dtype=torch.float16)
    engine.add(0, prompt_of(50), "mean")
    engine.run()
    np.testing.assert_array_equal(engine.vectors[0], np.full(HIDDEN, 30_000, np.float32))


def test_vector_that_is_not_finite_fails_only_its_request():
    engine = Engine(budget=64)
    engine.states = STATES.clone()
    engine.states[13] = float("nan")
    engine.add(0, [1, 13, 2], "mean", normalize=True)
    engine.add(1, [1, 2], "mean")
    engine.add(2, [13, 2], "last")
    engine.run()
    assert [engine.ends[slot].reason for slot in range(3)] == ["error", "stop", "stop"]
    assert "not finite" in engine.ends[0].error


def test_normalized_vector_of_zeros_is_zeros():
    engine = Engine(budget=64)
    engine.states = torch.zeros(VOCAB, HIDDEN)
    engine.add(0, [1, 2], "mean", normalize=True)
    engine.run()
    assert not engine.vectors[0].any()
