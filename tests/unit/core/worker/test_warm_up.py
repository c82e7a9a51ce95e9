"""What a core prepares while streams wait for it or for the core before, so that its first step takes no longer."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support.local_engine import dummy_args
from transformers import BertConfig

from vllm_mp import SamplingParams
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.core.worker.model_runner import ModelRunner
from vllm_mp.core.worker.sampling.sampler import Sampler
from vllm_mp.core_link.core_launch import KeptCache
from vllm_mp.testing.random_models import CONFIGS, SIZES

COUNT, BLOCK = 6, 4


@pytest.fixture
def memory():
    descriptor = os.memfd_create("cache")
    yield descriptor
    os.close(descriptor)


def tokens_of(runner):
    """Return the tokens after a prompt, of a greedy request and of a drawn one."""
    batch = Batch(2, 64, BLOCK, [])
    for slot, temperature in enumerate((0.0, 1.0)):
        prompt = np.arange(1, 1 + COUNT, dtype=np.int32)
        params = SamplingParams(temperature=temperature, seed=slot)
        request = Request(0, slot, "after", params, prompt, COUNT, 60, (0, slot))
        batch.add(request, np.arange(1, 3, dtype=np.int32) + 2 * slot)
    step = ScheduledStep.of(batch, batch.order, np.full(2, COUNT), 0)
    return runner.launch(step, batch, Sampler(batch, runner._device)).wait().tokens.tolist()


@pytest.mark.parametrize(
    ("name", "architecture", "is_warm"),
    [("llama", "LlamaForCausalLM", True), ("gpt2", "GPT2LMHeadModel", True), ("encoder", "BertModel", False)],
)
def test_process_that_takes_over_has_computed_a_step_before_its_turn(name, architecture, is_warm, memory, tmp_path):
    config = BertConfig(**SIZES) if name == "encoder" else CONFIGS[name]
    config.architectures = config.architectures or [architecture]
    args = dummy_args(config, tmp_path, BLOCK)
    beats, before_turn = [], []

    def start(**options):
        return ModelRunner(
            args.create_engine_config(),
            torch.device("cpu"),
            torch.float32,
            beat=lambda: beats.append(1),
            take_turn=lambda _: before_turn.append(len(beats)),
            **options,
        )

    with one_thread():
        runner, usual = start(former_cache=KeptCache(descriptors=[memory], adopts=True)), start()
        if is_warm:
            assert tokens_of(runner) == tokens_of(usual)
    warm, cold = before_turn
    assert (warm > 0) == is_warm
    assert cold == warm, "a core that follows no other computes nothing before its first request"


def test_successor_of_a_dead_core_maps_the_pages_of_its_cache_before_its_first_step(memory, tmp_path):
    args = dummy_args(CONFIGS["llama"], tmp_path, BLOCK)

    def start(adopts):
        return ModelRunner(
            args.create_engine_config(),
            torch.device("cpu"),
            torch.float32,
            take_turn=lambda _: KeptCache(descriptors=[memory], adopts=adopts),
        )

    with one_thread():
        first = start(adopts=False)
        expected = tokens_of(first)
        first.memory.give_up_cache()
        second = start(adopts=True)
        deadline = time.monotonic() + 60
        while not resident_kib(second.memory.kv_caches[0][0]):
            assert time.monotonic() < deadline
        assert tokens_of(second) == expected


def resident_kib(tensor):
    """Return how much of the map that holds `tensor` this process can read without a page fault, in KiB."""
    address = tensor.data_ptr()
    lines = Path("/proc/self/smaps").read_text().splitlines()
    ranges = ((at, line.split()[0].split("-")) for at, line in enumerate(lines) if "-" in line.split()[0])
    start = next(at for at, (begin, end) in ranges if int(begin, 16) <= address < int(end, 16))
    return next(int(line.split()[1]) for line in lines[start:] if line.startswith("Rss:"))
