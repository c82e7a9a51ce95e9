"""Vision towers that compute in chunks, between which a computation may stop.

A layer over an image of several megapixels takes seconds on a CPU. So there, products with weights are computed for
some rows at a time, and attention for some queries of some heads. Chunks depend on the image and the number of threads
alone, so the embeddings of an image are the same however often its encoding stops.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType, MethodType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BY_ROWS: Final = ("mlp", "patch_embed")
"""Names of modules that compute each row of their input by itself; so do all linear modules."""
_THREAD_ROWS: Final = 256
"""Rows of a chunk for each thread: with fewer, a product is slower."""
_THREAD_WEIGHTS: Final = 256 * 2**24
"""Bound on the rows of a chunk times the weights, for each thread; a module with more weights has fewer rows."""
_MIN_ROWS: Final = 64
_QUERIES: Final = 768
"""Queries of a chunk. From this number on, torch computes blocks of 256 queries, which is fastest."""
_QUERY_BLOCKS: Final = 3
"""Blocks of queries in a chunk of one head; the threads share those of all its heads."""
_THREAD_SCORES: Final = 2**24
"""Scores of queries and keys in a chunk for each thread, if its heads are enough for all threads."""
_ROTATION: Final = "apply_rotary_pos_emb_vision"
"""The name of transformers' function that rotates queries and keys, each row by itself."""
_ATTENTION: Final = "vllm_mp_chunks"
"""The name under which transformers finds `_attend`."""

_pause_point: ContextVar[Callable[[], None]] = ContextVar("pause_point", default=lambda: None)


@contextmanager
def pausing(pause_point: Callable[[], None]) -> Iterator[None]:
    """Have towers call `pause_point` in this block, after each layer and on a CPU after each chunk."""
    token = _pause_point.set(pause_point)
    try:
        yield
    finally:
        _pause_point.reset(token)


def pause() -> None:
    """Call the pause point of the block of `pausing`."""
    _pause_point.get()()


def add_pause_points(module: nn.Module, device: torch.device, chunks_attention: bool) -> None:
    """Let the vision tower of transformers' `module` stop after each layer, and on a CPU within its layers.

    With `chunks_attention`, no attention of the tower may have a mask.
    """
    by_rows: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        for layer in part if isinstance(part, nn.ModuleList) else ():
            layer.register_forward_hook(lambda *_: pause())
        *outer, own = name.split(".")
        is_inner = any(".".join(outer[:end]) in by_rows for end in range(1, len(outer) + 1))
        if not is_inner and (isinstance(part, nn.Linear) or own in _BY_ROWS):
            by_rows[name] = part
    if device.type != "cpu":
        return
    for part in by_rows.values():
        num_weights = sum(each.numel() for each in part.parameters())
        part.forward = functools.partial(_compute_by_rows, part.forward, num_weights)
    for part in module.modules():
        _chunk_rotation(part)
    if chunks_attention:
        _chunk_attention(module)


def _compute_by_rows(compute: Callable[[Tensor], Tensor], num_weights: int, rows: Tensor) -> Tensor:
    """Return what `compute` returns for `rows` [..., num_rows, size], each of which it computes by itself."""
    threads = torch.get_num_threads()
    most = min(_THREAD_ROWS * threads, _THREAD_WEIGHTS * threads // max(1, num_weights))
    most = max(_MIN_ROWS, most // _MIN_ROWS * _MIN_ROWS)
    if rows.dim() < 2 or rows.shape[-2] <= most:
        return compute(rows)
    result = None
    for first in range(0, rows.shape[-2], most):
        part = compute(rows[..., first : first + most, :])
        if result is None:
            result = part.new_empty((*part.shape[:-2], rows.shape[-2], part.shape[-1]))
        result[..., first : first + most, :] = part
        pause()
    assert result is not None
    return result


def _chunk_rotation(attention: nn.Module) -> None:
    """Have a module of transformers that rotates queries and keys do so in chunks; no-op for other modules."""
    forward: Any = type(attention).forward
    if _ROTATION not in forward.__code__.co_names:
        return
    rotate = functools.partial(_rotate_by_rows, forward.__globals__[_ROTATION])
    names = forward.__globals__ | {_ROTATION: rotate}
    chunked = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    attention.forward = MethodType(chunked, attention)


def _rotate_by_rows(
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    queries: Tensor,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return what `rotate` returns for `queries` and `keys` [num_rows, num_heads, head_dim].

    `cos` and `sin` are [num_rows, head_dim].
    """
    rotated = queries.new_empty(queries.shape), keys.new_empty(keys.shape)
    most = _THREAD_ROWS * torch.get_num_threads()
    for first in range(0, len(queries), most):
        some = slice(first, first + most)
        rotated[0][some], rotated[1][some] = rotate(queries[some], keys[some], cos[some], sin[some])
        pause()
    return rotated


def _chunk_attention(module: nn.Module) -> None:
    """Have the vision tower of transformers' `module` attend in chunks."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
    config: Any = module.config
    config.vision_config._attn_implementation = _ATTENTION


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return what each query sees of all values [batch, num_tokens, num_heads, head_dim], as transformers asks for it.

    `query`, `key` and `value` are [batch, num_heads, num_tokens, head_dim].
    """
    assert attention_mask is None, "all tokens of an image see one another"
    (num_heads, num_queries), threads = query.shape[1:3], torch.get_num_threads()
    if num_queries < 2 * _QUERIES:
        return F.scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2), None
    heads = max(-(-2 * threads // _QUERY_BLOCKS), _THREAD_SCORES * threads // (_QUERIES * key.shape[2]))
    result = query.new_empty((query.shape[0], num_queries, num_heads, value.shape[3]))
    # The last chunk is not smaller than the others, or torch would compute its queries in smaller blocks.
    for first in range(0, num_queries - _QUERIES + 1, _QUERIES):
        last = first + _QUERIES if num_queries - first >= 2 * _QUERIES else num_queries
        for head in range(0, num_heads, heads):
            some = slice(head, head + heads)
            seen = F.scaled_dot_product_attention(
                query[:, some, first:last], key[:, some], value[:, some], scale=scaling
            )
            result[:, first:last, some] = seen.transpose(1, 2)
            pause()
    return result, None
