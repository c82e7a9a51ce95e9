"""Steps as captured graphs: all launches of a model are recorded once, and a single call replays them.

A graph computes a fixed number of tokens and rows from buffers at fixed addresses. A smaller step is padded. Padding
has no context and writes its keys and values to the padding block, so it changes no row.
"""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from vllm_mp.config import VllmConfig
from vllm_mp.core.collectives.group import ALONE, RankGroup
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.kernels import ops
from vllm_mp.kernels.ops import AttentionMetadata, StepColumns

logger = logging.getLogger(__name__)

_CAPTURE_TIME_S = 60.0
"""After this time no further shape is captured; steps of the missing shapes are padded to the next captured one."""
_FIRST_SIZES = {True: (1, 16), False: (64,)}
"""By `only_decodes`, the numbers of tokens of the graphs that a start captures, beside the largest.

Steps of up to 16 rows never run in a larger graph, because their products have a kernel of their own.
"""
_FAILED, _STOPS, _GOES_ON = range(3)
"""What a rank votes before a capture; the lowest vote counts."""

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


class StepShape(NamedTuple):
    """The tokens and rows that a graph computes."""

    num_tokens: int
    num_rows: int
    only_decodes: bool
    """Each row has a single token. Otherwise each row may be a decode or a prefill, which only the device knows."""

    def __str__(self) -> str:
        return f"{self.num_rows} rows" if self.only_decodes else f"{self.num_tokens} tokens with prefills"


def step_shapes(config: VllmConfig) -> list[StepShape]:
    """Return the shapes to capture graphs for, those of decodes first, the largest first of either kind.

    A prefill of more than `max_cudagraph_capture_size` tokens keeps the device busy for longer than its launches take
    the host. Padding to sizes 64 tokens apart costs less than the launches, because a product with few rows waits for
    the weights.
    """
    limits = config.scheduler_config
    decodes = [StepShape(size, size, True) for size in batch_sizes(config)]
    largest = min(limits.max_num_batched_tokens, config.model_config.max_cudagraph_capture_size)
    sizes = [size for size in itertools.chain([16, 32], range(64, largest, 64)) if size < largest]
    prefills = [StepShape(size, min(size, limits.max_num_seqs), False) for size in (*sizes, largest)]
    return [*reversed(decodes), *reversed(prefills)]


def batch_sizes(config: VllmConfig) -> list[int]:
    """Return the numbers of rows to capture graphs for, ascending.

    They double up to 8, because launches dominate a step of few rows. Then they grow by 8, from 256 on by 16 and from
    512 on by 32: padding stays below 8 rows or a sixteenth, and matrix units compute rows in multiples of 8 anyway.
    """
    largest = min(config.scheduler_config.max_num_seqs, config.model_config.max_cudagraph_capture_size)
    sizes = itertools.chain([1, 2, 4], range(8, 256, 8), range(256, 512, 16), range(512, largest, 32))
    return [size for size in sizes if size < largest] + [largest]


def first_shapes(shapes: Sequence[StepShape]) -> list[StepShape]:
    """Return those of `shapes` that the first steps need, in the order of `shapes`.

    The largest of either kind is among them: every step that has a graph fits into one of these, and graphs that are
    captured later reuse the memory of the largest.
    """
    chosen = set()
    for only_decodes, sizes in _FIRST_SIZES.items():
        of_kind = sorted(shape for shape in shapes if shape.only_decodes == only_decodes)
        chosen.update(of_kind[-1:])
        for size in sizes:
            chosen.update([shape for shape in of_kind if shape.num_tokens <= size][-1:])
    return [shape for shape in shapes if shape in chosen]


