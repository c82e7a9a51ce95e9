"""The state of an engine: its cores, their load, and what this client still awaits of them."""

import asyncio
import contextlib
import time
from itertools import zip_longest
from typing import Any

from vllm_mp.client.cores.core_client import EngineCoreClient
from vllm_mp.client.engine.engine import Engine
from vllm_mp.client.stats import CoreReading
from vllm_mp.errors import EngineError

_DRAIN_POLL_S = 0.01
_STATUS_TIMEOUT_S = 2.0
"""Time that each of several cores gets to say its status; after that its status page says it."""
_SUMS = (
    "free_blocks",
    "num_accepted_tokens",
    "num_draft_tokens",
    "num_drafts",
    "num_late_graphs",
    "num_preemptions",
    "num_running",
    "num_waiting",
    "restarts",
    "step",
    "total_blocks",
)
"""The numbers in the status of a core that are added up over several cores."""


class EngineStatus:
    """Asks about an engine and changes nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._cores = engine.cores
        self._requests = engine.requests

    async def core_status(self) -> dict[str, Any]:
        """Ask the cores for their status; see `AsyncLLM.core_status`."""
        clients = self._cores.clients
        if len(clients) == 1:
            (status,) = await self._engine.ask("status", awaits_successor=False)
            return self._with_page(status, clients[0])
        self._engine.attach()
        serving = [client for client in clients if client.has_core]
        answers = await asyncio.gather(
            *(client.call("status", _STATUS_TIMEOUT_S) for client in serving), return_exceptions=True
        )
        said = {client: answer for client, answer in zip(serving, answers, strict=True) if isinstance(answer, dict)}
        if not said:
            raise EngineError(f"no core has answered for {_STATUS_TIMEOUT_S:g} s; try again later")
        return _together(
            [
                {"state": "SERVING"} | self._last_status(client) | self._with_page(said.get(client, {}), client)
                for client in clients
            ]
        )

    def last_core_status(self) -> dict[str, Any]:
        """Return what is known of the cores without asking them; see `AsyncLLM.last_core_status`."""
        self._engine.check_process()
        clients = self._cores.clients
        if len(clients) == 1:
            status = self._last_status(clients[0])
            del status["rank"]
            return status
        status = _together([self._last_status(client) for client in clients])
        if (error := self._cores.dead_error) is not None:
            status |= {"state": "DEAD", "reason": str(error)}
        elif (cause := self._cores.recovers_from) is not None:
            status |= {"state": "RECOVERING", "reason": cause}
        return status

    async def read_core_load(self, timeout: float) -> CoreReading | None:
        """Return the load of all cores together; see `AsyncLLM.read_core_load`."""
        self._engine.check_process()
        self._cores.count_drops()
        with contextlib.suppress(EngineError):
            self._engine.attach()
            await self._engine.readings.ask_core(timeout)
        return self._engine.readings.core_load()

    async def wait_for_requests_to_drain(self, timeout: float) -> None:
        """Return when this client has no unfinished request and the cores have released all its slots.

        Raises TimeoutError, which says how many are left, after `timeout` seconds.
        """
        self._engine.attach()
        deadline = time.monotonic() + timeout
        # Polled, so that the code that handles every token need not announce it.
        while len(self._requests) or self._requests.num_slots_in_use:
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"after {timeout:g} s {len(self._requests)} requests have not ended, and the core has "
                    f"{self._requests.num_slots_in_use} to release; wait longer, or abort them"
                )
            await asyncio.sleep(_DRAIN_POLL_S)
            self._engine.attach()

    def _last_status(self, client: EngineCoreClient) -> dict[str, Any]:
        """Return what is known of a core without asking it."""
        status = {"rank": client.rank} | self._known_status(client)
        if page := client.supervisor.status():
            names = ("pid", "step", "num_running", "num_waiting", "free_blocks", "total_blocks", "heartbeat_age")
            status |= {name: getattr(page, name) for name in names}
            status["state"] = page.state.name
        if client.supervisor.end is not None:
            status |= {"state": "DEAD", "reason": client.supervisor.end}
        elif (cause := client.recovers_from) is not None:
            status |= {"state": "RECOVERING", "reason": cause}
        elif (changes := self._cores.why_left_out(client.rank)) is not None:
            status |= {"state": "LEFT_OUT", "reason": f"it differs from the other cores: {changes}"}
        elif self._cores.is_draining(client.rank):
            status["state"] = "DRAINING"
        return status

    def _with_page(self, status: dict[str, Any], client: EngineCoreClient) -> dict[str, Any]:
        """Return a core's answer with what this client knows beside it."""
        page = client.supervisor.status()
        return status | self._known_status(client) | {"heartbeat_age": page.heartbeat_age if page else None}

    def _known_status(self, client: EngineCoreClient) -> dict[str, Any]:
        """Return what this client knows of a core's parent and of earlier cores."""
        return {
            "incarnation": client.incarnation,
            "restarts": client.supervisor.num_restarts,
            "last_death": client.supervisor.core.last_cause,
            "standby_pid": client.supervisor.standby_pid,
        } | ({} if client.supervisor.node is None else {"node": client.supervisor.node})


def _together(cores: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the status of several cores as one."""
    first = next((core for core in cores if core.get("state") not in ("DEAD", "LEFT_OUT", "RECOVERING")), cores[0])
    status = {name: value for name, value in first.items() if name != "rank"}
    for name in _SUMS:
        if name in first:
            status[name] = sum(core.get(name, 0) for core in cores)
    for name in ("is_paused", "is_sleeping"):
        if name in first:
            status[name] = any(core.get(name) for core in cores)
    if (per_pos := "num_accepted_tokens_per_pos") in first:
        status[per_pos] = [
            sum(column) for column in zip_longest(*(core.get(per_pos, ()) for core in cores), fillvalue=0)
        ]
    status["cores"] = cores
    return status
