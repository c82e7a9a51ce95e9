"""The helpers of `vllm.utils` that programs around an engine use; `vllm_mp.utils.async_utils` has the other ones."""

import enum
import uuid

from vllm_mp.arguments.argument_parser import FlexibleArgumentParser

from .async_iterators import collect_from_async_generator, merge_async_iterators
from .event_loops import in_loop, make_async

__all__ = [
    "Device",
    "FlexibleArgumentParser",
    "collect_from_async_generator",
    "in_loop",
    "make_async",
    "merge_async_iterators",
    "random_uuid",
]


class Device(enum.Enum):
    """A kind of device, for `AsyncLLM.reset_prefix_cache`."""

    GPU = enum.auto()
    CPU = enum.auto()


def random_uuid() -> str:
    """Return a new id for a request: 32 hexadecimal digits."""
    return uuid.uuid4().hex
