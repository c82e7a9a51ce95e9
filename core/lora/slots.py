"""The adapters that the model can use in a step: their memory on the device, in numbered slots."""

from typing import Any

from vllm_mp.core.lora.adapter import Adapter
from vllm_mp.core.lora.targets import projections
from vllm_mp.core.torch_threads import one_thread
from vllm_mp.core.weights.cuts import cut_factors
from vllm_mp.kernels.ops import AnyAdapterStack
from vllm_mp.model_config.architecture import NativeArchitecture


class AdapterSlots:
    """Adapters in slots 0 to `num_slots` - 1, each for all projections of the model."""

    def __init__(self, arch: NativeArchitecture, num_slots: int, max_rank: int) -> None:
        """Prepare slots for adapters of up to `max_rank`; `bind` allocates their memory."""
        self._shard = arch.shard
        self._projections = projections(arch)
        self._max_rank = max_rank
        self._adapters: list[Adapter | None] = [None] * num_slots
        self._stacks: list[AnyAdapterStack] = []
        """One for each projection; [] while there is no model."""

    def bind(self, model: Any) -> None:
        """Allocate the slots in `model`, a `NativeModel` with its weights, and load the adapters into them again."""
        with one_thread():
            self._stacks = model.make_adapter_stacks(len(self._adapters), self._max_rank)
        for slot, adapter in enumerate(self._adapters):
            if adapter is not None:
                self.load(slot, adapter)

    def unbind(self) -> None:
        """Release the memory on the device, because the weights of the model are dropped; the adapters stay."""
        self._stacks = []

    def load(self, slot: int, adapter: Adapter) -> None:
        """Put `adapter` into `slot`, in place of what it held. Its copy on the host is kept until the next load.

        No pending step may use the slot, and the weights of the model must not be in host memory (`sleep`).
        """
        self._adapters[slot] = adapter
        with one_thread():
            for stack, projection in zip(self._stacks, self._projections if self._stacks else [], strict=True):
                factors = [(part, adapter.factors.get(part)) for part in projection.parts]
                stack.load(slot, [cut_factors(part, of_part, self._shard) for part, of_part in factors])
