"""Helpers for asynchronous code, where programs for vLLM import them from."""

from vllm_mp import AsyncMicrobatchTokenizer

from .async_iterators import collect_from_async_generator, merge_async_iterators
from .event_loops import P, T, cancel_task_threadsafe, in_loop, make_async, run_in_loop

__all__ = [
    "AsyncMicrobatchTokenizer",
    "P",
    "T",
    "cancel_task_threadsafe",
    "collect_from_async_generator",
    "in_loop",
    "make_async",
    "merge_async_iterators",
    "run_in_loop",
]
