"""The choice of a core for each request, from what this client has sent. No I/O and no clock.

The cost of a core is the work that a new request would wait for there, in tokens that a core reads: prompt tokens that
are still to be read, its own tokens that are not in the prefix cache, a fixed number of tokens for each running
completion, and tokens for which the KV cache has no room. Prefix hits are known to save exactly the tokens that need
not be read, so that a prefix is copied to another core as soon as waiting would cost more than reading it again.

Several clients of the same cores do not know what the others send. So each breaks ties in an order of its own; else all
of them would send to the same core at the same time.
"""

import random
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

CHUNK_TOKENS = 64
"""Tokens for which a prefix is remembered at a time."""
RUNNING_COST = 64.0
"""Tokens read that cost as much as the company of a running completion during a usual answer."""
FULL_COST = 8.0
"""Tokens read that cost as much as waiting until the cache has room for one token."""


def prefix_hashes(prompt: bytes, root: Hashable) -> list[int]:
    """Return a hash for each whole chunk of a prompt, of the chunk and of all before it.

    `prompt` is token ids as int32; prompts with different `root` share nothing. The hashes hold in this process only.
    """
    chunk_bytes, seen, hashes = 4 * CHUNK_TOKENS, hash(root), []
    for end in range(chunk_bytes, len(prompt) + 1, chunk_bytes):
        seen = hash((seen, prompt[end - chunk_bytes : end]))
        hashes.append(seen)
    return hashes


class RoutedRequest(NamedTuple):
    """What routing must know of a request."""

    num_tokens: int
    """Tokens that a core must have read before it makes the next token."""
    num_completions: int = 1
    hashes: Sequence[int] = ()
    """As `prefix_hashes` returns them; empty if no core caches prefixes."""


class Placement(NamedTuple):
    """A request that was sent to a core."""

    core: int
    num_unread: int
    """Tokens that the core had to read, as far as this client knew."""
    num_held: int
    """Tokens for which the request takes room in the cache."""
    num_completions: int


class _Core:
    """What is known of a core."""

    __slots__ = ("bit", "cache_tokens", "held", "num_placed", "prefixes", "running", "turn", "unread")

    def __init__(self, bit: int, cache_tokens: int, turn: float) -> None:
        self.bit = bit
        """The core's bit in the masks of `Router`."""
        self.cache_tokens = cache_tokens
        self.unread = 0
        self.running = 0
        self.held = 0
        self.num_placed = 0
        self.turn = turn
        """The core's position in the order in which equally good cores are chosen."""
        self.prefixes: OrderedDict[int, None] = OrderedDict()
        """The hashes that the core's cache is believed to hold, the least recently used first."""


class Router:
    """Chooses the core where a request waits least, and remembers what each core was sent.

    Cores are named by any integers. The methods take time proportional to the number of cores and of chunks.
    """

    def __init__(self, seed: int | None = None) -> None:
        """`seed` draws the order of equal cores; None: it is the order in which they are added."""
        self._chance = None if seed is None else random.Random(seed)
        self._num_added = 0
        self._cores: dict[int, _Core] = {}
        self._holders: dict[int, int] = {}
        """For each hash a mask of the cores whose cache is believed to hold it."""
        self._free_bits: list[int] = []
        """Bits of cores that were removed."""

    def add_core(self, core: int, cache_tokens: int) -> None:
        """Add a core whose KV cache has room for `cache_tokens`."""
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._cores)
        turn = self._num_added if self._chance is None else self._chance.random()
        self._cores[core] = _Core(bit, cache_tokens, turn)
        self._num_added += 1

    def remove_core(self, core: int) -> None:
        """Forget a core; placements there need not end."""
        self.forget_prefixes(core)
        self._free_bits.append(self._cores.pop(core).bit)

    def forget_prefixes(self, core: int) -> None:
        """Believe that the core's prefix cache is empty: the core is another one, or was told so."""
        known = self._cores[core]
        for prefix in known.prefixes:
            self._drop(prefix, known)
        known.prefixes.clear()

    def choose(self, request: RoutedRequest, cores: Collection[int]) -> int:
        """Return the one of `cores`, at least one, where `request` waits least.

        Of equal cores, the one that was sent the fewest requests comes first; of these, this router's order decides.
        """
        known, num_tokens = self._cores, request.num_tokens
        hits = self._hits(request.hashes)
        best, best_cost, best_order = -1, float("inf"), (0, 0.0)
        for core in cores:
            state = known[core]
            own = num_tokens - hits.get(state.bit, 0)
            cost = state.unread + own + RUNNING_COST * state.running
            missing = state.held + own - state.cache_tokens
            if missing > 0:
                cost += FULL_COST * missing
            if cost <= best_cost:
                order = state.num_placed, state.turn
                if cost < best_cost or order < best_order:
                    best, best_cost, best_order = core, cost, order
        return best

    def place(self, request: RoutedRequest, core: int) -> Placement:
        """Note that `request` was sent to `core`."""
        state, hashes = self._cores[core], request.hashes
        hit = self._hits(hashes).get(state.bit, 0)
        prefixes, holders, bit = state.prefixes, self._holders, state.bit
        for prefix in reversed(hashes):  # a core evicts the end of a prefix first
            if prefix in prefixes:
                prefixes.move_to_end(prefix)
            else:
                prefixes[prefix] = None
                holders[prefix] = holders.get(prefix, 0) | bit
        while len(prefixes) * CHUNK_TOKENS > state.cache_tokens:
            self._drop(prefixes.popitem(last=False)[0], state)
        num_unread = request.num_tokens - hit
        placement = Placement(core, num_unread, num_unread, request.num_completions)
        state.unread += num_unread
        state.held += num_unread
        state.running += request.num_completions
        state.num_placed += 1
        return placement

    def note_read(self, placement: Placement) -> None:
        """Note that the first token of a placed request has arrived; call this at most once for each."""
        if (state := self._cores.get(placement.core)) is not None:
            state.unread -= placement.num_unread

    def note_end(self, placement: Placement, was_read: bool) -> None:
        """Note that a placed request has ended or left its core; `was_read`: `note_read` was called for it."""
        state = self._cores.get(placement.core)
        if state is None:
            return
        if not was_read:
            state.unread -= placement.num_unread
        state.held -= placement.num_held
        state.running -= placement.num_completions

    def _hits(self, hashes: Sequence[int]) -> dict[int, int]:
        """Return the number of tokens that each core's cache holds of a prompt, by the core's bit; 0 is left out."""
        if not hashes or not (mask := self._holders.get(hashes[0], 0)):
            return {}
        hits: dict[int, int] = {}
        holders, num_tokens = self._holders, 0
        for prefix in hashes:
            found = holders.get(prefix, 0) & mask
            if found != mask:
                _record(hits, mask & ~found, num_tokens)
                if not found:
                    return hits
                mask = found
            num_tokens += CHUNK_TOKENS
        _record(hits, mask, num_tokens)
        return hits

    def _drop(self, prefix: int, state: _Core) -> None:
        """Remove a core from the holders of a prefix."""
        left = self._holders[prefix] & ~state.bit
        if left:
            self._holders[prefix] = left
        else:
            del self._holders[prefix]


def _record(hits: dict[int, int], mask: int, num_tokens: int) -> None:
    """Set the entry of each bit of `mask`."""
    while mask and num_tokens:
        bit = mask & -mask
        hits[bit] = num_tokens
        mask ^= bit
