"""The image jobs of an engine that wait for a process."""

from concurrent.futures import Future
from typing import Final

from vllm_mp.client.images.messages import ImageJob, ImageResult
from vllm_mp.errors import NoRoomError

_MAX_WAITING: Final = 1024
_TENANT_SHARE: Final = 0.75
"""Share of what other tenants leave of `_MAX_WAITING` that the jobs of one tenant may take."""


class WaitingJobs:
    """Image jobs, each by the future of its answer.

    Tenants take turns, of one job each. The jobs of a tenant run in the order in which they come.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, dict[Future[ImageResult], ImageJob]] = {}
        """The jobs of each tenant that has some, the oldest first; the tenant whose turn is next is first."""

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def add(self, future: Future[ImageResult], job: ImageJob, tenant: int) -> None:
        """Add a job. Raises NoRoomError if too many wait, of this tenant or of all."""
        total, own = len(self), len(self._jobs.get(tenant, ()))
        if own >= int(_TENANT_SHARE * (_MAX_WAITING - total + own)):
            raise NoRoomError(
                f"{total} images wait to be processed, {own} of them of this client or key; the limit is "
                f"{_MAX_WAITING}, and for each client or key {_TENANT_SHARE:.0%} of what the others leave; send the "
                "request later"
            )
        self._jobs.setdefault(tenant, {})[future] = job

    def take(self) -> tuple[Future[ImageResult], ImageJob]:
        """Remove and return the next job, of which there must be one."""
        tenant = next(iter(self._jobs))
        jobs = self._jobs.pop(tenant)
        future = next(iter(jobs))
        job = jobs.pop(future)
        if jobs:
            self._jobs[tenant] = jobs  # behind all other tenants
        return future, job

    def remove(self, future: Future[ImageResult], tenant: int) -> None:
        """Remove a job if it waits."""
        jobs = self._jobs.get(tenant, {})
        jobs.pop(future, None)
        if not jobs:
            self._jobs.pop(tenant, None)

    def clear(self) -> list[Future[ImageResult]]:
        """Remove all jobs, and return their futures."""
        futures = [future for jobs in self._jobs.values() for future in jobs]
        self._jobs.clear()
        return futures
