"""The policy: which requests run in the next step, and how its output changes them.

One token budget covers a whole step; there are no phases. A request in decode wants one token. A request in prefill
wants the rest of its prompt, and gets a chunk of the remaining budget. When the KV cache runs out of blocks, a running
request is preempted: it gives up its blocks, waits again, and is recomputed later.

Clients take turns (`FairTurns`): however many requests a client has, others do not wait for all of them. A request is
preempted at the cost of the client that has most blocks.

A step may be scheduled while another step is pending. The tokens that the pending step samples count as known tokens,
but only the device knows their values: nothing that depends on the values is decided before `update` has processed
them. If such a token ends its request, the next step already computes one extra token for it, which is discarded. When
the values decide how the next step samples, that step is launched, but samples only once the pending step is processed.

In a pipeline as many steps are under way as there are stages. A token cannot be computed before its value is known, so
a row is in one step at a time, except that the chunks of a prompt may follow one another. Rows that decode are shared
out among the steps, or all stages but one would wait.

Suspects of the death of an earlier core run isolated, in steps without other requests (`Isolation`).

Images are encoded between steps (`ImageTurns`); a request is admitted once those that it needs are.

The last output token of a request is computed by a decode, also when the tokens before it are computed again by a
prefill. So a successor repeats the step during which a core died. Only forced tokens and drafts (`Drafting`) are
computed together with the token before them.
"""

import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

import numpy as np

from vllm_mp.config import SchedulerConfig, SpeculativeConfig
from vllm_mp.core.images.image_store import StoredImage
from vllm_mp.core.lora.cached_adapter import CachedAdapter
from vllm_mp.core.scheduler.batch import NO_ROWS, Batch, Rows
from vllm_mp.core.scheduler.cache.kv_cache_manager import KVCacheManager
from vllm_mp.core.scheduler.drafting import NO_DRAFTED_ROWS, DraftedRows, Drafting, DraftModel
from vllm_mp.core.scheduler.endings import find_endings
from vllm_mp.core.scheduler.forced_tokens import ForcedTokens
from vllm_mp.core.scheduler.isolation import Isolation
from vllm_mp.core.scheduler.prefill_pace import PrefillPace
from vllm_mp.core.scheduler.request import NO_ROW, GroupKey, Request, RequestKey
from vllm_mp.core.scheduler.room import Room
from vllm_mp.core.scheduler.step import (
    ModelOutput,
    OutputHandle,
    PendingStep,
    PendingSteps,
    Prefills,
    RepeatedStep,
    ScheduledStep,
    StepUpdate,
)
from vllm_mp.core.scheduler.waiting.adapter_turns import AdapterTurns
from vllm_mp.core.scheduler.waiting.image_turns import BegunTile
from vllm_mp.core.scheduler.waiting.memory_quota import MemoryQuota
from vllm_mp.core.scheduler.waiting.waiting_queue import WaitingQueue
from vllm_mp.core.structured_output.compiler import NotCompiledError
from vllm_mp.core.structured_output.grammar import Grammar, GrammarError
from vllm_mp.requests.images import ImageDigest
from vllm_mp.wire import Finished

_READ_S: Final = 0.005
"""Time in each step for reading the beginning of a request from the prefix cache file, while other requests run."""
_READ_ALONE_S: Final = 0.05
"""The same while no request runs; messages are received in between."""


class Grammars(Protocol):
    """Where requests wait for their grammars."""

    def forget(self, key: RequestKey) -> None:
        """Note that a request has ended; no-op if it does not wait."""
        ...


