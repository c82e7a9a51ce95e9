"""Tokens that a grammar forces: they are known without being sampled, and computed together."""

import numpy as np
import numpy.typing as npt

from vllm_mp.core.scheduler.batch import Batch, Counts, Rows
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import PendingSteps


class ForcedTokens:
    """Appends forced tokens to rows of the batch.

    A forced token is one of the known tokens of its row as soon as it is appended. Clients get it with the token before
    it.
    """

    def __init__(self, batch: Batch, pending_steps: PendingSteps) -> None:
        self._batch = batch
        self._pending_steps = pending_steps

    def follow(
        self,
        rows: Rows,
        ends: Counts,
        tokens: npt.NDArray[np.int64],
        ended: set[int],
        known: dict[int, list[int]],
    ) -> tuple[Rows, Counts, npt.NDArray[np.int64]]:
        """Add to the new `tokens` [n] of `rows` [n], at the places `ends` [n], what must follow them.

        Requests in the rows `ended` get nothing. `known` holds what `extend_awaited_rows` has appended, by row.
        """
        batch = self._batch
        added: list[tuple[int, int, int]] = []  # (row, place, token)
        in_pending_step = self._pending_steps.live_rows()
        for i in np.flatnonzero(batch.is_constrained[rows]).tolist():
            row, start = int(rows[i]), int(ends[i]) + 1
            if row in ended:
                continue
            forced = known.get(row, [])
            if not in_pending_step[row]:
                forced = self._forced_tokens(batch.request(row), start)
                self._append(row, start, forced)
            added += [(row, start + j, token) for j, token in enumerate(forced)]
        if not added:
            return rows, ends, tokens
        more = np.array(added, np.int64).T
        return np.concatenate([rows, more[0]]), np.concatenate([ends, more[1]]), np.concatenate([tokens, more[2]])

    def extend_awaited_rows(self) -> None:
        """Append forced tokens to rows whose awaited token is forced too, and so is known before it is sampled."""
        batch = self._batch
        for row in np.flatnonzero(self._pending_steps.awaited_rows() & batch.is_constrained).tolist():
            start = int(batch.num_tokens[row]) - 1
            forced = self._forced_tokens(batch.request(row), start)
            if len(forced) > 1:
                self._append(row, start, forced)
                self._pending_steps.oldest.forced[row] = forced[1:]

    def _append(self, row: int, start: int, tokens: list[int]) -> None:
        """Let `tokens` be the last known tokens of `row`, from the place `start`."""
        batch = self._batch
        batch.token_ids[row, start : start + len(tokens)] = tokens
        batch.num_tokens[row] = max(int(batch.num_tokens[row]), start + len(tokens))
        batch.num_forced_tokens[row] = len(tokens)

    def _forced_tokens(self, request: Request, num_tokens: int) -> list[int]:
        """Return what must follow the first `num_tokens` tokens of a running request, and does not end it."""
        constrained, batch, row = request.constrained, self._batch, request.row
        if constrained is None or request.processed is not None:
            return []
        forced = constrained.forced(batch.token_ids[row, request.num_prompt_tokens : num_tokens].tolist())
        stops = {*(request.sampling.stop_token_ids or ()), *batch.eos_token_ids.tolist()}
        count = next((i for i, token in enumerate(forced) if token in stops), len(forced))
        # The last token that fits is sampled, so that the request ends where every request does.
        return forced[: max(0, min(count, int(batch.max_total_tokens[row]) - 1 - num_tokens))]
