"""The layout of the memory that all ranks of a core map.

The ring of messages comes first. What follows is used on CPUs: the group of each stage, and with several stages the
group of all ranks and a queue of hidden states for each rank.
"""

from typing import Final

import msgspec

from vllm_mp.config import VllmConfig
from vllm_mp.core.collectives import shared_group
from vllm_mp.core.collectives.tensor_queue import TensorQueue
from vllm_mp.core.parallel.ring import MessageRing
from vllm_mp.core.worker.step_message import message_bytes

_MIN_SLOT_BYTES: Final = 2**20
_MIN_STEP_TOKENS: Final = 2048
"""At least the number of tokens of a step that a device chooses (`core.worker.device`)."""
_MESSAGES_A_STEP: Final = 4
"""Slots of the ring for each step that is under way."""
_MAX_ELEMENT_BYTES: Final = 4


class MemoryLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything lies in the memory of `num_stages` stages of `tensor_size` ranks, in bytes from its beginning.

    Parts that are never written take no memory.
    """

    tensor_size: int
    num_stages: int
    message_slot: int
    """Bytes of a slot of the ring, into which every step fits."""
    hidden_slot: int
    """Bytes of a slot of a queue, into which the hidden states of every step fit."""

    @classmethod
    def of(cls, config: VllmConfig) -> "MemoryLayout":
        """Return the layout for a configuration, which need not be complete yet."""
        scheduler, model, parallel = config.scheduler_config, config.model_config, config.parallel_config
        step_tokens = scheduler.max_num_batched_tokens or max(
            _MIN_STEP_TOKENS, scheduler.max_num_seqs, model.max_model_len
        )
        step_tokens += config.num_excess_tokens
        max_blocks = -(-model.max_model_len // config.cache_config.block_size)
        step_bytes = 64 + message_bytes(scheduler.max_num_seqs, step_tokens, max_blocks)
        return cls(
            tensor_size=parallel.tensor_parallel_size,
            num_stages=parallel.pipeline_parallel_size,
            message_slot=max(_MIN_SLOT_BYTES, step_bytes),
            hidden_slot=step_tokens * model.get_hidden_size() * _MAX_ELEMENT_BYTES,
        )

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.tensor_size

    @property
    def num_messages(self) -> int:
        """Slots of the ring."""
        return _MESSAGES_A_STEP * self.num_stages

    @property
    def queue_slots(self) -> int:
        """Slots of a queue: the lowest power of 2 above the number of steps that are under way."""
        return 1 << self.num_stages.bit_length()

    def stage_of(self, rank: int) -> int | None:
        """Return the stage of a rank; None if there is only one stage."""
        return rank // self.tensor_size if self.num_stages > 1 else None

    def group_at(self, stage: int) -> int:
        """Return the offset at which the group of a stage begins."""
        ring = MessageRing.num_bytes(self.num_ranks - 1, self.message_slot, self.num_messages)
        return ring + stage * shared_group.num_bytes(self.tensor_size)

    @property
    def all_ranks_at(self) -> int:
        """The offset at which the group of all ranks begins."""
        return self.group_at(self.num_stages)

    def queue_at(self, rank: int) -> int:
        """Return the offset of the queue from which `rank` takes hidden states."""
        queues = self.all_ranks_at + shared_group.num_bytes(self.num_ranks)
        return queues + rank * TensorQueue.num_bytes(self.queue_slots, self.hidden_slot)

    @property
    def total_bytes(self) -> int:
        return self.group_at(1) if self.num_stages == 1 else self.queue_at(self.num_ranks)
