"""Which rows of a step have drafts, and what comes of them.

Drafts lie in their row of the batch behind the known tokens, and count as nothing else: not as known tokens, and not as
computed ones while their step is pending. Processing the step makes the accepted ones known and computed. The cells of
the others are written again by the next steps; no block is registered or sealed with them.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vllm_mp.config import SpeculativeConfig
from vllm_mp.core.outside_work import OutsideWork
from vllm_mp.core.scheduler.batch import NO_ROWS, Batch, Counts, Rows
from vllm_mp.core.scheduler.cache.kv_cache_manager import KVCacheManager
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.step import ModelOutput, PendingStep
from vllm_mp.core.speculation.draft_pace import WEIGHT_OF_ALL, WEIGHT_OF_MODEL, DraftPace, RequestPace, kind_of
from vllm_mp.core.speculation.drafts import Drafts, spread
from vllm_mp.core.speculation.methods import make_proposer
from vllm_mp.core.speculation.request_drafts import RequestDrafts
from vllm_mp.core_link.core_status import OutsideTask

MAX_PROPOSALS = 64
"""Number of rows that may have drafts in a step; with more rows drafts do not pay, and all wait for the proposals."""


class DraftedRows(NamedTuple):
    """Rows with drafts, each of which decodes in the next step."""

    rows: Rows
    """[num_drafted]"""
    drafts: Drafts
    """Of these rows."""


NO_DRAFTED_ROWS = DraftedRows(NO_ROWS, Drafts(np.zeros(0, np.int64), np.zeros(0, np.int64)))


class DraftModel(Protocol):
    """A smaller model that proposes tokens for many rows at a time. It has the blocks of the rows, in its own cache."""

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a row for which it can propose."""
        ...

    def propose(self, batch: Batch, rows: Rows, takes: Callable[[int, int, float], bool]) -> bool:
        """Compute what the model lacks of `rows` [n], and then one token after another of each of them.

        `takes(index, token, probability)` gets each token, with the index of its row in `rows`. It returns whether the
        row goes on; if so, it has written the token behind those of the row, and the row has blocks for it. A row of
        which the model lacks many tokens gets a part of them computed, and proposes in a later step.

        Return whether there was such a row.
        """
        ...


class Candidate:
    """A row for which a draft model proposes tokens."""

    __slots__ = ("chance", "drafts", "known", "most", "request", "row")

    def __init__(self, row: int, request: Request, known: RequestDrafts, most: int) -> None:
        self.row = row
        self.request = request
        self.known = known
        self.most = most
        """Maximum number of its drafts."""
        self.drafts: list[int] = []
        self.chance = 1.0
        """The chance that all drafts are accepted."""


class Accepted(NamedTuple):
    """The tokens that a step yields before the last of each row: the drafts that were accepted, of live rows."""

    rows: Rows
    """[num_accepted]"""
    ends: Counts
    """[num_accepted] number of tokens before each token, which is its index in the row."""
    tokens: npt.NDArray[np.int64]
    """[num_accepted]"""


