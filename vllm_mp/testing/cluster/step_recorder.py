"""Record the duration of steps of a real scheduler and model in this process, without clients."""

import datetime
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from vllm_mp import AsyncEngineArgs, SamplingParams
from vllm_mp.config import VllmConfig
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.block_pool import root_hash
from vllm_mp.core.scheduler.kv_cache_manager import KVCacheManager
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.scheduler import Scheduler
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.core.worker.device import choose_dtype, choose_step_size
from vllm_mp.core.worker.model_runner import ModelRunner
from vllm_mp.core.worker.sampling.sampler import Sampler
from vllm_mp.machine.cpu_info import cpu_name
from vllm_mp.testing.cluster.step_times import COLUMNS

_DECODES = 8
"""Decode steps of each case, of which the median counts."""

Step = list[float]
"""The values of `COLUMNS`."""


class Cases(NamedTuple):
    """What is recorded: each number of rows with each context in tokens."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    cache_bytes: int


FULL = Cases((1, 4, 16, 32), (64, 512, 1024), 2**30)
QUICK = Cases((1, 3), (16, 40), 2**22)


class _Recorder:
    """A core's scheduler and model on a CPU, which must have one thread.

    A step takes its processor time, because other work on the machine adds to the time of the wall.
    """

    def __init__(self, config: VllmConfig) -> None:
        device, self._max_len = torch.device("cpu"), config.model_config.max_model_len
        self._vocab_size = config.model_config.architecture.vocab_size
        dtype = choose_dtype(config, device)
        choose_step_size(config, device)
        self._runner = ModelRunner(config, device, dtype)
        cache = config.cache_config
        self._batch = Batch(config.scheduler_config.max_num_seqs, self._max_len, cache.block_size, [])
        manager = KVCacheManager(self._batch, cache.num_blocks, cache.block_size)
        self._scheduler = Scheduler(config.scheduler_config, self._batch, manager)
        self._sampler = Sampler(self._batch, device)
        self._random = np.random.default_rng(0)
        self._num_added = 0

    def steps(self, rows: int, context: int) -> Iterator[Step]:
        """Yield the steps that read `rows` prompts of `context` tokens, and one for the decodes after them."""
        for _ in range(rows):
            self._add(context)
        decodes: list[Step] = []
        while len(decodes) < _DECODES:
            step = self._step()
            if step[2] or len(self._batch) < rows:
                yield step
            else:
                decodes.append(step)
        yield [float(np.median(column)) for column in zip(*decodes, strict=True)]
        self._scheduler.abort_all()

    def _add(self, num_tokens: int) -> None:
        slot, self._num_added = self._num_added, self._num_added + 1
        params = SamplingParams(temperature=0, max_tokens=self._max_len - num_tokens, ignore_eos=True)
        self._scheduler.add(
            Request(
                client=0,
                slot=slot,
                request_id=str(slot),
                params=params,
                tokens=self._random.integers(0, self._vocab_size, num_tokens, dtype=np.int32),
                num_prompt_tokens=num_tokens,
                max_total_tokens=self._max_len,
                order=self._scheduler.order_of(0),
                hashes=[root_hash("")],
            )
        )

    def _step(self) -> Step:
        began = time.thread_time()
        step = self._scheduler.schedule()
        assert step is not None
        output = self._runner.launch(step, self._batch, self._sampler)
        self._scheduler.launched(step, output, 1)
        output.sample()
        self._scheduler.update(output.wait())
        seconds = time.thread_time() - began
        ends, counts = self._batch.num_computed_tokens[step.rows], step.counts
        decodes = step.num_decodes
        starts = ends[decodes:] - counts[decodes:]
        pairs = counts[decodes:] * starts + counts[decodes:] * (counts[decodes:] + 1) // 2
        return [decodes, int(ends[:decodes].sum()), int(counts[decodes:].sum()), int(pairs.sum()), round(seconds, 6)]


def record(args: AsyncEngineArgs, path: Path, cases: Cases, commit: str | None) -> None:
    """Record the steps of a core with the options `args` into the file `path`."""
    args.kv_cache_memory_bytes = cases.cache_bytes
    config = args.create_engine_config()
    with torch.inference_mode(), one_thread():
        recorder = _Recorder(config)
        list(recorder.steps(1, cases.contexts[0]))  # warms up
        steps = [step for rows in cases.rows for context in cases.contexts for step in recorder.steps(rows, context)]
    facts = {
        "model": config.model_config.model,
        "dtype": config.model_config.dtype,
        "processor": cpu_name() or platform.machine(),
        "threads": 1,
        "time": "processor time",
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "columns": COLUMNS,
    }
    lines = ",\n".join(f"  {json.dumps(step)}" for step in steps)
    path.write_text(json.dumps(facts, indent=1)[:-2] + f',\n "steps": [\n{lines}\n ]\n}}\n')