class Scheduler:
    """Owns the live requests: the waiting queue, the rows of the batch and the queue of pending steps."""

    def __init__(
        self,
        config: SchedulerConfig,
        batch: Batch,
        cache: KVCacheManager,
        adapters: AdapterTurns | None = None,
        num_stages: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        speculation: SpeculativeConfig | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """`num_stages` is the number of stages of the pipeline that computes the steps. `clock` returns seconds.

        `speculation` says how tokens are drafted; None: none are. With it, no step may be scheduled for a row whose
        last token a pending step samples. `draft_model` is that of the method "draft_model".
        """
        self.config = config
        self.batch = batch
        self.cache = cache
        self.waiting = WaitingQueue(adapters)
        self.adapters = adapters
        self.pending_steps = PendingSteps(len(batch.requests))
        self.isolation = Isolation(batch, self.waiting.isolated)
        self.room = Room(batch, cache, self.waiting, self.pending_steps)
        self._num_stages = num_stages
        self.drafting = None if speculation is None else Drafting(speculation, batch, cache, draft_model, clock)
        """What gives drafts to rows; None: no tokens are drafted."""
        self._forced = ForcedTokens(batch, self.pending_steps, config.num_cheap_tokens)
        self._pace = PrefillPace(config.max_prefill_slowdown, clock)
        self._scheduled_at = self._updated_at = clock()
        """When the latest step was scheduled, and when the latest output was processed."""
        self.memory = MemoryQuota()
        self.grammars: Grammars | None = None
        """Where the requests wait whose constraints are being compiled; None: no request is constrained."""
        self.repeated: RepeatedStep | None = None
        """The step that was processed last, if the next step may be the same; None: the next step must be chosen."""
        self._requests: dict[RequestKey, Request] = {}
        self._num_arrivals = 0
        self.num_returning: int | None = None
        """Requests from before an inherited pause that lets them run, which clients have not sent to this core yet.

        None: no such pause is in force."""
        self._is_frozen = False
        """True: a pause has stopped all requests."""
        self._is_asleep = False

    @property
    def num_preemptions(self) -> int:
        return self.room.num_preemptions

    @property
    def num_running(self) -> int:
        return len(self.batch)

    @property
    def num_waiting(self) -> int:
        waiting = self.waiting
        return len(waiting) + waiting.num_held + waiting.num_parked + waiting.num_without_embeddings

    @property
    def num_active(self) -> int:
        """Number of live requests, without requests that are held back by a pause."""
        return len(self._requests) - self.waiting.num_held

    @property
    def has_work(self) -> bool:
        """Whether a request may run now; a parked request may not."""
        return not (self._is_frozen or self._is_asleep) and self.num_active > self.waiting.num_parked

    @property
    def has_parked(self) -> bool:
        """Whether requests that no pause or sleep holds back wait for their adapters or grammars."""
        return not (self._is_frozen or self._is_asleep) and self.waiting.num_parked > 0

    @property
    def is_paused(self) -> bool:
        return self.waiting.is_holding

    def is_live(self, client: int, slot: int) -> bool:
        return (client, slot) in self._requests

    def order_of(self, priority: int) -> tuple[int, int]:
        """Count an arrival and return its order; `priority` has an effect only with the policy "priority"."""
        self._num_arrivals += 1
        return (priority if self.config.policy == "priority" else 0, self._num_arrivals)

    def add(self, request: Request) -> None:
        """Let `request` wait; its (client, slot) must not be live, and its tokens must fit the context.

        Raises NoRoomError if there is no memory for it.
        """
        self.memory.check(request)
        self._requests[request.key] = request
        if self.adapters is not None:
            self.adapters.note_added(request)
        self.memory.take(request)
        precedes_pause = self.num_returning is not None and not request.after_pause
        if self.num_returning is not None and precedes_pause:
            self.num_returning = max(0, self.num_returning - 1)
        self.waiting.add(request, may_hold=not precedes_pause)

    def abort(self, client: int, slot: int) -> Finished | None:
        """End a running, waiting or held request and return its end; return None if it is not live."""
        request = self._requests.get((client, slot))
        if request is None:
            return None
        num_output_tokens = request.num_output_tokens
        if request.row != NO_ROW:
            is_awaited = self.pending_steps.awaited_rows()[request.row]
            num_output_tokens = int(self.batch.num_tokens[request.row]) - request.num_prompt_tokens - int(is_awaited)
        return self._end(request, Finished(slot, num_output_tokens, "abort"))

    def drop_client(self, client: int) -> None:
        """End every live request of a client that has left."""
        for slot in [slot for owner, slot in self._requests if owner == client]:
            self.abort(client, slot)
        self.waiting.forget_client(client)

    def abort_all(self) -> list[tuple[int, Finished]]:
        """End every live request; return (client, end) of each."""
        ends = [(client, self.abort(client, slot)) for client, slot in list(self._requests)]
        return [(client, end) for client, end in ends if end is not None]

    def drop_embeddings(self) -> list[tuple[Request, list[ImageDigest]]]:
        """Forget the embeddings of all images; no request may be running.

        End the requests whose images cannot be encoded again here, because their arrays are gone. Return each with the
        digests of these images.
        """
        ended = []
        for request in list(self._requests.values()):
            images = [] if request.images is None else request.images.images
            if missing := [image.digest for image in images if not image.drop_embeddings()]:
                self.abort(*request.key)
                ended.append((request, missing))
        return ended

    def fail_adapter(self, adapter: CachedAdapter, why: str) -> list[tuple[int, Finished]]:
        """End the requests whose adapter cannot be loaded, with an error; return (client, end) of each."""
        return self._fail([self._requests[key] for key in adapter.requests], why)

    def fail_image(self, image: StoredImage, why: str) -> list[tuple[int, Finished]]:
        """End the requests that wait for an image that cannot be encoded, as `fail_adapter` does.

        Those that have begun may be sent again: the image has been encoded before.
        """
        return self._fail(self.waiting.images.requests_with(image), why, interrupts_begun=True)

    def _fail(
        self, requests: Iterable[Request], why: str, *, interrupts_begun: bool = False
    ) -> list[tuple[int, Finished]]:
        """End `requests` with an error; `interrupts_begun`: those that have output may be sent again."""
        ends = []
        for request in requests:
            num_tokens = request.num_output_tokens
            may_be_sent_again = interrupts_begun and num_tokens > 0
            end = Finished(request.slot, num_tokens, "error", error=why, interrupted=may_be_sent_again)
            ends.append((request.client, self._end(request, end)))
        return ends

    def note_compiled(self, keys: Iterable[RequestKey], grammar: Grammar | GrammarError) -> list[tuple[int, Finished]]:
        """Let the requests run that wait for `grammar`, or end them if it could not be compiled.

        `keys` are those of live requests. Return (client, end) of each request that ends.
        """
        ends = []
        for request in [self._requests[key] for key in keys]:
            if isinstance(grammar, GrammarError):
                is_valid = isinstance(grammar, NotCompiledError)
                end = Finished(
                    request.slot,
                    request.num_output_tokens,
                    "error",
                    error=str(grammar),
                    invalid_constraint=not is_valid,
                    interrupted=is_valid,
                )
                ends.append((request.client, self._end(request, end)))
            else:
                assert request.constrained is not None
                request.constrained.begin(grammar)
                self.waiting.note_compiled(request)
        return ends

    def next_tile(self) -> BegunTile | None:
        """Return the tile of an image of which to encode the next slice; None if there is none now.

        When the tile is encoded, `waiting.note_encoded` must be called, and if it cannot be, `fail_image`.
        """
        return self.waiting.images.next() if self.has_work else None

    def pause(self, freeze: bool) -> None:
        """Hold back requests that arrive before `resume`; with `freeze`, also stop all requests that are live."""
        self.waiting.hold()
        self._is_frozen = freeze

    def resume(self) -> None:
        """Undo `pause`."""
        self._is_frozen = False
        self.waiting.release()

    def fall_asleep(self) -> None:
        """Stop scheduling until `wake_up`, even if paused, and drop all cached blocks.

        No step may be pending. Running requests are preempted.
        """
        self.preempt_all()
        self.cache.forget_prefixes(keeps_file=True)
        self._is_asleep = True

    def wake_up(self) -> None:
        """Undo `fall_asleep`."""
        self._is_asleep = False

    def preempt_all(self) -> None:
        """Preempt every running request; no step may be pending."""
        self.room.preempt_all()

    def schedule(self) -> ScheduledStep | None:
        """Choose the tokens of the next step, preempt if blocks run out, and admit requests as the budget allows.

        Return None if no request may run, or not before the pending step is processed. The caller must launch the step,
        then call `launched`, and `update` with its output.
        """
        self.assign_adapters()
        if not self.has_work:
            return None
        if (step := self._schedule_again()) is not None:
            return step
        if self.pending_steps and self.isolation.latest_is_isolated:
            return None  # A group is alone on the device, too.
        if not self.isolation.has_group():
            self.isolation.latest_is_isolated = False
            return self._schedule_normal_step()
        if self.pending_steps:
            return None
        has_turn = not self.isolation.latest_is_isolated
        step = None if has_turn else self._schedule_normal_step()
        self.isolation.latest_is_isolated = step is None
        step = step or self._schedule_isolated_step()
        if step is None and has_turn:  # the group waits, for example for its images
            step = self._schedule_normal_step()
            self.isolation.latest_is_isolated = step is None
        return step

    def _schedule_again(self) -> ScheduledStep | None:
        """Return the step that was processed last, if all its rows want one more token and no other request can run.

        If a row gets drafts, it is another step of the same rows. Give blocks to rows that need one, and register those
        that become full. Return None if the step must be chosen.
        """
        repeated = self.repeated
        if repeated is None or self.pending_steps:
            return None
        if len(self.waiting) or repeated.num_changes != self.batch.num_changes:
            self.repeated = None
            return None
        if repeated.num_quiet:
            repeated.num_quiet -= 1
            repeated.is_quiet = True
        else:
            self.room.give_blocks_to_growing_rows()
            if repeated.num_changes != self.batch.num_changes:  # a request was preempted
                self.repeated = None
                return None
            repeated.is_quiet = False
            repeated.num_quiet = self.cache.register_decodes(repeated.step.rows, NO_ROWS)
        decodes, drafted = self._choose_drafts(repeated.step.rows)
        if len(drafted.rows):
            self.repeated = None
            return self._step_of(decodes, Prefills(budget=0, shares=1), drafted=drafted)
        self._scheduled_at = self._pace.clock()
        return repeated.step

    def assign_adapters(self) -> None:
        """Let requests run whose adapters can get slots now."""
        if self.adapters is not None and self.has_parked:
            self.adapters.assign()

    def _schedule_normal_step(self) -> ScheduledStep | None:
        """Choose a step of requests that are not isolated."""
        batch, group = self.batch, self.isolation.group
        is_awaited = is_excluded = None
        if self.pending_steps:
            if self._num_stages == 1:
                self._forced.extend_awaited_rows()
            is_excluded = is_awaited = self.pending_steps.awaited_rows()
            if self._num_stages == 1:
                # The token that these rows await is their last.
                is_excluded = is_awaited & (batch.num_tokens >= batch.max_total_tokens)
        if not self.room.give_blocks_to_growing_rows(is_excluded if group is None else batch.is_isolated):
            return None
        rows = batch.order if group is None else batch.order[~batch.is_isolated[batch.order]]
        wanted = batch.num_tokens[rows] - batch.num_computed_tokens[rows]
        decodes = rows[wanted == 1]
        # Of all rows that decode, also in pending steps; while a group runs, there is one step at a time.
        share = -(-len(decodes) // self._num_stages) if group is None else len(decodes)
        if is_excluded is not None:
            decodes = decodes[~is_excluded[decodes]]
        decodes = decodes[:share]
        awaits = NO_ROWS if is_awaited is None else np.flatnonzero(is_awaited[decodes])
        self.cache.register_decodes(decodes, awaits)
        num_decodes = len(decodes)
        decodes, drafted = self._choose_drafts(decodes)
        prefills = self._continue_prefills(rows[wanted > 1], num_decodes + len(drafted.drafts.tokens))
        decodes = np.concatenate([decodes, self._admit(prefills)])
        return self._step_of(decodes, prefills, awaits, drafted)

    def _choose_drafts(self, decodes: Rows) -> tuple[Rows, DraftedRows]:
        """Return the rows of `decodes` [n] that get no drafts, and the others with theirs."""
        if self.drafting is None or not len(decodes):
            return decodes, NO_DRAFTED_ROWS
        budget = (self.config.max_num_batched_tokens - len(decodes)) // 2  # the rest is for prompts
        return self.drafting.choose(decodes, budget)

    def _step_of(
        self, decodes: Rows, prefills: Prefills, awaits: Rows = NO_ROWS, drafted: DraftedRows = NO_DRAFTED_ROWS
    ) -> ScheduledStep | None:
        """Return the step with `decodes` [n], the rows that are `drafted`, and `prefills`; None if it has no row."""
        rows, counts, drafts = decodes, np.ones(len(decodes), np.int64), None
        if len(drafted.rows):
            num_drafts = np.concatenate([0 * decodes, drafted.drafts.counts, np.zeros(len(prefills.rows), np.int64)])
            drafts = drafted.drafts._replace(counts=num_drafts)
            rows = np.concatenate([rows, drafted.rows])
            counts = np.concatenate([counts, drafted.drafts.counts + 1])
        if prefills.rows:
            rows = np.concatenate([rows, np.array(prefills.rows, np.int64)])
            counts = np.concatenate([counts, np.array(prefills.counts, np.int64)])
        if not len(rows):
            return None
        awaited = self.pending_steps.indices_of_tokens(rows[awaits]) if len(awaits) else NO_ROWS
        step = ScheduledStep.of(self.batch, rows, counts, len(decodes), awaits, awaited, drafts)
        self._scheduled_at = self._pace.clock()
        return step._replace(num_prompt_tokens=prefills.num_prompt_tokens)

    def launched(self, step: ScheduledStep, output: OutputHandle, number: int) -> None:
        """Queue `step`, just launched under `number`, as pending; from now on its tokens count as known tokens."""
        batch, rows = self.batch, step.rows
        ends = batch.num_computed_tokens[rows] + step.counts
        if step.drafts is not None:
            ends -= step.drafts.counts
        batch.num_computed_tokens[rows] = ends
        if step.is_plain:
            batch.num_tokens[rows] = ends + 1
        else:
            batch.num_tokens[rows[step.samples]] = ends[step.samples] + 1
        self.pending_steps.append(PendingStep(number, step, output, ends, {}, {}, self._scheduled_at))

    def update(self, output: ModelOutput) -> StepUpdate:
        """Process the output of the oldest pending step, which leaves the queue.

        A row whose token is negative could not be sampled, and a row whose vector is not finite could not be pooled;
        their requests end with an error. Tokens of requests that ended in the meantime are discarded.
        """
        batch = self.batch
        pending = self.pending_steps.pop_oldest()
        self._note_time(pending)
        repeated = self.repeated
        if repeated is not None and pending.step is repeated.step:
            if repeated.num_changes == batch.num_changes and repeated.take(output):
                return self._update_again(repeated, pending, output)
            self.repeated = None
        accepted = None
        if self.drafting is not None and pending.step.drafts is not None:
            pending, output, accepted = self.drafting.accept(pending, output)
        live = pending.live_output(output)
        endings = find_endings(batch, live)
        self.cache.note_computed(pending, [row for row, ending in endings.items() if ending.error])
        rows, ends, tokens = live.rows, live.ends, live.tokens
        if any(ending.error for ending in endings.values()):
            is_sampled = tokens >= 0  # A negative number stands for a token that could not be sampled.
            rows, ends, tokens = rows[is_sampled], ends[is_sampled], tokens[is_sampled]
        batch.token_ids[rows, ends] = tokens
        rows, ends, tokens = self._forced.follow(rows, ends, tokens, set(endings), pending.forced)
        if accepted is not None:
            rows = np.concatenate([accepted.rows, rows])
            ends = np.concatenate([accepted.ends, ends])
            tokens = np.concatenate([accepted.tokens, tokens])
        self.isolation.release_suspects()
        # Read before the requests below leave their rows.
        slots, clients, positions = batch.slot[rows], batch.client[rows], ends - batch.num_prompt_tokens[rows]
        pooled = [batch.request(row) for row in live.pooled_rows.tolist()]
        vectors = [(*request.key, vector) for request, vector in zip(pooled, live.vectors, strict=True)]
        begun = [*(batch.request(row) for row in rows[positions == 0].tolist()), *pooled]
        cached = [(*request.key, request.num_cached_tokens) for request in begun if request.num_cached_tokens]
        finished = []
        for row, ending in endings.items():
            request = batch.request(row)
            if ending.error is None:
                # A block whose last token was awaited when its step was scheduled is not registered yet.
                self.cache.register(row, request.num_prompt_tokens + ending.num_output_tokens - 1)
            finished.append((request.client, self._end(request, ending)))
        if not endings:
            self._repeat(pending.step)
        return StepUpdate(
            clients=clients,
            slots=slots,
            tokens=tokens,
            positions=positions,
            finished=finished,
            cached=cached,
            vectors=vectors,
            gone=set(pending.gone.values()),
            queued=[(*request.key, request.queue_seconds or 0.0) for request in begun],
            adapters=[(*request.key, request.adapter.digest) for request in begun if request.adapter is not None],
        )

    def _update_again(self, repeated: RepeatedStep, pending: PendingStep, output: ModelOutput) -> StepUpdate:
        """Process the output of a repeated step that ends no request."""
        self.cache.note_repeated(repeated, pending)
        self.batch.token_ids[repeated.step.rows, pending.ends] = output.tokens
        positions = pending.ends - repeated.num_prompt_tokens
        clients, slots = repeated.clients, repeated.slots
        only_client = repeated.only_client
        return StepUpdate(clients, slots, output.tokens, positions, [], [], [], set(), only_client=only_client)

    def _repeat(self, step: ScheduledStep) -> None:
        """Let the next step be `step` again, which was just processed and has ended no request, if that is possible.

        A group of suspects takes turns with other requests. In a pipeline and with pending steps, steps of the same
        rows differ too.
        """
        is_simple = self._num_stages == 1 and self.isolation.group is None
        if is_simple and not self.pending_steps and RepeatedStep.can_repeat(step, self.batch):
            self.repeated = RepeatedStep(step, self.batch)

    def _end(self, request: Request, end: Finished) -> Finished:
        """End a live request; return `end`, the message that tells its client.

        Every live request ends here, for whatever reason. It gives back everything that it has in the core: its row and
        blocks or its entry in the waiting queue, and its share of the memory quota. (A request that is refused before
        `add` has nothing to give back: `RequestHandler` answers it.)
        """
        if request.row == NO_ROW:
            self.waiting.remove(request)
        else:
            self.room.vacate(request)
            if self.drafting is not None:
                self.drafting.note_end(request)
        del self._requests[request.key]
        if self.adapters is not None:
            self.adapters.note_end(request)
        if request.constrained is not None and not request.constrained.is_compiled and self.grammars is not None:
            self.grammars.forget(request.key)
        self.memory.give_back(request)
        return end

    def _schedule_isolated_step(self) -> ScheduledStep | None:
        """Choose a step of the isolated group that runs; other requests may be preempted for it."""
        batch = self.batch
        self.room.give_blocks_to_growing_rows(~batch.is_isolated, spared=batch.is_isolated)
        rows = batch.order[batch.is_isolated[batch.order]]
        wanted = batch.num_tokens[rows] - batch.num_computed_tokens[rows]
        decodes = rows[wanted == 1]
        self.cache.register_decodes(decodes, NO_ROWS)
        prefills = self._continue_prefills(rows[wanted > 1], len(decodes))
        decodes = np.concatenate([decodes, self._admit(prefills, self.isolation.group)])
        return self._step_of(decodes, prefills)

    def _awaits_images(self, suspect: Request) -> bool:
        """Return whether a waiting suspect needs images that are not encoded, before others are preempted for it."""
        if suspect.images is None:
            return False
        return self.waiting.await_images(suspect, self.cache.find_prefix(suspect).num_tokens)

    def _note_time(self, pending: PendingStep) -> None:
        """Note how long a step has taken whose output is processed now; steps that overlap begin one after another."""
        now, step = self._pace.clock(), pending.step
        seconds = now - max(pending.scheduled_at, self._updated_at)
        num_tokens = len(step.rows) if step.is_plain else int(step.counts.sum())
        self._pace.observe(step.num_prompt_tokens, num_tokens - step.num_prompt_tokens, seconds)
        if self.drafting is not None and not step.num_prompt_tokens:
            num_drafts = 0 if step.drafts is None else len(step.drafts.tokens)
            self.drafting.observe(len(step.rows), num_drafts, seconds)
        self._updated_at = now

    def _continue_prefills(self, rows: Rows, num_decodes: int) -> Prefills:
        """Return chunks of what the step of `num_decodes` decodes computes for `rows` [n], which want several tokens.

        These are prompts in progress, and rows with forced tokens.
        """
        config, batch = self.config, self.batch
        budget = config.max_num_batched_tokens - num_decodes
        # If several prompts may be in progress they share the budget, so that a short prompt does not wait for a long
        # prompt before it.
        shares = 1
        if config.enable_chunked_prefill:
            shares = min(config.max_num_partial_prefills, len(rows) + len(self.waiting))
        prefills = Prefills(budget, shares)
        known, prompt = batch.num_tokens[rows], batch.num_prompt_tokens[rows]
        is_forced = (known > prompt) & (known - batch.num_computed_tokens[rows] <= batch.num_forced_tokens[rows] + 1)
        for row in rows[is_forced].tolist():
            self._continue_prefill(row, prefills)
        prompts = rows[~is_forced]
        if config.enable_chunked_prefill:
            num_prompts = len(prompts) + (0 if batch.is_full else len(self.waiting))
            num_running = num_decodes + budget - prefills.budget
            prefills.begin_prompts(self._pace.limit(num_running, num_prompts, prefills.budget))
        for row in prompts.tolist():
            self._continue_prefill(row, prefills)
        return prefills

    def _continue_prefill(self, row: int, prefills: Prefills) -> None:
        """Add a chunk of what `row` wants to the step of `prefills`."""
        batch = self.batch
        computed = int(batch.num_computed_tokens[row])
        known = int(batch.num_tokens[row])
        wanted = known - computed
        if known > batch.num_prompt_tokens[row] and wanted > batch.num_forced_tokens[row] + 1:
            wanted -= 1  # A decode computes the last output.
        count = prefills.chunk(wanted)
        if batch.has_whole_images[row] and (images := batch.request(row).images) is not None:
            count = prefills.whole(images, computed, count)
        if count > 0:
            self.cache.register(row, computed + count)
        prefills.add(row, count, wanted)

    def _admit(self, prefills: Prefills, group: GroupKey | None = None) -> Rows:
        """Give rows and blocks to the next waiting requests and add chunks of them, as the budget and room allow.

        With a `group`, admit its suspects alone, and preempt other requests if there is no room. Return the rows that
        are no part of the prefills, because only the last output is missing, which a decode computes.
        """
        config, batch, cache = self.config, self.batch, self.cache
        decodes: list[int] = []
        while prefills.budget > 0 and prefills.num_partial < config.max_num_partial_prefills:
            request = self.waiting.first() if group is None else self.waiting.isolated.first(group)
            if request is None:
                break
            if group is not None and self._awaits_images(request):
                break
            found = self.room.find(request) if group is None else self.room.make(request)
            if found is None:
                break
            if group is None:
                seconds = _READ_S if len(batch) else _READ_ALONE_S
                found, has_more = cache.read_from_file(request, found, seconds)
                if has_more:
                    break
            num_cached = found.num_tokens
            if group is None and self.waiting.await_images(request, num_cached):
                continue
            wanted = len(request.tokens) - num_cached
            if wanted > 1 and request.num_output_tokens:
                wanted -= 1  # A decode computes the last output.
            count = prefills.chunk(wanted)
            if request.images is not None and request.images.are_whole:
                count = prefills.whole(request.images, num_cached, count)
            if not count or (count < wanted and not config.enable_chunked_prefill):
                break
            self.waiting.pop(request, wanted)
            row = batch.add(request, cache.allocate(request, found), num_cached)
            cache.register(row, num_cached + count)
            if wanted == 1 and request.num_output_tokens:
                decodes.append(row)
                prefills.budget -= 1
            else:
                prefills.add(row, count, wanted)
        return np.array(decodes, np.int64)
