"""Which adapters have the slots of the device, and the requests that wait until theirs has one.

A step uses at most as many adapters as there are slots, and each running request has its adapter in a slot. A request
whose adapter has no slot is parked: it blocks requests neither of the base model nor of other adapters. Adapters
get slots in turns, and an adapter with an endless supply of requests keeps no other waiting:

- Of the parked requests, the next in the fair order of clients selects its adapter. The next few selected adapters
  are loaded while steps go on; one that loads slowly is overtaken by those that are ready.
- A selected adapter that is ready gets a free slot, or the slot of the idle adapter that was used least recently.
  Pinned adapters keep their slots, except that if all are pinned, one gives way to an adapter that was replaced or
  removed: its requests run to their ends.
- Without such a slot, each adapter with a slot may begin `_MAX_OVERTAKING` more requests of the same priority, and all
  of a higher priority. Then it may be closed, first the one that has had its slot for longest: its other requests are
  parked, and the slot changes hands when its running requests have ended.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from vllm_mp.core.lora.cached_adapter import NO_SLOT, CachedAdapter
from vllm_mp.core.outside_work import OutsideWork
from vllm_mp.core.scheduler.batch import Batch
from vllm_mp.core.scheduler.request import Request
from vllm_mp.core.scheduler.waiting.fair_turns import FairTurns
from vllm_mp.core.scheduler.waiting.requests_by_adapter import RequestsByAdapter

if TYPE_CHECKING:
    from vllm_mp.core.lora.adapter import Adapter

_MAX_OVERTAKING = 16


class HostMemory(Protocol):
    """Where adapters come from before they get a slot."""

    @property
    def num_ahead(self) -> int:
        """Number of adapters that may be in host memory without a slot, because they get one next."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether as many adapters are loaded now as may be at a time."""
        ...

    def load(self, adapter: CachedAdapter) -> None:
        """Begin to load an adapter that is not at hand; no-op while it is loaded already."""
        ...

    def release(self, adapter: CachedAdapter) -> None:
        """Forget an adapter if nothing keeps it; called when it has lost its slot or a request."""
        ...


