"""Ranks of a group as threads of this process, which stand in for processes."""

import contextlib
import mmap
import queue
import threading
from unittest import mock

import torch

from support.local_engine import LocalEngine
from vllm_mp.core.collectives.pipeline import SharedMemoryPipeline
from vllm_mp.core.collectives.shared_group import SharedMemoryGroup, num_bytes
from vllm_mp.core.collectives.tensor_queue import TensorQueue
from vllm_mp.core.models.transformers import backend as transformers_backend
from vllm_mp.core.parallel.follower import Follower
from vllm_mp.core.parallel.followers import Followers
from vllm_mp.core.worker.model_runner import ModelRunner
from vllm_mp.kernels.cpu.library import Library, library

QUEUE_SLOT = 2**16


class ThreadGroup(SharedMemoryGroup):
    """The group of one thread; a rank that waits raises RuntimeError when a thread has called `fail`."""

    def __init__(self, memory, rank, size, failed):
        super().__init__(memory, 0, rank, size, self._look)
        self._failed = failed

    def fail(self):
        self._failed.set()

    def _look(self):
        if self._failed.is_set():
            raise RuntimeError("a rank of the group has failed")


def make_groups(size, memory=None, failed=None):
    """Return the groups of `size` ranks that share `memory`, by default new memory; `failed` tells of a failure."""
    memory, failed = memory or mmap.mmap(-1, num_bytes(size)), failed or threading.Event()
    return [ThreadGroup(memory, rank, size, failed) for rank in range(size)]


def make_pipelines(num_stages, size, failed):
    """Return the pipelines of the ranks of `num_stages` stages, each of `size` ranks; None for each with one stage."""
    if num_stages == 1:
        return [None] * size
    num_ranks = num_stages * size
    all_ranks, slots = make_groups(num_ranks, failed=failed), (4, QUEUE_SLOT)
    memories = [mmap.mmap(-1, TensorQueue.num_bytes(*slots)) for _ in range(num_ranks)]

    def queue_of(reader):
        return TensorQueue(memories[reader], 0, *slots, check=all_ranks[0]._look)

    return [
        SharedMemoryPipeline(
            rank // size, num_stages, all_ranks[rank], queue_of(rank), queue_of((rank + size) % num_ranks)
        )
        for rank in range(num_ranks)
    ]


def run_ranks(groups, run):
    """Call `run(rank, group)` for all ranks at the same time; return the results by rank."""
    results, errors = [None] * len(groups), []

    def call(rank, group):
        try:
            results[rank] = run(rank, group)
        except BaseException as error:
            errors.append(error)
            group.fail()

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class _Processes:
    """Stands in for `Ranks`: messages go to the queues of threads."""

    def __init__(self, num_followers):
        self.queues = [queue.Queue() for _ in range(num_followers)]
        self.said = [queue.Queue() for _ in range(num_followers)]
        self.descriptors = self.pids = self.machines = ()
        self.num_messages = 0

    def write(self, parts):
        self.num_messages += 1
        for messages in self.queues:
            messages.put(b"".join(parts))

    def replies(self, number):
        return [said.get() for said in self.said]


class LocalGroup:
    """A `LocalEngine` on rank 0, and followers on the other ranks of `num_stages` stages of `size` ranks."""

    def __init__(self, folder, size, num_stages=1, make_captures=None, **options):
        """`make_captures[rank]` is the `make_capture` of each rank."""
        failed, num_ranks = threading.Event(), num_stages * size
        self.groups = [group for _ in range(num_stages) for group in make_groups(size, failed=failed)]
        self.pipelines = make_pipelines(num_stages, size, failed)
        self.processes = _Processes(num_ranks - 1)
        self.errors = []
        self.followers = [None] * num_ranks
        self._ready = [threading.Event() for _ in range(num_ranks)]
        self._threads = [threading.Thread(target=self._follow, args=(rank,)) for rank in range(1, num_ranks)]
        options = {**options, "tensor_parallel_size": size, "pipeline_parallel_size": num_stages}
        self._options = (folder, options)
        self._make_captures = make_captures or [None] * num_ranks
        for thread in self._threads:
            thread.start()
        self.others = Followers(self.processes, options.get("max_num_seqs", 12))
        try:
            self.engine = LocalEngine(
                folder,
                make_capture=self._make_captures[0],
                group=self.groups[0],
                leader=self.others.leader,
                pipeline=self.pipelines[0],
                **options,
            )
        except BaseException:
            self.close()
            raise
        for ready in self._ready[1:]:
            ready.wait()

    def _follow(self, rank):
        folder, options = self._options
        try:
            config = LocalEngine.make_config(folder, "cpu", **options)
            device, dtype = torch.device("cpu"), getattr(torch, config.model_config.dtype)
            places = {"group": self.groups[rank], "pipeline": self.pipelines[rank]}
            runner = ModelRunner(config, device, dtype, make_capture=self._make_captures[rank], **places)
            follower = Follower(config, rank, device, runner, self.processes.said[rank - 1].put)
            self.followers[rank] = follower
            self._ready[rank].set()
            while (message := self.processes.queues[rank - 1].get()) is not None:
                follower.handle(memoryview(message))
        except BaseException as error:
            self.errors.append(error)
            self.groups[rank].fail()
            self._ready[rank].set()

    def close(self):
        for messages in self.processes.queues:
            messages.put(None)
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


@contextlib.contextmanager
def local_group(folder, size=1, **options):
    """Run a `LocalGroup` in the block."""
    with one_thread_in_kernels():
        group = LocalGroup(folder, size, **options)
        try:
            yield group
        finally:
            group.close()


@contextlib.contextmanager
def one_thread_in_kernels():
    """Let one thread at a time call the C++ kernels, or have transformers load a model, which changes global state."""
    lock, function, kernels = threading.Lock(), Library.function, library()
    loading, followed = threading.Lock(), transformers_backend._followed

    def alone(compute):
        def compute_alone(*args):
            with lock:
                return compute(*args)

        return compute_alone

    @contextlib.contextmanager
    def followed_alone(*args):
        with loading, followed(*args):
            yield

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(transformers_backend, "_followed", followed_alone))
        patches.enter_context(
            mock.patch.object(Library, "function", lambda self, name, dtype: alone(function(self, name, dtype)))
        )
        if kernels is not None:
            patches.enter_context(mock.patch.object(kernels, "write_strips", alone(kernels.write_strips)))
        yield
