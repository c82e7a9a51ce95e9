"""An adapter as the core keeps it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from vllm_mp.core_link.core_status import OutsideTask

if TYPE_CHECKING:
    from vllm_mp.core.lora.adapter import Adapter

NO_SLOT = -1


class AdapterUser(Protocol):
    """A live request, as far as the adapter that it uses needs to know it."""

    isolate_until_num_tokens: int
    """Not 0: the request is a suspect."""

    @property
    def task(self) -> OutsideTask:
        """The request as the status page names it while its adapter is read or copied."""
        ...


@dataclass(slots=True, eq=False)
class CachedAdapter:
    """The weights of an adapter, and who uses them. Other weights under the same id are another `CachedAdapter`.

    `AdapterCache` writes what concerns host memory, `AdapterTurns` what concerns slots and requests.
    """

    id: int
    name: str
    path: str
    """The folder that holds the weights."""
    number: int
    """Distinguishes these weights from all others that the core has had; the key of the prefix cache. At least 1."""
    digest: str = ""
    """The digest of the weights, which must be the same whenever they are loaded; empty before the first load."""
    weights: "Adapter | None" = None
    """The weights in host memory."""
    slot: int = NO_SLOT
    """The adapter slot on the device that holds the weights; `NO_SLOT` if none does."""
    is_added: bool = False
    """A call of `add_lora` has named the adapter, so that it is known until it is removed."""
    is_pinned: bool = False
    """Neither the host memory nor the slot is taken away."""
    is_current: bool = True
    """False: the adapter was removed, or other weights replaced it; its requests run to their ends."""
    is_selected: bool = False
    """It is one of the next adapters that get a slot, so that its host memory is not taken away."""
    is_closing: bool = False
    """Its slot is given to another adapter when no running request uses it; requests that wait stay parked."""
    num_rows: int = 0
    """Number of running requests that use it."""
    num_waiting: int = 0
    """Number of its requests that wait for a row, while it has a slot."""
    num_admitted: int = 0
    """Number of its requests that began to run since another adapter was ready for its slot."""
    given_at: int = 0
    """When this adapter got its slot, on a clock that counts uses of slots."""
    used_at: int = 0
    """When a request with this adapter last began to run, on the same clock."""
    requests: dict[tuple[int, int], AdapterUser] = field(default_factory=dict)
    """All live requests that use it, by (client, slot)."""

    def __str__(self) -> str:
        return f"adapter {self.name!r} (id {self.id})"

    @property
    def is_at_hand(self) -> bool:
        """Whether the weights are in host memory or in a slot, so that no file has to be read."""
        return self.weights is not None or self.slot != NO_SLOT

    @property
    def is_idle(self) -> bool:
        """Whether no request runs or waits in its slot."""
        return not self.num_rows and not self.num_waiting