class AdapterTurns:
    """Gives adapters the slots of the device, and parks requests whose adapter has none."""

    def __init__(
        self,
        num_slots: int,
        memory: HostMemory,
        load_slot: "Callable[[int, Adapter], None]",
        outside: OutsideWork | None = None,
    ) -> None:
        """`load_slot` copies weights into a slot of the device. `outside` publishes for which requests it does."""
        self._outside = OutsideWork() if outside is None else outside
        self._slots: list[CachedAdapter | None] = [None] * num_slots
        self.turns = FairTurns()
        """The waiting requests that may run, also requests of the base model."""
        self.waiting = RequestsByAdapter()
        """The requests in `turns` that have adapters."""
        self.parked = RequestsByAdapter()
        """The requests that wait until their adapters get slots."""
        self._memory = memory
        self._load_slot = load_slot
        self._unselected = FairTurns()
        """The parked requests whose adapter is not selected. Clients take turns by the adapters that they select."""
        self._selected: dict[CachedAdapter, None] = {}
        self._is_contended = False
        """An adapter is ready and waits for a slot."""
        self._clock = 0
        """Number of uses of slots."""

    @property
    def holders(self) -> list[CachedAdapter]:
        """The adapters that have slots."""
        return [adapter for adapter in self._slots if adapter is not None]

    @property
    def selected(self) -> list[CachedAdapter]:
        """The next adapters that get slots, in order."""
        return list(self._selected)

    @property
    def num_parked(self) -> int:
        """Number of parked requests of all adapters."""
        return len(self.parked)

    def place(self, adapter: CachedAdapter, request: Request) -> bool:
        """Return True if a waiting request may run, because its adapter has a slot; else park it."""
        if adapter.slot != NO_SLOT and not adapter.is_closing:
            self._add_waiting(adapter, request)
            return True
        self.parked.add(adapter, request)
        if not adapter.is_selected:
            self._unselected.add(request)
        return False

    def remove(self, adapter: CachedAdapter, request: Request) -> bool:
        """Remove a request that `place` was given; return True if it was parked."""
        if request not in self.parked:
            self._remove_waiting(adapter, request)
            return False
        self.parked.remove(adapter, request)
        if not adapter.is_selected:
            self._unselected.remove(request)
        elif self.parked.best_priority(adapter) is None:
            self._deselect(adapter)
        return True

    def note_added(self, request: Request) -> None:
        """Note that a request is live."""
        if request.adapter is not None:
            request.adapter.requests[request.key] = request

    def note_end(self, request: Request) -> None:
        """Note that a request is not live any more."""
        if request.adapter is not None:
            del request.adapter.requests[request.key]
            self._memory.release(request.adapter)

    def note_vacancy(self, request: Request) -> None:
        """Note that a request has lost its row."""
        if request.adapter is not None:
            request.adapter.num_rows -= 1

    def note_admission(self, adapter: CachedAdapter, request: Request) -> None:
        """Note that a request has got a row."""
        if request in self.waiting:  # not so for suspects
            self._remove_waiting(adapter, request)
            adapter.num_admitted += self._is_contended
        adapter.num_rows += 1
        adapter.used_at = self._tick()

    def assign(self) -> None:
        """Select adapters, give them the slots that are free, and close adapters whose slots others wait for."""
        while (ready := self._next_adapters()) and (self._admit(ready[0]) or self._close_for(ready)):
            pass
        self._reopen_needless(ready)
        if self._is_contended and not ready:
            for adapter in self.holders:
                adapter.num_admitted = 0
        self._is_contended = bool(ready)

    def find_free_slot(self, adapter: CachedAdapter) -> int | None:
        """Return a slot that `adapter` may have: without an adapter, or with an idle one; None if there is none."""
        free = [slot for slot, holder in enumerate(self._slots) if holder is None]
        if free:
            return free[0]
        idle = [holder for holder in self.holders if holder.is_idle and self._gives_way(holder, adapter)]
        return min(idle, key=lambda holder: (holder.is_current, holder.used_at)).slot if idle else None

    def give(self, slot: int, adapter: CachedAdapter) -> None:
        """Give `slot` to an adapter in host memory, whose parked requests may then run; its former holder is idle."""
        assert adapter.weights is not None
        self._take(slot)
        number = self._outside.begin([request.task for request in adapter.requests.values()])
        self._load_slot(slot, adapter.weights)  # an error ends the core, whose page then names these requests
        self._outside.end(number)
        self._slots[slot] = adapter
        adapter.slot = slot
        adapter.given_at = adapter.used_at = self._tick()
        adapter.num_admitted = 0
        self._reopen(adapter)

    def make_slot(self, suspect: Request, batch: Batch, preempt: Callable[[Request], None]) -> bool:
        """Give a slot to the adapter of a suspect, if it has one; `preempt` requests that are not isolated for it.

        Return False if the adapter is being loaded, or if the suspects that run need all slots.
        """
        adapter = suspect.adapter
        if adapter is None or adapter.slot != NO_SLOT:
            return True
        if adapter.weights is None:
            self._memory.load(adapter)
            return False
        slot = self.find_free_slot(adapter)
        if slot is None:
            rows = batch.order
            needed = set(batch.adapter_slot[rows[batch.is_isolated[rows]]].tolist())
            others = [
                holder for holder in self.holders if self._gives_way(holder, adapter) and holder.slot not in needed
            ]
            if not others:
                return False
            slot = others[0].slot
            self.close(others[0])
            for row in rows[batch.adapter_slot[rows] == slot][::-1].tolist():
                preempt(batch.request(row))
        self.give(slot, adapter)
        return True

    def close(self, adapter: CachedAdapter) -> None:
        """Park the waiting requests of an adapter that has a slot, which is free once its running requests end."""
        adapter.is_closing = True
        for request in self.waiting.of(adapter):
            self.turns.remove(request)
            self._remove_waiting(adapter, request)
            self.place(adapter, request)

    def forget_client(self, client: int) -> None:
        """Forget the turns of a client that has left and has no request."""
        self._unselected.forget(client)

    def _next_adapters(self) -> list[CachedAdapter]:
        """Return the selected adapters that are ready, in the order in which they get slots."""
        self._select()
        ready = (adapter for adapter in self._selected if adapter.is_at_hand)
        return sorted(ready, key=self._parked_priority)

    def _admit(self, adapter: CachedAdapter) -> bool:
        """Let the parked requests of an adapter that is ready run; return False if there is no slot for it."""
        if adapter.slot != NO_SLOT:
            self._reopen(adapter)
            return True
        slot = self.find_free_slot(adapter)
        if slot is None:
            return False
        self.give(slot, adapter)
        return True

    def _select(self) -> None:
        """Select the adapters of the next parked requests, as far as there is host memory for them."""
        while (request := self._unselected.first()) is not None:
            adapter = request.adapter
            assert adapter is not None
            num_ready = sum(selected.is_at_hand for selected in self._selected)
            if num_ready >= self._memory.num_ahead or (not adapter.is_at_hand and self._memory.is_busy):
                return
            self._unselected.take_turn(request, 1)
            for other in self.parked.of(adapter):
                if other is not request:
                    self._unselected.remove(other)
            adapter.is_selected = True
            self._selected[adapter] = None
            if not adapter.is_at_hand:
                self._memory.load(adapter)

    def _deselect(self, adapter: CachedAdapter) -> None:
        adapter.is_selected = False
        self._selected.pop(adapter, None)

    def _reopen(self, adapter: CachedAdapter) -> None:
        """Let the parked requests of an adapter that has a slot run."""
        adapter.is_closing = False
        is_selected = adapter.is_selected
        self._deselect(adapter)
        for request in self.parked.of(adapter):
            if not is_selected:
                self._unselected.remove(request)
            self.parked.remove(adapter, request)
            self._add_waiting(adapter, request)
            self.turns.add(request)

    def _close_for(self, ready: list[CachedAdapter]) -> bool:
        """Close up to as many adapters as wait, `ready`, for slots; return whether a slot has become free."""
        closing = [adapter for adapter in self.holders if adapter.is_closing]
        for waiting in ready[len(closing) :]:
            candidates = [adapter for adapter in self.holders if self._may_close(adapter, waiting)]
            if candidates:
                closed = min(candidates, key=lambda adapter: adapter.given_at)
                self.close(closed)
                if closed.is_idle:
                    return True
        return False

    def _reopen_needless(self, ready: list[CachedAdapter]) -> None:
        """Reopen closed adapters that do not give way, such as those pinned now, and others beyond those `ready`."""
        closing = [adapter for adapter in self.holders if adapter.is_closing]
        needed = [adapter for adapter in closing if any(self._gives_way(adapter, other) for other in ready)]
        for adapter in closing:
            if adapter not in needed[: len(ready)]:
                self._reopen(adapter)

    def _gives_way(self, holder: CachedAdapter, other: CachedAdapter) -> bool:
        """Return whether `holder` may lose its slot to `other`."""
        return not holder.is_pinned or (not other.is_current and all(each.is_pinned for each in self.holders))

    def _may_close(self, holder: CachedAdapter, other: CachedAdapter) -> bool:
        if holder.is_closing or not self._gives_way(holder, other):
            return False
        if not holder.is_current and holder.weights is None:
            return False  # its folder may hold other weights by now; no new request uses it, so it is idle soon
        priority, other_priority = self.waiting.best_priority(holder), self._parked_priority(other)
        if priority is None or priority > other_priority:
            return True
        return holder.num_admitted >= _MAX_OVERTAKING and priority == other_priority

    def _parked_priority(self, adapter: CachedAdapter) -> int:
        """Return the lowest priority number of the parked requests of a selected adapter."""
        priority = self.parked.best_priority(adapter)
        assert priority is not None, "an adapter without parked requests is not selected"
        return priority

    def _add_waiting(self, adapter: CachedAdapter, request: Request) -> None:
        self.waiting.add(adapter, request)
        adapter.num_waiting += 1

    def _remove_waiting(self, adapter: CachedAdapter, request: Request) -> None:
        self.waiting.remove(adapter, request)
        adapter.num_waiting -= 1

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _take(self, slot: int) -> None:
        """Take the slot from its adapter, if it has any."""
        holder, self._slots[slot] = self._slots[slot], None
        if holder is not None:
            holder.slot, holder.is_closing = NO_SLOT, False
            if holder.is_selected and not holder.is_at_hand:
                self._memory.load(holder)
            self._memory.release(holder)