class DraftCounters:
    """What was drafted since the core has started."""

    def __init__(self, most: int) -> None:
        """`most` is the maximum number of drafts of a row."""
        self.num_drafts = 0
        """Rows of steps that had drafts."""
        self.num_draft_tokens = 0
        self.accepted_per_position = [0] * most
        """Number of accepted drafts that were the first, second, ... of their row."""

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)

    def figures(self) -> dict[str, Any]:
        """Return the counters by their names in the status of a core."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(self.accepted_per_position),
        }


class Drafting:
    """Proposes drafts for the rows of steps, and takes in which of them were accepted."""

    def __init__(
        self,
        config: SpeculativeConfig,
        batch: Batch,
        cache: KVCacheManager,
        model: DraftModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`model` is that of the method "draft_model". `clock` returns seconds."""
        self.counters = DraftCounters(config.num_speculative_tokens)
        self.max_drafts = config.num_speculative_tokens
        """Maximum number of drafts of a row."""
        self._max_step_drafts = config.max_step_drafts
        self._batch = batch
        self._cache = cache
        self._model = model
        self._proposer = None if model is not None else make_proposer(config)
        """None if a draft model proposes."""
        self._clock = clock
        self._model_seconds: float | None = 0.0
        """Time that the draft model took for the latest step; None: it also computed tokens of long prompts."""
        self._pace = DraftPace(WEIGHT_OF_ALL if model is None else WEIGHT_OF_MODEL)
        self._stops = frozenset(batch.eos_token_ids.tolist())
        self.outside: OutsideWork | None = None
        """Where the requests are published for which the draft model computes; None: nowhere."""
        self._turn = 0

    def choose(self, decodes: Rows, budget: int) -> tuple[Rows, DraftedRows]:
        """Return those of `decodes` [n] that get no drafts, and those that do, with up to `budget` drafts in all.

        The last token of each of `decodes` is known.
        """
        batch = self._batch
        may_draft = batch.may_draft[decodes] & (batch.num_tokens[decodes] > batch.num_prompt_tokens[decodes])
        candidates = np.flatnonzero(may_draft)
        if not len(candidates):
            return decodes, NO_DRAFTED_ROWS
        least_chance, budget = self._pace.least_chance(len(decodes)), min(budget, self._max_step_drafts)
        if len(candidates) > MAX_PROPOSALS:
            self._turn += MAX_PROPOSALS
            candidates = np.roll(candidates, -self._turn)[:MAX_PROPOSALS]
        if self._model is not None:
            return self._as_drafted(decodes, self._ask(self._model, decodes, candidates, budget, least_chance))
        found: dict[int, list[int]] = {}
        for i in candidates.tolist():
            drafts = self._drafts_of(int(decodes[i]), min(self.max_drafts, budget), least_chance)
            if drafts:
                found[i] = drafts
                budget -= len(drafts)
        return self._as_drafted(decodes, found)

    def _as_drafted(self, decodes: Rows, found: dict[int, list[int]]) -> tuple[Rows, DraftedRows]:
        """Return what `choose` does; `found` are the drafts by the index of their row in `decodes` [n]."""
        if not found:
            return decodes, NO_DRAFTED_ROWS
        indices = list(found)
        counts = np.array([len(drafts) for drafts in found.values()], np.int64)
        tokens = np.array([token for drafts in found.values() for token in drafts], np.int64)
        return np.delete(decodes, indices), DraftedRows(decodes[indices], Drafts(counts, tokens))

    def accept(self, pending: PendingStep, output: ModelOutput) -> tuple[PendingStep, ModelOutput, Accepted]:
        """Make the accepted drafts of a step known and computed tokens of the rows that are live.

        Return the step as if it had computed nothing but these drafts, its output with one token for each row, and the
        accepted drafts.
        """
        batch, step = self._batch, pending.step
        assert step.drafts is not None
        accepted = step.num_accepted(output.tokens)
        lengths = step.num_choices
        last = np.cumsum(lengths) - lengths + accepted
        self._count(pending, accepted)
        # Rows that are not sampled have no drafts.
        counts, ends = step.counts - step.drafts.counts, pending.ends.copy()
        counts[step.samples] += accepted
        ends[step.samples] += accepted
        kept = np.where(pending.live[step.samples], accepted, 0)
        rows, offsets = step.rows[step.samples], spread(kept)
        batch.num_computed_tokens[rows] += kept
        batch.num_tokens[rows] += kept
        firsts, begins = (ends[step.samples] - accepted).repeat(kept), (last - accepted).repeat(kept)
        yielded = Accepted(rows.repeat(kept), firsts + offsets, output.tokens[begins + offsets])
        pending = pending._replace(step=step._replace(counts=counts, drafts=None), ends=ends)
        return pending, output._replace(tokens=output.tokens[last]), yielded

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Note how long a step without tokens of prompts has taken, of `num_rows` rows with `num_drafts` drafts."""
        if num_drafts:
            if self._model_seconds is None:
                return
            seconds += self._model_seconds
        self._pace.observe(num_rows, num_drafts, seconds)

    def note_end(self, request: Request) -> None:
        """Take in the answer of a request that ends and has no row any more."""
        if request.drafts is not None and self._proposer is not None:
            self._proposer.note_answer(request.draft_pool, request.tokens[request.num_prompt_tokens :])

    def _drafts_of(self, row: int, most: int, least_chance: float) -> list[int]:
        """Return the drafts of `row`, after they were written behind its known tokens and got blocks."""
        batch = self._batch
        candidate = self._candidate(row, most)
        if candidate is None or candidate.known.source is None:
            return []
        request, pace = candidate.request, candidate.known.pace
        tokens = batch.token_ids[row, : batch.num_tokens[row]]
        count = len(tokens)
        proposal = candidate.known.source.propose(tokens, candidate.most)
        if not proposal.tokens:
            self._pace.note_refusal(pace, least_chance)
            return []
        worthwhile = self._pace.num_worthwhile(pace, proposal.match, len(proposal.tokens), least_chance)
        drafts = self._allowed(request, tokens, proposal.tokens[:worthwhile]) if worthwhile else []
        drafts = drafts[: self._num_with_blocks(row, count, len(drafts))]
        if drafts:
            batch.token_ids[row, count : count + len(drafts)] = drafts
            pace.match = proposal.match
        else:
            self._expect(pace, proposal.tokens[0], proposal.match, count)
            self._pace.note_refusal(pace, least_chance)
        return drafts

    def _candidate(self, row: int, most: int) -> Candidate | None:
        """Return `row` with up to `most` drafts to propose; None if none are to be proposed for it in this step."""
        batch = self._batch
        request, count = batch.request(row), int(batch.num_tokens[row])
        # The token after the last draft still fits.
        most = min(most, request.max_drafts, int(batch.max_total_tokens[row]) - count - 1)
        if most <= 0:
            return None
        known = request.drafts
        if known is None:
            source = None if self._proposer is None else self._proposer.source(request.draft_pool)
            known = request.drafts = RequestDrafts(source)
        pace = known.pace
        if pace.expected >= 0 and pace.position < count:
            is_accepted = int(batch.token_ids[row, pace.position]) == pace.expected
            self._pace.note_draft(pace, pace.match, is_accepted)
        pace.expected = -1
        return None if self._pace.is_resting(pace) else Candidate(row, request, known, most)

    def _ask(
        self, model: DraftModel, decodes: Rows, indices: Rows, budget: int, least_chance: float
    ) -> dict[int, list[int]]:
        """Return what `model` drafts for the rows at `indices` [m] of `decodes` [n], by these indices.

        The drafts are up to `budget` in all; they are written behind the known tokens of their rows, and have blocks.
        """
        self._model_seconds = 0.0
        if least_chance >= 1.0:
            self._pace.note_too_dear()
            return {}
        batch, started = self._batch, self._clock()
        asked: dict[int, Candidate] = {}
        for i in indices.tolist():
            row = int(decodes[i])
            count = int(batch.num_tokens[row])
            candidate = self._candidate(row, min(self.max_drafts, budget, model.max_model_len - count))
            if candidate is not None:
                candidate.most = self._num_with_blocks(row, count, candidate.most)
                if candidate.most:
                    candidate.known.pace.kinds = []
                    asked[i] = candidate
        if not asked:
            return {}
        candidates, num_left = list(asked.values()), budget

        def takes(index: int, token: int, probability: float) -> bool:
            nonlocal num_left
            candidate = candidates[index]
            if num_left and self._takes(candidate, token, kind_of(probability), least_chance):
                num_left -= 1
                # A run of the model that can bring no further draft is left out.
                best = candidate.chance * self._pace.chance_of(candidate.known.pace, kind_of(1.0))
                return len(candidate.drafts) < candidate.most and best >= least_chance
            return False

        rows = np.array([candidate.row for candidate in candidates], np.int64)
        work = None if self.outside is None else self.outside.begin(self._tasks(rows))
        is_behind = model.propose(batch, rows, takes)
        if self.outside is not None and work is not None:
            self.outside.end(work)  # not after an error, which ends the core: then the page names the requests
        self._model_seconds = None if is_behind else self._clock() - started
        return {i: candidate.drafts for i, candidate in asked.items() if candidate.drafts}

    def _tasks(self, rows: Rows) -> list[OutsideTask]:
        """Return the requests of `rows` [n] as the status page names them."""
        batch = self._batch
        num_output_tokens = batch.num_tokens[rows] - batch.num_prompt_tokens[rows]
        columns = batch.client[rows], batch.slot[rows], num_output_tokens
        return [OutsideTask(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]

    def _takes(self, candidate: Candidate, token: int, kind: int, least_chance: float) -> bool:
        """Return whether `token` becomes the next draft of a row; if so, write it behind the tokens of the row."""
        batch, row, pace = self._batch, candidate.row, candidate.known.pace
        count, chance = int(batch.num_tokens[row]), candidate.chance * self._pace.chance_of(pace, kind)
        drafts = [*candidate.drafts, token]
        if chance < least_chance:
            if not candidate.drafts:
                self._expect(pace, token, kind, count)
                self._pace.note_unused(pace, chance, least_chance)
            return False
        if len(self._allowed(candidate.request, batch.token_ids[row, :count], drafts)) < len(drafts):
            return False
        batch.token_ids[row, count + len(candidate.drafts)] = token
        candidate.drafts, candidate.chance = drafts, chance
        pace.kinds.append(kind)
        return True

    def _expect(self, pace: RequestPace, token: int, kind: int, position: int) -> None:
        """Note a token that was proposed for `position`; the row's token shows whether it would have been accepted."""
        pace.expected, pace.position, pace.match = token, position, kind

    def _allowed(self, request: Request, tokens: npt.NDArray[np.int32], drafts: list[int]) -> list[int]:
        """Return `drafts` up to the first that would end the request, or that its grammar forbids after `tokens`."""
        stops = self._stops.union(request.sampling.stop_token_ids or ())
        drafts = drafts[: next((i for i, token in enumerate(drafts) if token in stops), len(drafts))]
        if drafts and request.constrained is not None:
            output = tokens[request.num_prompt_tokens :]
            drafts = drafts[: request.constrained.num_allowed(output, drafts)]
        return drafts

    def _num_with_blocks(self, row: int, num_tokens: int, num_drafts: int) -> int:
        """Return for how many of `num_drafts` drafts `row` has blocks, after it got free ones that no other row needs.

        Each row may still get a block, so that no request is preempted for drafts.
        """
        if not num_drafts:
            return 0
        self._cache.extend(row, num_tokens + num_drafts, spare=len(self._batch.order))
        return min(num_drafts, int(self._batch.num_blocks[row]) * self._cache.block_size - num_tokens)

    def _count(self, pending: PendingStep, accepted: Counts) -> None:
        """Count the drafts of a step, of which `accepted` [num_sampled] were accepted."""
        step, batch, counters = pending.step, self._batch, self.counters
        assert step.drafts is not None
        drafted = step.drafts.counts[step.samples]
        columns = step.rows[step.samples], pending.live[step.samples], drafted, accepted
        for row, is_live, num_drafts, num_accepted in zip(*(column.tolist() for column in columns), strict=True):
            if not num_drafts or not is_live:
                continue
            counters.num_drafts += 1
            counters.num_draft_tokens += num_drafts
            for index in range(num_accepted):
                counters.accepted_per_position[index] += 1
            known = batch.request(row).drafts
            if known is not None and self._model is None:
                self._pace.note_drafts(known.pace, known.pace.match, num_drafts, num_accepted)
            elif known is not None:
                for index, kind in enumerate(known.pace.kinds[: num_accepted + 1]):
                    self._pace.note_draft(known.pace, kind, index < num_accepted)
