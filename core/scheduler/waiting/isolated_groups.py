"""The suspects that wait for a row of the batch, by the group in which they run isolated."""

from vllm_mp.core.scheduler.request import GroupKey, Request, RequestKey


class IsolatedGroups:
    """Waiting suspects, which run in steps with the other requests of their group and with no others."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, dict[RequestKey, Request]] = {}
        """No group is empty."""

    def __len__(self) -> int:
        """Return the number of waiting suspects."""
        return sum(len(group) for group in self._groups.values())

    def __contains__(self, group: GroupKey) -> bool:
        """Return whether suspects of `group` wait."""
        return group in self._groups

    def requests(self) -> list[Request]:
        """Return the waiting suspects."""
        return [request for group in self._groups.values() for request in group.values()]

    def next_group(self) -> GroupKey | None:
        """Return the group of the suspect that is first in order; None if no suspect waits."""
        if not self._groups:
            return None
        return min(self.requests(), key=lambda request: request.order).isolation

    def first(self, group: GroupKey) -> Request | None:
        """Return the suspect of `group` that is first in order and stays here; None if none of them waits."""
        return min(self._groups.get(group, {}).values(), key=lambda request: request.order, default=None)

    def add(self, request: Request) -> None:
        """Let a suspect wait."""
        self._groups.setdefault(request.isolation, {})[request.key] = request

    def remove(self, request: Request) -> None:
        """Remove a suspect that waits here."""
        group = self._groups[request.isolation]
        del group[request.key]
        if not group:
            del self._groups[request.isolation]
