"""The program of a rank that is not rank 0: join, load, then compute what the core says until the core ends."""

import ctypes
import gc
import logging
import mmap
import os
import signal
import socket
import sys
from typing import Final

import msgspec

from vllm_mp.core.parallel.messages import (
    PROTOCOL,
    Failed,
    FromRank,
    Joined,
    Ready,
    WorkerLaunch,
    chosen_options,
    digest_of,
)
from vllm_mp.machine.deferred_modules import load_deferred_modules
from vllm_mp.machine.log_setup import set_up_core_log
from vllm_mp.version import __version__

logger = logging.getLogger(__name__)

_SET_DEATH_SIGNAL: Final = 1


def main() -> int:
    """Run the rank that the launch line on standard input describes; return the exit code.

    The rank ends when its core ends: the kernel kills it, and the socket closes.
    """
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerLaunch)
    set_up_core_log(f"rank {launch.rank}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the core decides
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != launch.parent_pid:
        return 1  # the core died before the kernel knew what to do then
    says = socket.socket(fileno=launch.socket)
    try:
        _serve(launch, says)
    except Exception as error:
        is_mistake = isinstance(error, ValueError)
        logger.log(logging.ERROR, "the rank failed: %s", error, exc_info=not is_mistake)
        text = str(error) if is_mistake else f"{type(error).__name__}: {error}"
        _say(says, Failed(error=text, is_mistake=is_mistake))
        return 1
    return 0


def _serve(launch: WorkerLaunch, says: socket.socket) -> None:
    """Join the group, load the rank's share of the model, and compute until the core closes the socket."""
    import torch

    from vllm_mp.core.parallel.follower import Follower
    from vllm_mp.core.parallel.make_group import make_group
    from vllm_mp.core.parallel.ring import SPIN_S, MessageRing
    from vllm_mp.core.torch_import.rare_parts_of_torch import needs_all_of_torch
    from vllm_mp.core.weights.digest import weights_digest
    from vllm_mp.core.worker.device import prepare_device
    from vllm_mp.core.worker.memory.plan import memory_to_start
    from vllm_mp.core.worker.model_runner import ModelRunner

    gc.freeze()
    config, rank = launch.config, launch.rank
    memory = mmap.mmap(launch.memory, 0)
    layout = launch.layout
    ring = MessageRing(memory, 0, layout.num_ranks - 1, layout.message_slot, layout.num_messages)
    beat = ring.progress[rank - 1].beat
    device, dtype, num_threads = prepare_device(config, rank)
    if needs_all_of_torch(config, device.type):
        load_deferred_modules()  # which the core that has forked this process may have deferred
    torch.set_num_threads(num_threads)
    chosen = chosen_options(config)
    _say(says, Joined(rank=rank, protocol=PROTOCOL, package=__version__, digest=digest_of(config), chosen=chosen))
    group, pipeline = make_group(config, device, rank, memory, layout, launch.meeting_place, launch.has_own_cpus)
    with memory_to_start(config):
        runner = ModelRunner(
            config,
            device,
            dtype,
            lambda _: beat(),
            beat,
            group=group,
            pipeline=pipeline,
            take_turn=lambda _: launch.kept_cache,
        )
    follower = Follower(config, rank, device, runner, lambda reply: _say(says, reply))
    reads_own_files = config.parallel_config.node_rank > 0
    _say(says, Ready(rank=rank, weights=weights_digest(config.model_config) if reads_own_files else ""))
    spin_s = SPIN_S if launch.has_own_cpus else 0.0
    while (message := ring.read(rank - 1, launch.event, [says.fileno()], spin_s)) is not None:
        follower.handle(memoryview(message))
        beat()


def _say(says: socket.socket, said: FromRank) -> None:
    says.sendall(msgspec.msgpack.encode(said))
