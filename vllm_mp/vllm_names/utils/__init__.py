"""The helpers of `vllm.utils` that programs around an engine use; `vllm_mp.utils.async_utils` has the other ones."""

import enum
import uuid

from vllm_mp.arguments.argument_parser import FlexibleArgumentParser
from vllm_mp.arguments.unserved_names import refuse

from .async_iterators import collect_from_async_generator, merge_async_iterators
from .counter import Counter
from .event_loops import in_loop, make_async
from .network_utils import get_ip, get_open_port

__all__ = [
    "Counter",
    "Device",
    "FlexibleArgumentParser",
    "collect_from_async_generator",
    "get_ip",
    "get_open_port",
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


__getattr__ = refuse(
    __name__,
    {
        **dict.fromkeys(
            (
                *("cdiv", "deprecate_kwargs", "is_list_of", "iterate_with_cancellation", "LazyLoader"),
                *("resolve_obj_by_qualname", "round_up", "set_ulimit", "weak_bind"),
            ),
            "it is a tool of vLLM's own code; copy the function into the program",
        ),
        "STR_DTYPE_TO_TORCH_DTYPE": "use getattr(torch, name)",
        "is_pin_memory_available": "use torch.cuda.is_available()",
    },
)
