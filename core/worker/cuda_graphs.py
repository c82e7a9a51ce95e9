"""Decode steps as captured graphs: the launches of a whole model made once and replayed by one call.

A graph computes a fixed number of rows out of buffers that stay where they are. A step of fewer rows is padded: padding
has no context and writes its keys and values to the padding block, so it meets nobody's.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.kernels.ops import AttentionMetadata

logger = logging.getLogger(__name__)

_MOST_ROWS = 512
"""Of more rows a step takes the device longer than the host takes to launch it."""
_CAPTURE_TIME_S = 60.0
"""After this no further graph is begun; the sizes that are missing are padded to the next one that is there."""

Forward = Callable[[Tensor, Tensor, AttentionMetadata], Tensor]
"""Of token ids and positions, int64 [num_tokens] each, and where attention looks: hidden states [num_tokens, size]."""
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Makes of a computation on tensors that stay where they are one that is replayed; each gives the same tensor anew.

Graphs of one `Capture` share their memory: what one gives is valid until the next is replayed.
"""


class CaptureError(RuntimeError):
    """The model computes in a way that no graph can hold."""


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of rows for which there are graphs, ascending.

    Up to 8 they double, as few rows are where launches cost the most. Then steps of 8, of 16 from 256 on: padding stays
    below 8 rows, or a sixteenth, and rows are what matrix units work on in multiples of 8 anyway.
    """
    most = min(max_num_seqs, _MOST_ROWS)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, _MOST_ROWS + 1, 16)]
    return [size for size in sizes if size < most] + [most]


class DeviceError(RuntimeError):
    """The device has failed, and can compute nothing any more."""


class DecodeGraphs:
    """Graphs of a model's decode steps, and the buffers that they read."""

    def __init__(self, forward: Forward, max_blocks: int, max_model_len: int, device: torch.device) -> None:
        """`max_blocks` is the width of the block table, `max_model_len` the longest context."""
        self._forward = forward
        self._max_model_len = max_model_len
        self._device = device
        self._max_blocks = max_blocks
        self._replays: dict[int, Callable[[], Tensor]] = {}
        self._sizes: list[int] = []
        """Those that there are graphs for, ascending."""

    def capture(self, sizes: Sequence[int], capture: Capture, beat: Callable[[], None]) -> None:
        """Make the graphs for `sizes`, as many as the time allows, the largest first, as the others fit its memory.

        Writes to the padding block alone. `beat` is called before each. Raises CaptureError, after which there are none
        to be used, where the model cannot be captured, and DeviceError.
        """
        most = max(sizes)

        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        self._input_ids = buffer(most, dtype=torch.int64)
        self._positions = buffer(most, dtype=torch.int64)
        self._slot_mapping = buffer(most, dtype=torch.int64)
        self._seq_lens = buffer(most, dtype=torch.int32)
        self._block_table = buffer(most, self._max_blocks, dtype=torch.int32)
        self._query_start = torch.arange(most + 1, dtype=torch.int32, device=self._device)
        self._replays.clear()
        started = time.monotonic()
        for size in sorted(sizes, reverse=True):
            beat()
            if self._replays and time.monotonic() > started + _CAPTURE_TIME_S:
                logger.warning("no graphs for steps of %d rows or fewer: the others took too long", size)
                break
            try:
                self._replays[size] = capture(self._computation(size))
            except DeviceError:
                raise
            except Exception as error:
                raise CaptureError(f"steps of {size} rows: {error}") from error
        self._sizes = sorted(self._replays)

    def fits(self, step: ScheduledStep) -> bool:
        """Whether a graph can compute `step`: of decodes alone, and no more than the largest has room for."""
        return step.num_decodes == len(step.rows) <= (self._sizes[-1] if self._sizes else 0)

    def run(self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor | None:
        """What the model gives for a step that `fits`: hidden states [num_rows, hidden], valid until the next run.

        None where the block table has more columns than the graphs read.
        """
        count, width = metadata.block_table.shape
        if width > self._max_blocks:
            return None
        size = next(size for size in self._sizes if size >= count)
        self._input_ids[:count].copy_(input_ids)
        self._positions[:count].copy_(positions)
        self._slot_mapping[:count].copy_(metadata.cell_mapping)
        self._seq_lens[:count].copy_(metadata.seq_lens)
        self._block_table[:count, :width].copy_(metadata.block_table)
        if count < size:
            # What an earlier step has left in the other buffers is good enough for rows without a context.
            self._slot_mapping[count:size].zero_()
            self._seq_lens[count:size].zero_()
        return self._replays[size]()[:count]

    def _computation(self, size: int) -> Callable[[], Tensor]:
        """The model on the first `size` rows of the buffers."""
        metadata = AttentionMetadata(
            query_start=self._query_start[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_table=self._block_table[:size],
            cell_mapping=self._slot_mapping[:size],
            query_lens=_NotKnown(),
            host_seq_lens=_NotKnown(),
            num_decodes=size,
            max_seq_len=self._max_model_len,
        )
        input_ids, positions = self._input_ids[:size], self._positions[:size]
        return lambda: self._forward(input_ids, positions, metadata)


class _NotKnown(Sequence[int]):
    """Lengths that differ from replay to replay: whoever reads them cannot be captured, and is told so."""

    def __getitem__(self, index: Any) -> NoReturn:
        raise RuntimeError("attention reads the lengths of rows on the host, which a graph cannot")

    def __len__(self) -> int:
        raise RuntimeError("attention counts rows on the host, which a graph cannot")


def cuda_capture(device: torch.device) -> Capture:
    """Captures into CUDA graphs that share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(compute: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        # Once for real: compiling a kernel or making a library's handle is no part of a graph.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            return graph, compute()

    def capture(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        try:
            graph, result = record(compute)
        except Exception:
            _raise_if_failed(device)
            raise

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return capture


def _raise_if_failed(device: torch.device) -> None:
    """Raises DeviceError where `device` can do nothing any more, for which no graph is to blame."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceError(str(error)) from error
