"""Decode steps as captured graphs: all launches of a model are recorded once, and a single call replays them.

A graph computes a fixed number of rows from buffers at fixed addresses. A step of fewer rows is padded. Padding has no
context and writes its keys and values to the padding block, so it changes no row.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from vllm_mp.config import VllmConfig
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import AttentionMetadata, StepColumns

logger = logging.getLogger(__name__)

_CAPTURE_TIME_S = 60.0
"""After this time no further size is captured; steps of the missing sizes are padded to the next captured size."""

Forward = Callable[[Tensor, Tensor, AttentionMetadata], Tensor]
"""Returns hidden states [num_tokens, hidden_size] for token ids and positions, int64 [num_tokens] each."""
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Turns a computation on tensors at fixed addresses into its replay, which returns the same tensor each time.

Graphs of one `Capture` share their memory: the result of a replay is valid until the next replay of any of them.
"""


class CaptureError(RuntimeError):
    """The model cannot be captured."""


class DeviceError(RuntimeError):
    """The device has failed and cannot compute any more."""


def batch_sizes(config: VllmConfig) -> list[int]:
    """Return the numbers of rows to capture graphs for, ascending.

    They double up to 8, because launches dominate a step of few rows. Then they grow by 8, from 256 on by 16 and from
    512 on by 32: padding stays below 8 rows or a sixteenth, and matrix units compute rows in multiples of 8 anyway.
    """
    largest = min(config.scheduler_config.max_num_seqs, config.model_config.max_cudagraph_capture_size)
    sizes = itertools.chain([1, 2, 4], range(8, 256, 8), range(256, 512, 16), range(512, largest, 32))
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraphs:
    """Graphs of a model's decode steps, with the buffers that they read."""

    def __init__(
        self, forward: Forward, max_blocks: int, max_model_len: int, device: torch.device, has_adapters: bool = False
    ) -> None:
        """`max_blocks` is the width of the block table, `max_model_len` the longest context in tokens.

        With `has_adapters`, each size has a graph for steps with LoRA adapters too.
        """
        self._forward = forward
        self._max_model_len = max_model_len
        self._device = device
        self._max_blocks = max_blocks
        self._has_adapters = has_adapters
        self._replays: dict[int, Callable[[], Tensor]] = {}
        """By number of rows."""
        self._adapter_replays: dict[int, Callable[[], Tensor]] = {}
        """The same for steps with adapters; {} without `has_adapters`."""
        self._sizes: list[int] = []
        """The captured sizes, ascending."""

    def capture(self, sizes: Sequence[int], capture: Capture, beat: Callable[[], None]) -> None:
        """Capture graphs for `sizes`, as many as the time allows; the largest first, as the others reuse its memory.

        Writes to the padding block only. `beat` is called before each capture. Raises CaptureError if the model cannot
        be captured, after which no graph may be used, and DeviceError if the device has failed.
        """
        largest = max(sizes)

        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        self._buffers = StepColumns(
            input_ids=buffer(largest, dtype=torch.int64),
            positions=buffer(largest, dtype=torch.int64),
            cell_mapping=buffer(largest, dtype=torch.int64),
            query_start=buffer(largest + 1, dtype=torch.int32),
            seq_lens=buffer(largest, dtype=torch.int32),
            block_table=buffer(largest, self._max_blocks, dtype=torch.int32),
            adapter_slots=buffer(largest, dtype=torch.int32) if self._has_adapters else None,
        )
        self._replays.clear()
        self._adapter_replays.clear()
        started = time.monotonic()
        for size in sorted(sizes, reverse=True):
            beat()
            if self._replays and time.monotonic() > started + _CAPTURE_TIME_S:
                logger.warning(
                    "no graphs for steps of %d rows or fewer: capturing the larger sizes took more than %.0f s; these "
                    "steps are padded to %d rows",
                    size,
                    _CAPTURE_TIME_S,
                    min(self._replays),
                )
                break
            try:
                if self._has_adapters:
                    self._adapter_replays[size] = capture(self._computation(size, adapters=True))
                self._replays[size] = capture(self._computation(size))
            except DeviceError:
                raise
            except Exception as error:
                raise CaptureError(f"steps of {size} rows: {error}") from error
        self._sizes = sorted(self._replays)

    def fits(self, step: ScheduledStep) -> bool:
        """Return whether a graph can compute `step`: it has decodes only, and at most the largest captured size."""
        return step.num_decodes == len(step.rows) <= (self._sizes[-1] if self._sizes else 0)

    def run(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, latest: Tensor | None = None
    ) -> Tensor | None:
        """Return the hidden states [num_rows, hidden_size] of a step that `fits`, valid until the next run.

        `latest` as for `ops.copy_step`. Return None if the block table has more columns than the graphs read.
        """
        count, width = metadata.block_table.shape
        if width > self._max_blocks:
            return None
        size = next(size for size in self._sizes if size >= count)
        ops.copy_step(
            StepColumns(
                input_ids,
                positions,
                metadata.cell_mapping,
                metadata.query_start,
                metadata.seq_lens,
                metadata.block_table,
                metadata.adapter_slots,
            ),
            self._of_size(size),
            latest,
        )
        replays = self._replays if metadata.adapter_slots is None else self._adapter_replays
        return replays[size]()[:count]

    def _of_size(self, size: int) -> StepColumns:
        """Return the first `size` rows of the buffers."""
        columns = self._buffers
        return StepColumns(
            columns.input_ids[:size],
            columns.positions[:size],
            columns.cell_mapping[:size],
            columns.query_start[: size + 1],
            columns.seq_lens[:size],
            columns.block_table[:size],
            None if columns.adapter_slots is None else columns.adapter_slots[:size],
        )

    def _computation(self, size: int, *, adapters: bool = False) -> Callable[[], Tensor]:
        """Return the computation of the model on the first `size` rows of the buffers."""
        columns = self._of_size(size)
        metadata = AttentionMetadata(
            query_start=columns.query_start,
            seq_lens=columns.seq_lens,
            block_table=columns.block_table,
            cell_mapping=columns.cell_mapping,
            query_lens=_UnknownLengths(),
            host_seq_lens=_UnknownLengths(),
            num_decodes=size,
            max_seq_len=self._max_model_len,
            adapter_slots=columns.adapter_slots if adapters else None,
        )
        return lambda: self._forward(columns.input_ids, columns.positions, metadata)


class _UnknownLengths(Sequence[int]):
    """Lengths that differ between replays. Reading them raises, so attention that reads them cannot be captured."""

    def __getitem__(self, index: Any) -> NoReturn:
        raise RuntimeError("attention reads the lengths of rows on the host, which a graph cannot do")

    def __len__(self) -> int:
        raise RuntimeError("attention counts rows on the host, which a graph cannot do")


def cuda_capture(device: torch.device) -> Capture:
    """Return a capture into CUDA graphs that share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(compute: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        # Run once before the capture: a graph cannot hold the compilation of a kernel or a library's initialization.
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
    """Raise DeviceError if `device` has failed, which is not the fault of the graph."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceError(str(error)) from error
