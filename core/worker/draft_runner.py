"""The draft model: it answers, for many rows at a time, what the model may answer next.

It draws with the random numbers with which the model will draw, so that both choose the same token where they give
about the same probabilities.

Its KV cache has the blocks of the model's cache: of the same numbers, for the same tokens. It is filled later: a row's
tokens are computed when the row is to have drafts, a bounded number of them in a step. What a block holds is known by
the hash of its tokens, so that later requests with the same beginning find it here too. The cache is private to this
process: after a death it is empty, and filled again.

Nothing here changes an answer. If the cache is wrong, drafts are rejected.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from vllm_mp.config import VllmConfig
from vllm_mp.core.collectives.group import ALONE
from vllm_mp.core.lora.cached_adapter import NO_SLOT
from vllm_mp.core.scheduler.batch import Batch, Counts, Rows
from vllm_mp.core.scheduler.drafting import MAX_PROPOSALS
from vllm_mp.core.scheduler.step import ScheduledStep
from vllm_mp.core.worker.memory.loaded_model import LoadedModel
from vllm_mp.core.worker.memory.model_memory import ModelMemory
from vllm_mp.core.worker.sampling.host_copies import all_to_device, to_device
from vllm_mp.core.worker.sampling.sampler import Sampler
from vllm_mp.core.worker.step_inputs import step_inputs
from vllm_mp.kernels import ops

logger = logging.getLogger(__name__)

_MAX_LATE_TOKENS: Final = 256
"""Number of tokens in a step that are computed for rows of which many are missing; all other rows wait for them."""


@dataclass(slots=True)
class _DraftRows:
    """The columns that a step of the draft model reads; a `StepRows`."""

    token_ids: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    num_computed_tokens: Counts
    adapter_slot: npt.NDArray[np.int32]
    second_text_at: npt.NDArray[np.int64]
    rope_positions: npt.NDArray[np.int32] | None = None


class DraftRunner:
    """Runs the draft model, and knows what its KV cache holds; it is a `vllm_mp.core.scheduler.drafting.DraftModel`."""

    def __init__(
        self,
        config: VllmConfig,
        attention: str,
        device: torch.device,
        dtype: torch.dtype,
        progress: Callable[[float], None],
        beat: Callable[[], None],
        loaded: LoadedModel | None,
    ) -> None:
        """Load the model; the cache is allocated by `memory.allocate_cache`.

        `attention` is the name of the attention backend that the options ask for. `loaded` is the model if it was
        loaded before; the other arguments are those of `ModelRunner`. Raises ValueError for weights that are missing or
        do not fit.
        """
        speculation, max_num_seqs = config.speculative_config, config.scheduler_config.max_num_seqs
        assert speculation is not None
        assert speculation.draft_model_config is not None
        model = msgspec.structs.replace(speculation.draft_model_config, dtype=config.model_config.dtype)
        own = msgspec.structs.replace(
            config,
            model_config=model,
            attention_config=msgspec.structs.replace(config.attention_config, backend=attention),
            lora_config=None,
            speculative_config=None,
        )
        self.max_model_len: int = model.max_model_len
        self.memory = ModelMemory(own, device, dtype, lambda _: progress(1.0), beat, None, ALONE, (0, 1), False, loaded)
        logger.info("%s drafts tokens, as many as pay", model.model)
        self._device = device
        self._block_size = config.cache_config.block_size
        self._max_drafts = speculation.num_speculative_tokens
        self._tenancy = np.full(max_num_seqs, -1, np.int64)
        """The `Batch.tenancy` of each row for which the columns below hold."""
        self._num_computed = np.zeros(max_num_seqs, np.int64)
        """Number of known tokens of each row that are in the cache."""
        self._num_marked = np.zeros(max_num_seqs, np.int64)
        """Number of blocks of each row, from the first, whose hashes are in `_contents`."""
        self._drafted: list[list[int]] = [[] for _ in range(max_num_seqs)]
        """The drafts of each row that are in the cache behind the known tokens."""
        self._no_adapter = np.full(max_num_seqs, NO_SLOT, np.int32)
        self._contents: dict[int, bytes] = {}
        """The hash of the tokens of each full block, and of all before them, by the number of the block."""

    def forget(self) -> None:
        """Note that the cache is empty."""
        self._tenancy[:] = -1
        self._contents.clear()

    @torch.inference_mode()
    def compile_steps(self) -> None:
        """Compute the largest step, and steps of all kinds, once on a cache of its own.

        So no request waits for compilers of kernels, and torch records the peak of memory, for which the KV cache
        leaves room (`cache_blocks`).
        """
        size = self._block_size
        num_tokens = min(_MAX_LATE_TOKENS, self.max_model_len)
        num_blocks = -(-num_tokens // size)
        num_rows = min(MAX_PROPOSALS, len(self._tenancy))
        batch = Batch(num_rows, num_tokens, size, [])
        batch.block_table[0] = np.arange(1, num_blocks + 1)
        self.memory.allocate_cache(num_blocks + 1)
        rows, positions = np.arange(num_rows), np.zeros(num_rows, np.int64)
        largest = np.full(num_rows, min(self._max_drafts + 1, num_tokens))
        largest[0] = num_tokens
        for temperature in (0.0, 1.0):
            batch.sampling["temperature"] = temperature
            self._compute(batch, rows, largest, positions)
            for count in (*ops.PRODUCT_SIZES, num_tokens):
                self._compute(batch, rows[:1], np.array([min(count, num_tokens)]), positions)
            for splits in self.memory.attention.decode_splits:
                # The context bounds the number of parts from below.
                self._compute(batch, rows[:1], np.array([1]), positions, decode_splits=splits, max_seq_len=1)
        self.memory.kv_caches = []
        self.forget()

    @torch.inference_mode()
    def propose(self, batch: Batch, rows: Rows, takes: Callable[[int, int, float], bool]) -> bool:
        """See `vllm_mp.core.scheduler.drafting.DraftModel.propose`."""
        num_known = batch.num_tokens[rows]
        for row in rows.tolist():
            self._settle(batch, row)
        missing = num_known - self._num_computed[rows]
        counts, is_late = missing.copy(), missing > self._max_drafts + 1
        budget = _MAX_LATE_TOKENS
        for index in np.flatnonzero(is_late).tolist():
            counts[index] = min(int(missing[index]), budget)
            budget -= int(counts[index])
        computed = np.flatnonzero(counts > 0)
        positions = self._num_computed.copy()
        found = self._compute(batch, rows[computed], counts[computed], positions)
        self._num_computed[rows] += counts
        for row in rows[computed].tolist():
            self._mark(batch, row)
        is_ready = counts == missing
        pending = [(index, *pair) for index, pair in zip(computed.tolist(), found, strict=True) if is_ready[index]]
        positions[rows] = num_known
        while active := [(index, token) for index, token, chance in pending if takes(index, token, chance)]:
            indices = np.array([index for index, _ in active], np.int64)
            for index, token in active:
                self._drafted[int(rows[index])].append(token)
            found = self._compute(batch, rows[indices], np.ones(len(active), np.int64), positions)
            pending = [(index, *pair) for index, pair in zip(indices.tolist(), found, strict=True)]
            positions[rows[indices]] += 1
        return bool(is_late.any())

    def _settle(self, batch: Batch, row: int) -> None:
        """Bring what is known of the cache of `row` up to date: drafts that were accepted are known tokens now."""
        num_known = int(batch.num_tokens[row])
        if self._tenancy[row] != batch.tenancy[row]:
            self._tenancy[row] = batch.tenancy[row]
            self._num_marked[row] = self._num_found(batch, row)
            computed = int(self._num_marked[row]) * self._block_size
        else:
            computed = int(self._num_computed[row])
            for token in self._drafted[row]:
                if computed >= num_known or int(batch.token_ids[row, computed]) != token:
                    break
                computed += 1
        self._drafted[row] = []
        self._num_computed[row] = min(computed, num_known - 1)  # the last token is computed for what follows it
        self._mark(batch, row)

    def _num_found(self, batch: Batch, row: int) -> int:
        """Return the number of blocks of `row`, from the first, that this cache has filled for an earlier request."""
        hashes = batch.request(row).hashes[1:]
        blocks = batch.block_table[row, : len(hashes)].tolist()
        pairs = zip(blocks, hashes, strict=False)
        return next(
            (i for i, (block, of_tokens) in enumerate(pairs) if self._contents.get(block) != of_tokens), len(blocks)
        )

    def _mark(self, batch: Batch, row: int) -> None:
        """Note the hashes of the blocks of `row` that are full, as far as the scheduler has computed them."""
        hashes = batch.request(row).hashes
        first = int(self._num_marked[row])
        last = max(first, min(int(self._num_computed[row]) // self._block_size, len(hashes) - 1))
        for block, of_tokens in zip(
            batch.block_table[row, first:last].tolist(), hashes[first + 1 : last + 1], strict=True
        ):
            self._contents[block] = of_tokens
        self._num_marked[row] = last

    def _compute(
        self, batch: Batch, rows: Rows, counts: Counts, positions: Counts, **changes: Any
    ) -> list[tuple[int, float]]:
        """Compute `counts` [n] tokens of `rows` [n]; return the token that follows the last of each, by the model.

        The first token of each row is at its place in `positions` [max_num_seqs]. A token comes with its probability.
        `changes` replace fields of what attention reads.
        """
        order = np.argsort(counts != 1, kind="stable")  # rows that compute a single token come first
        rows, counts = rows[order], counts[order]
        size = self._block_size
        for row, first, count in zip(rows.tolist(), positions[rows].tolist(), counts.tolist(), strict=True):
            begin = first // size
            for block in batch.block_table[row, begin : -(-(first + count) // size)].tolist():
                self._contents.pop(block, None)
        is_sampled = np.ones(len(rows), np.bool_)
        step = ScheduledStep(rows, counts, int((counts == 1).sum()), is_sampled, ~is_sampled)
        view = _DraftRows(batch.token_ids, batch.block_table, positions, self._no_adapter, batch.second_text_at)
        input_ids, of_tokens, metadata = step_inputs(
            step, view, size, lambda arrays: all_to_device(arrays, self._device)
        )
        if changes:
            metadata = metadata._replace(**changes)
        hidden = self.memory.model(input_ids, of_tokens, self.memory.kv_caches, metadata)
        logits = self.memory.model.compute_logits(hidden[to_device(step.chosen_indices(), self._device)]).float()
        log_chances = logits.log_softmax(dim=-1)  # before the draw, which may overwrite the logits
        tokens = Sampler(batch, self._device).draw(logits, rows, positions[rows] + counts).clamp(min=0)
        chances = torch.nan_to_num(log_chances.gather(1, tokens[:, None])[:, 0].exp(), 0.0, 0.0, 0.0)
        answers = list(zip(tokens.tolist(), chances.tolist(), strict=True))
        return [answers[at] for at in np.argsort(order).tolist()]