class StepGraphs:
    """Graphs of a model's steps, with the buffers that they read."""

    def __init__(
        self, forward: Forward, max_blocks: int, max_model_len: int, device: torch.device, has_adapters: bool = False
    ) -> None:
        """`max_blocks` is the width of the block table, `max_model_len` the longest context in tokens.

        With `has_adapters`, each shape has a graph for steps with LoRA adapters too.
        """
        self._forward = forward
        self._max_model_len = max_model_len
        self._device = device
        self._max_blocks = max_blocks
        self._has_adapters = has_adapters
        self._replays: dict[StepShape, Callable[[], Tensor]] = {}
        self._adapter_replays: dict[StepShape, Callable[[], Tensor]] = {}
        """The same for steps with adapters; {} without `has_adapters`."""
        self._ascending: dict[bool, list[StepShape]] = {True: [], False: []}
        """The captured shapes, and those to be captured late, by `only_decodes`, ascending."""
        self.late: list[StepShape] = []
        """The shapes that are still to be captured by `capture_late`."""
        self.missing: StepShape | None = None
        """The shape of `late` in which the latest step of `shape_of` would have been padded less."""

    @property
    def num_graphs(self) -> int:
        return len(self._replays) + len(self._adapter_replays)

    def capture(
        self,
        shapes: Sequence[StepShape],
        capture: Capture,
        beat: Callable[[], None],
        group: RankGroup = ALONE,
        late: Sequence[StepShape] = (),
    ) -> None:
        """Capture graphs for `shapes`, as many as the time allows, in their order, as later ones reuse memory.

        The shapes `late` are left to `capture_late`; they must be no larger than the largest of `shapes`.

        All ranks of `group` must call it together; they have graphs for the same shapes afterwards. Writes to the
        padding block only. `beat` is called before each capture. If steps with prefills cannot be captured, only those
        of decodes are. Raises CaptureError if these cannot be captured either, after which no graph may be used, and
        DeviceError if the device has failed.
        """
        self._allocate(max(shape.num_tokens for shape in shapes), max(shape.num_rows for shape in shapes))
        self.late, self.missing = list(late), None
        ops.copy_step(self._buffers, self._buffers, 0)  # compiles it before the first step
        self._replays.clear()
        self._adapter_replays.clear()
        deadline = time.monotonic() + _CAPTURE_TIME_S
        for only_decodes in (True, False):
            of_kind = [shape for shape in shapes if shape.only_decodes == only_decodes]
            try:
                self._capture_all(of_kind, capture, beat, group, deadline)
            except CaptureError as error:
                if only_decodes:
                    raise
                logger.warning("steps with prefills are not captured: %s", error)
                for shape in of_kind:
                    self._replays.pop(shape, None)
                    self._adapter_replays.pop(shape, None)
                self.late = [shape for shape in self.late if shape.only_decodes]
            of_kind += [shape for shape in self.late if shape.only_decodes == only_decodes]
            self._ascending[only_decodes] = sorted(s for s in of_kind if s in self._replays or s in self.late)

    def capture_late(self, shape: StepShape, capture: Capture) -> None:
        """Capture the graph of `shape`, one of `late`, while no step is pending; `capture` must be that of the start.

        Writes to the padding block only. Raises CaptureError, and DeviceError if the device has failed.
        """
        try:
            self._add(shape, capture)
        except DeviceError:
            raise
        except Exception as error:
            raise CaptureError(f"steps of {shape}: {error}") from error
        self.late.remove(shape)
        self.missing = None

    def give_up_late(self) -> None:
        """Capture no more shapes; steps run in those that are captured."""
        self.late, self.missing = [], None
        for only_decodes, shapes in self._ascending.items():
            self._ascending[only_decodes] = [shape for shape in shapes if shape in self._replays]

    def _add(self, shape: StepShape, capture: Capture) -> None:
        """Capture the graphs of `shape`, whose computation before the capture gets a step without rows."""
        for column in self._buffers:
            if column is not None:
                column.zero_()  # the latest step left the cells of live requests in them
        if self._has_adapters:
            self._adapter_replays[shape] = capture(self._computation(shape, adapters=True))
        self._replays[shape] = capture(self._computation(shape))

    def _allocate(self, num_tokens: int, num_rows: int) -> None:
        def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        self._buffers = StepColumns(
            input_ids=buffer(num_tokens, dtype=torch.int64),
            positions=buffer(num_tokens, dtype=torch.int64),
            cell_mapping=buffer(num_tokens, dtype=torch.int64),
            query_start=buffer(num_rows + 1, dtype=torch.int32),
            seq_lens=buffer(num_rows, dtype=torch.int32),
            block_table=buffer(num_rows, self._max_blocks, dtype=torch.int32),
            adapter_slots=buffer(num_tokens, dtype=torch.int32) if self._has_adapters else None,
            row_counts=buffer(2, dtype=torch.int32),
        )

    def _capture_all(
        self,
        shapes: Sequence[StepShape],
        capture: Capture,
        beat: Callable[[], None],
        group: RankGroup,
        deadline: float,
    ) -> None:
        """Capture `shapes`, which are of one kind, until the deadline, but always the first of decodes.

        The captured computation may wait for other ranks, so that all must capture the same shapes in the same order.
        Raises CaptureError.
        """
        for shape in shapes:
            beat()
            goes_on = time.monotonic() <= deadline or (shape.only_decodes and shape == shapes[0])
            vote = group.minimum(_GOES_ON if goes_on else _STOPS)
            if vote == _FAILED:
                raise CaptureError("another rank cannot capture them")
            if vote == _STOPS:
                logger.warning(
                    "no graphs for steps of %s or fewer: capturing the larger sizes took more than %.0f s; these "
                    "steps are padded to a captured size, or launched without a graph",
                    shape,
                    _CAPTURE_TIME_S,
                )
                return
            try:
                self._add(shape, capture)
            except DeviceError:
                raise
            except Exception as error:
                group.minimum(_FAILED)
                raise CaptureError(f"steps of {shape}: {error}") from error
        if group.minimum(_GOES_ON) == _FAILED:
            raise CaptureError("another rank cannot capture them")

    def shape_of(self, step: ScheduledStep) -> StepShape | None:
        """Return the smallest captured shape that can compute `step`; None if there is none.

        Sets `missing`.
        """
        num_rows, num_tokens = len(step.rows), int(step.counts.sum())
        kinds = (True, False) if step.num_decodes == num_rows else (False,)
        self.missing = None
        for only_decodes in kinds:
            for shape in self._ascending[only_decodes]:
                if num_tokens <= shape.num_tokens and num_rows <= shape.num_rows:
                    if shape in self._replays:
                        return shape
                    self.missing = self.missing or shape
        return None

    def run(
        self,
        shape: StepShape,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        latest: Tensor | None = None,
    ) -> Tensor | None:
        """Return the hidden states [num_tokens, hidden_size] of a step of `shape_of`, valid until the next run.

        `latest` as for `ops.copy_step`. Return None if the block table has more columns than the graphs read.
        """
        if metadata.block_table.shape[1] > self._max_blocks:
            return None
        step = StepColumns(
            input_ids,
            positions,
            metadata.cell_mapping,
            metadata.query_start,
            metadata.seq_lens,
            metadata.block_table,
            metadata.adapter_slots,
        )
        ops.copy_step(step, self._buffers_of(shape), metadata.num_decodes, latest)
        replays = self._replays if metadata.adapter_slots is None else self._adapter_replays
        return replays[shape]()[: len(input_ids)]

    def _buffers_of(self, shape: StepShape) -> StepColumns:
        """Return the parts of the buffers that the graph of `shape` reads."""
        columns, num_tokens, num_rows = self._buffers, shape.num_tokens, shape.num_rows
        return StepColumns(
            columns.input_ids[:num_tokens],
            columns.positions[:num_tokens],
            columns.cell_mapping[:num_tokens],
            columns.query_start[: num_rows + 1],
            columns.seq_lens[:num_rows],
            columns.block_table[:num_rows],
            None if columns.adapter_slots is None else columns.adapter_slots[:num_tokens],
            columns.row_counts,
        )

    def _computation(self, shape: StepShape, *, adapters: bool = False) -> Callable[[], Tensor]:
        """Return the computation of the model on the buffers of `shape`."""
        columns = self._buffers_of(shape)
        metadata = AttentionMetadata(
            query_start=columns.query_start,
            seq_lens=columns.seq_lens,
            block_table=columns.block_table,
            cell_mapping=columns.cell_mapping,
            query_lens=_UnknownLengths(),
            host_seq_lens=_UnknownLengths(),
            num_decodes=shape.num_rows if shape.only_decodes else 0,
            max_seq_len=self._max_model_len,
            isolates=not shape.only_decodes,
            adapter_slots=columns.adapter_slots if adapters else None,
            row_counts=None if shape.only_decodes else columns.row_counts,
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
        stream.wait_stream(torch.cuda.current_stream(device))
        # If the capture fails, `torch.cuda.graph` leaves its stream the current one; this block restores the former.
        with torch.cuda.stream(stream):
            compute()  # a graph cannot hold the compilation of a kernel or a library's initialization
            with _waits_raise():
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


@contextlib.contextmanager
def _waits_raise() -> Iterator[None]:
    """Raise RuntimeError if the block makes the host wait for the device, as a capture would.

    The error must come before the capture: torch before 2.12 counts a capture that has failed as one that still runs,
    and then its allocator can no longer release memory.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _raise_if_failed(device: torch.device) -> None:
    """Raise DeviceError if `device` has failed, which is not the fault of the graph."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceError(str(error)) from error
