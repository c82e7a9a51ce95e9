"""The layout of the memory that all ranks of a core map: the ring of messages, then the group on CPUs."""

from typing import Final

from vllm_mp.config import VllmConfig
from vllm_mp.core.parallel import shared_group
from vllm_mp.core.parallel.ring import MessageRing
from vllm_mp.core.parallel.step_message import message_bytes

_MIN_SLOT_BYTES: Final = 2**20
_MIN_STEP_TOKENS: Final = 2048
"""At least the number of tokens of a step that a device chooses (`core.worker.device`)."""


def slot_bytes(config: VllmConfig) -> int:
    """Return the bytes of a slot of the ring, into which every step fits.

    Slots that are never filled take no memory.
    """
    scheduler, model = config.scheduler_config, config.model_config
    step_tokens = scheduler.max_num_batched_tokens or max(_MIN_STEP_TOKENS, scheduler.max_num_seqs, model.max_model_len)
    max_blocks = -(-model.max_model_len // config.cache_config.block_size)
    return max(_MIN_SLOT_BYTES, 64 + message_bytes(scheduler.max_num_seqs, step_tokens, max_blocks))


def group_offset(size: int, slot_bytes: int) -> int:
    """Return where the group of `size` ranks begins."""
    return MessageRing.num_bytes(size - 1, slot_bytes)


def total_bytes(size: int, slot_bytes: int) -> int:
    """Return the bytes of the whole memory of `size` ranks."""
    return group_offset(size, slot_bytes) + shared_group.num_bytes(size)
