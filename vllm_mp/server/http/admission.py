"""Admission of requests: a limit on those that wait, a share of it for each tenant, and their end at the stop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from vllm_mp.server.http.errors import ApiError

RETRY_AFTER = {"Retry-After": "1"}
"""Seconds after which a client may repeat a request that was refused for a reason that passes."""


class Admission:
    """Counts the live requests, refuses more than a limit, and ends all of them at once.

    A request is live from its admission to the last byte of its response, so requests whose prompts are being
    tokenized count too. Each completion counts: an HTTP request with 3 prompts and n=2 counts as 6.

    A tenant may reach the limit while no other asks. Once it is reached, a tenant with fewer than its equal share of
    it is still admitted up to that share, so less than twice the limit is ever live.
    """

    def __init__(
        self,
        max_live: int,
        counts: "list[int] | memoryview[int] | None" = None,
        index: int = 0,
        num_tenants: int = 1,
    ) -> None:
        """Admit up to `max_live` requests at a time, and of each of `num_tenants` up to its share beyond.

        `counts` holds the live requests of each server process that shares the core, by tenant, in shared memory, and
        `index` is the number of this process among them; None: this process is the only one.
        """
        self.max_live = max_live
        self._num_tenants = num_tenants
        self._share = max(1, max_live // num_tenants)
        """Live requests that each tenant may have in any case."""
        self._counts = [0] * num_tenants if counts is None else counts
        self._first = index * num_tenants
        """The index of this process's first tenant in `_counts`."""
        self._reason: str | None = None
        """Why no request is admitted any more: the end of a sentence about the server."""
        self._deadlines: set[asyncio.Timeout] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def refusal(self) -> ApiError | None:
        """Why no request is admitted any more, as a new error; None while requests are admitted."""
        if self._reason is None:
            return None
        message = f"the server {self._reason}"
        return ApiError(503, message, type="server_error", code="server_unavailable", headers=RETRY_AFTER)

    @property
    def num_live(self) -> int:
        """Number of live requests of this process."""
        return sum(self._counts[self._first : self._first + self._num_tenants])

    @contextlib.asynccontextmanager
    async def admit(self, num_completions: int, tenant: int = 0) -> AsyncGenerator[None]:
        """Count the completions, or vectors, that the running task asks for as live requests of `tenant` in this block.

        Raises ApiError: 503 when the server drains, 429 when too many requests wait, 400 for more than may ever
        wait at once, and within the block 503 when `end_all` is called.
        """
        if (refusal := self.refusal) is not None:
            raise refusal
        if num_completions > self.max_live:
            raise too_many_completions(num_completions, self.max_live)
        self._check_room(num_completions, tenant)
        deadline = asyncio.timeout(None)
        try:
            async with deadline:
                self._enter(deadline, num_completions, tenant)
                try:
                    yield
                finally:
                    self._leave(deadline, num_completions, tenant)
        except TimeoutError as error:
            if not deadline.expired() or (refusal := self.refusal) is None:
                raise
            raise refusal from error

    def refuse(self, reason: str) -> None:
        """Admit no further request; `reason` says why and is the end of a sentence about the server."""
        self._reason = reason

    def end_all(self, reason: str) -> None:
        """End all live requests with an error, and admit no further one; `reason` is as for `refuse`."""
        self.refuse(reason)
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            deadline.reschedule(now)

    async def wait_until_idle(self) -> None:
        """Return when no request is live in this process."""
        await self._is_idle.wait()

    def _check_room(self, num_completions: int, tenant: int) -> None:
        """Raise ApiError if `num_completions` exceed the limit and the share of `tenant`."""
        num_live = sum(self._counts)
        if num_live + num_completions <= self.max_live:
            return
        num_own = sum(self._counts[tenant :: self._num_tenants])
        if self._num_tenants > 1 and num_own + num_completions <= self._share:
            return
        own = f", {num_own} of them with this API key, whose share is {self._share}" if self._num_tenants > 1 else ""
        raise ApiError(
            429,
            f"too many requests: {num_live} run or wait{own}, the limit is {self.max_live}; repeat the request later",
            type="rate_limit_error",
            code="too_many_requests",
            headers=RETRY_AFTER,
        )

    def _enter(self, deadline: asyncio.Timeout, num_completions: int, tenant: int) -> None:
        self._deadlines.add(deadline)
        self._counts[self._first + tenant] += num_completions
        self._is_idle.clear()

    def _leave(self, deadline: asyncio.Timeout, num_completions: int, tenant: int) -> None:
        self._deadlines.remove(deadline)
        self._counts[self._first + tenant] -= num_completions
        if not self._deadlines:
            self._is_idle.set()


def too_many_completions(count: int, limit: int) -> ApiError:
    """Return the error for a request that asks for `count` completions, more than may ever be live at once."""
    message = f"the request asks for {count} completions; ask for at most {limit}"
    return ApiError(400, message, code="too_many_completions")
