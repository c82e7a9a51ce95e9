"""Tokens that a grammar forces: they are known without being sampled, and computed together."""

import numpy as np
import numpy.typing as npt

from vllm_mp.core.scheduler.batch import Batch, Counts, Mask, Rows
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import PendingSteps


class ForcedTokens:
    """Appends forced tokens to rows of the batch.

    A forced token is one of the known tokens of its row as soon as it is appended. Clients get it with the token before
    it.

    All requests wait for the forced tokens that a step computes. So a step gets no more of them than fill it up to
    `num_cheap_tokens`, or lengthen a larger step by a sixteenth. Other tokens that are forced are sampled, like all
    tokens; rows take turns.
    """

    def __init__(self, batch: Batch, pending_steps: PendingSteps, num_cheap_tokens: int) -> None:
        self._batch = batch
        self._pending_steps = pending_steps
        self._num_cheap_tokens = num_cheap_tokens
        self._room = 0
        """How many forced tokens the next step may still get."""
        self._turn = 0

    def follow(
        self,
        rows: Rows,
        ends: Counts,
        tokens: npt.NDArray[np.int64],
        ended: set[int],
        known: dict[int, list[int]],
    ) -> tuple[Rows, Counts, npt.NDArray[np.int64]]:
        """Add to the new `tokens` [n] of `rows` [n], at the positions `ends` [n], what must follow them.

        Requests in the rows `ended` get nothing. `known` holds what `extend_awaited_rows` has appended, by row.
        """
        batch = self._batch
        is_constrained = batch.is_constrained[rows]
        if not is_constrained.any():
            return rows, ends, tokens
        added: list[tuple[int, int, int]] = []  # (row, position, token)
        in_pending_step = self._pending_steps.live_rows()
        for i in self._in_turn(is_constrained):
            row, start = int(rows[i]), int(ends[i]) + 1
            if row in ended:
                continue
            forced = known.get(row, [])
            if not forced and not in_pending_step[row]:
                forced = self._forced_tokens(batch.request(row), start, self._room)
                self._append(row, start, forced)
                self._room -= len(forced)
            added += [(row, start + j, token) for j, token in enumerate(forced)]
        if not added:
            return rows, ends, tokens
        more = np.array(added, np.int64).T
        return np.concatenate([rows, more[0]]), np.concatenate([ends, more[1]]), np.concatenate([tokens, more[2]])

    def extend_awaited_rows(self) -> None:
        """Append forced tokens to rows whose awaited token is forced too, and so is known before it is sampled."""
        batch = self._batch
        for row in self._in_turn(self._pending_steps.awaited_rows() & batch.is_constrained):
            start = int(batch.num_tokens[row]) - 1
            forced = self._forced_tokens(batch.request(row), start, self._room + 1)
            if len(forced) > 1:
                self._append(row, start, forced)
                self._room -= len(forced) - 1  # The first one was awaited anyway.
                self._pending_steps.oldest.forced[row] = forced[1:]

    def _in_turn(self, mask: Mask) -> list[int]:
        """Make room for the forced tokens of a step; return the positions that `mask` marks, the next one first."""
        num_running = len(self._batch.order)
        self._room = max(self._num_cheap_tokens - num_running, num_running // 16)
        self._turn += 1
        return np.roll(np.flatnonzero(mask), -self._turn).tolist()

    def _append(self, row: int, start: int, tokens: list[int]) -> None:
        """Let `tokens` be the last known tokens of `row`, from the position `start`."""
        batch = self._batch
        batch.token_ids[row, start : start + len(tokens)] = tokens
        batch.num_tokens[row] = max(int(batch.num_tokens[row]), start + len(tokens))
        batch.num_forced_tokens[row] = len(tokens)

    def _forced_tokens(self, request: Request, num_tokens: int, most: int) -> list[int]:
        """Return up to `most` tokens that must follow the first `num_tokens` of a running request and do not end it."""
        constrained, batch, row = request.constrained, self._batch, request.row
        if constrained is None or request.processed is not None or most <= 0:
            return []
        forced = constrained.forced(batch.token_ids[row, request.num_prompt_tokens : num_tokens])
        stops = {*(request.sampling.stop_token_ids or ()), *batch.eos_token_ids.tolist()}
        count = next((i for i, token in enumerate(forced) if token in stops), len(forced))
        # The last token that fits is sampled, so that the request ends where every request does.
        return forced[: max(0, min(count, most, int(batch.max_total_tokens[row]) - 1 - num_tokens))]
