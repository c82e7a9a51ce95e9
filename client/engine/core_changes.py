"""The cores of an engine, as its operator changes their number while requests run."""

import asyncio
import functools
import threading
import time
from collections import deque

from vllm_mp.client.cores.endpoint import endpoint
from vllm_mp.client.cores.lasting_calls import AdapterCall
from vllm_mp.client.cores.placement import free_place
from vllm_mp.client.cores.supervisor import CoreSupervisor
from vllm_mp.client.engine.engine import Engine, OpenCore
from vllm_mp.client.threads.background_call import call_in_thread
from vllm_mp.core_link.status_page import StatusPage
from vllm_mp.errors import EngineError

_DRAIN_POLL_S = 0.01


class CoreChanges:
    """Drains, adds and removes cores. Its calls are those of `AsyncLLM`, which documents them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cores = engine.cores
        self._opening_places: set[int] = set()
        """The places of cores that are being added."""

    async def drain(self, rank: int, timeout: float) -> None:
        """Return when a core has finished the requests of this client; see `AsyncLLM.drain_core`."""
        self._engine.attach()
        client = self._cores.drain(rank)
        deadline = time.monotonic() + timeout
        while client.requests.num_slots_in_use:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"after {timeout:g} s the core with rank {rank} has {client.requests.num_slots_in_use} completions "
                    "left; wait longer, or call remove_core(), with which other cores go on with them"
                )
            await asyncio.sleep(_DRAIN_POLL_S)
            self._engine.attach()

    async def add(self, address: str | None) -> int:
        """Use one more core and return its rank; see `AsyncLLM.add_core`."""
        self._engine.attach()
        self._check_is_new(address)
        open_core = self._engine.open_core
        if open_core is None:
            raise ValueError("this engine cannot open further cores; make an engine with several from the start")
        with self._cores.adapter_calls.missed() as missed:
            return await self._add(open_core, address, missed)

    async def _add(self, open_core: OpenCore, address: str | None, missed: deque[AdapterCall]) -> int:
        """Do what `add` does for an address that is new; `missed` are the calls that the core has missed."""
        rank, page = self._cores.reserve_rank(), self._serving_page()
        before = page and page.read().suspension
        place = free_place(self._places() | self._opening_places)
        self._opening_places.add(place)
        try:
            opening = call_in_thread(lambda: open_core(place, address, page))
            try:
                supervisor = await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(_stop_opened)
                raise
            try:
                if address is None:  # the adapters of a shared core are its own
                    await _catch_up(supervisor, missed)
                self._engine.attach()
                page_now = self._serving_page()
                now = page_now and page_now.read().suspension
                if before and now and (before.pause, before.sleep) != (now.pause, now.sleep):
                    raise EngineError("a pause or a sleep began or ended while the core started; add the core again")
                self._check_is_new(address)  # another call may have added it meanwhile
                self._cores.check_model(supervisor.core)
            except BaseException:
                await call_in_thread(supervisor.stop)
                raise
            self._cores.add_core(supervisor, rank)
        finally:
            self._opening_places.discard(place)
        self._engine.attach()
        return rank

    async def remove(self, rank: int) -> None:
        """End a core; see `AsyncLLM.remove_core`."""
        self._engine.attach()
        supervisor = self._cores.remove(rank)
        await call_in_thread(supervisor.stop)

    def give_up(self, address: str, cause: str, is_from_outside: bool) -> None:
        """Wait no longer for a shared core; see `AsyncLLM.give_up_core`."""
        self._engine.attach()
        for client in self._cores.clients:
            if client.supervisor.core.connection.address == address:
                client.supervisor.give_up(cause, is_from_outside)
                return
        raise ValueError(f"address={address!r}: this engine has no core there")

    def _check_is_new(self, address: str | None) -> None:
        """Raise ValueError if this engine uses the core at `address` already."""
        for client in self._cores.clients:
            known = client.supervisor.core.connection.address
            if address is not None and endpoint(address) == endpoint(known):
                raise ValueError(
                    f"address={address!r}: the core with rank {client.rank} is there already; give the address of "
                    "another core"
                )

    def _serving_page(self) -> StatusPage | None:
        """Return the status page of a core that serves, None if it is not visible; raises EngineError if none does."""
        for client in self._cores.clients:
            if client.has_core:
                return client.supervisor.core.page
        raise EngineError(f"no core serves now, beside which another could start: {self._cores.recovers_from}")

    def _places(self) -> set[int]:
        """Return the places of the cores, for `config_of_place`."""
        configs = [client.supervisor.core.config for client in self._cores.clients]
        return {config.parallel_config.data_parallel_rank for config in configs}


async def _catch_up(supervisor: CoreSupervisor, missed: deque[AdapterCall]) -> None:
    """Have a core that serves no request yet carry out the calls about adapters that it has `missed`, in their order.

    Return when none is left, nor under way. Raises EngineStartError if the core does not carry one out.
    """
    core = supervisor.core
    while missed:
        call = missed.popleft()
        if not await asyncio.shield(call.has_effect):
            continue
        timeout = core.config.liveness_config.start_timeout_s
        asking = call_in_thread(functools.partial(core.connection.ask, timeout, call.name, *call.args))
        try:
            await asyncio.shield(asking)
        except asyncio.CancelledError:
            await asyncio.wait([asking])  # until then the thread uses the connection, which the caller will close
            raise


def _stop_opened(opening: "asyncio.Future[CoreSupervisor]") -> None:
    """End a core whose caller no longer waits."""
    if not opening.cancelled() and opening.exception() is None:
        threading.Thread(target=opening.result().stop, name="core-end", daemon=True).start()
