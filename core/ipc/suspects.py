"""The requests and calls during which earlier cores died: what their clients may have run alone."""

from vllm_mp.core_link.core_launch import Predecessor


class Suspects:
    """What a core knows of the deaths before it.

    To run alone costs the other clients steps. So a client of a shared core gets it only for what an earlier core was
    doing when it died, once for each request, and only past the step of that death.
    """

    def __init__(self, predecessor: Predecessor | None, is_shared: bool) -> None:
        """`predecessor`: the core that served before this one and died. `is_shared`: its clients are not its owner."""
        self._is_shared = is_shared
        self._calls = set() if predecessor is None else set(predecessor.calls)
        """(token of the client, id) of the calls that clients may have carried out alone."""
        self._progress = {} if predecessor is None else predecessor.suspects()
        """The progress of each request that clients may have isolated, by (token, slot)."""
        self._deaths = [] if predecessor is None else list(predecessor.deaths)

    def isolate_until(self, token: bytes, slot: int, wanted: int) -> int:
        """Return the number of output tokens up to which a new request must run isolated; 0: not at all.

        `wanted` is the number that the client with `token` asks for.
        """
        if not wanted or not self._is_shared:
            return wanted
        progress = self._progress.get((token, slot))
        return 0 if progress is None else max(1, min(wanted, progress + 1))

    def forget(self, token: bytes, slot: int) -> None:
        """Forget a request that was added, or refused for good: a later one in its slot gets no steps to itself."""
        self._progress.pop((token, slot), None)

    def remember(self, token: bytes, slot: int, isolate_until: int) -> None:
        """Let a request that was added be isolated again, because it is removed before it got past the step.

        Its client will send it again. `isolate_until` is as `isolate_until` has returned it.
        """
        self._progress[token, slot] = isolate_until - 1

    def may_be_alone(self, token: bytes, call_id: int) -> bool:
        """Return whether the client with `token` may have a call carried out alone."""
        return not self._is_shared or (token, call_id) in self._calls

    def deaths_of(self, token: bytes) -> set[int]:
        """Return the incarnations that died in a step with requests of the client with `token`."""
        return {incarnation for incarnation, tokens in self._deaths if token in tokens}
