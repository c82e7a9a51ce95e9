"""Adapters without weights, for a scheduler without a model."""

from support.stand_in_engine import Engine
from vllm_mp.core.lora.cached_adapter import CachedAdapter
from vllm_mp.core.scheduler.waiting.adapter_turns import AdapterTurns


class StandInMemory:
    """Host memory that holds each adapter at once, or when the test says so."""

    def __init__(self, num_ahead=1, loads_at_once=True):
        self.num_ahead = num_ahead
        self.is_busy = False
        self.loads_at_once = loads_at_once
        self.loading = []
        """The adapters whose load was begun and has not ended, in order."""

    def load(self, adapter):
        if self.loads_at_once:
            adapter.weights = adapter.name
        elif adapter not in self.loading:
            self.loading.append(adapter)

    def end_load(self, adapter):
        self.loading.remove(adapter)
        adapter.weights = adapter.name

    def release(self, adapter):
        pass


class AdapterEngine(Engine):
    """A scheduler whose requests have adapters; it checks that each step finds its adapters in the slots."""

    def __init__(self, num_slots=2, num_ahead=1, loads_at_once=True, **options):
        self.adapter_memory = StandInMemory(num_ahead, loads_at_once)
        self.slots = {}
        """The name of the adapter in each slot."""
        self.num_copies = 0
        """Number of copies of an adapter into a slot."""
        self.num_slots = num_slots
        super().__init__(adapters=AdapterTurns(num_slots, self.adapter_memory, self._copy), **options)

    def adapter(self, number):
        return CachedAdapter(id=number, name=f"adapter {number}", path="/", number=number)

    def launch(self, step, token, failing):
        requests = [self.batch.request(row) for row in step.rows.tolist()]
        for row, request in zip(step.rows.tolist(), requests, strict=True):
            if request.adapter is not None:
                assert self.slots[self.batch.adapter_slot[row]] == request.adapter.name
        assert len({request.adapter for request in requests} - {None}) <= self.num_slots
        super().launch(step, token, failing)

    def _copy(self, slot, weights):
        running = {self.batch.adapter_slot[row] for row in self.batch.order.tolist()}
        assert slot not in running, "no running request loses its adapter"
        self.slots[slot] = weights
        self.num_copies += 1
