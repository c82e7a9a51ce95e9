"""The adapters that a core knows: which are in host memory, which are being loaded, and which are kept."""

import itertools
import logging
import os
import queue
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from vllm_mp.core.lora.cached_adapter import CachedAdapter
from vllm_mp.core.outside_work import OutsideWork
from vllm_mp.core_link.core_status import OutsideTask
from vllm_mp.core_link.status_page import MAX_ADAPTER_BYTES
from vllm_mp.requests.lora_request import AdapterRecord, LoRARequest

if TYPE_CHECKING:
    from vllm_mp.core.lora.adapter import Adapter

logger = logging.getLogger(__name__)

_MAX_LOADS = 4
"""Number of adapters that are loaded at a time, without those whose load is slow."""
_SLOW_LOAD_S = 2.0
"""Time after which a load is slow, so that others do not wait for it: its disk may never answer."""
_MAX_THREADS = 64
_MAX_UNUSED_RETIRED = 64
"""Number of retired adapters without requests that are kept, because clients may yet come back with their requests."""
_RECORD_BYTES = 64
"""Bytes that the status page needs for an adapter beside its name and path."""


class NotOperatorOfAdapterError(ValueError):
    """A client that is not an operator names an adapter that the core does not know, or a folder."""


class AdapterChangedError(ValueError):
    """The weights with which an earlier core began a request are gone; the request may be sent again."""


class _Loaded(NamedTuple):
    """The end of a load."""

    adapter: CachedAdapter
    weights: "Adapter | None"
    digest: str
    error: Exception | None


class AdapterCache:
    """Owns the known adapters, and the host memory that they take.

    An adapter is known from the first request or call that names its folder. One that `add` was called for is known
    until `remove`; any other is forgotten when it has left host memory and slot, and no request uses it. The folder of
    a known adapter is read again when its memory was taken away, and must then hold the same weights.

    An adapter that was removed or replaced while requests used it is retired: these requests run to their ends, also in
    a successor, and no other request can use it.

    Folders are read by threads, and everything else happens in the core's thread. `fd` is readable when a load has
    ended; `take_loaded` then makes its result known.
    """

    def __init__(
        self,
        max_in_memory: int,
        num_slots: int,
        read: "Callable[[str], tuple[Adapter, str]]",
        note: Callable[[Sequence[AdapterRecord]], None],
        outside: OutsideWork | None = None,
    ) -> None:
        """`read` returns the weights in a folder, and their digest. It runs in a thread, and raises any Exception.

        `note` is called with what a successor must know, at each change. `outside` publishes what is read, and for
        which requests.
        """
        self._outside = OutsideWork() if outside is None else outside
        self._max_in_memory = max_in_memory
        self._num_slots = num_slots
        self._read = read
        self._note = note
        self._known: dict[int, CachedAdapter] = {}
        self._retired: list[CachedAdapter] = []
        """Adapters that are not current, of requests that may still be live; the earliest first."""
        self._inherited: set[CachedAdapter] = set()
        """Those that an earlier core knew: their requests may come back."""
        self._in_memory: OrderedDict[CachedAdapter, None] = OrderedDict()
        """The adapters in host memory, least recently used first."""
        self._num_pinned = 0
        """Number of pinned adapters, as of the latest `_publish`."""
        # No core gives weights the number that another has given to others: the cache of both may be one.
        self._numbers = itertools.count(1 + secrets.randbits(62))
        self._loads: dict[CachedAdapter, float] = {}
        """The adapters that are being loaded, and since when, in seconds of `time.monotonic()`."""
        self._queued: deque[CachedAdapter] = deque()
        """Adapters whose load has not begun, because too many are loaded already."""
        self._calls: dict[CachedAdapter, list[tuple[Future[bool], bool]]] = {}
        """(future, result) of the calls that wait for the load of an adapter."""
        self._replacements: set[CachedAdapter] = set()
        """Adapters that are being loaded, each to replace the known adapter with its id."""
        self._ended: queue.SimpleQueue[_Loaded] = queue.SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def load_first(self, modules: Sequence[LoRARequest]) -> None:
        """Load the adapters of the configuration before the core serves. Raises ValueError if one cannot be loaded."""
        for module in modules:
            adapter = self._known[module.lora_int_id] = self._make(module)
            try:
                adapter.weights, adapter.digest = self._read(module.lora_path)
            except OSError as error:
                raise ValueError(f"{adapter} cannot be loaded: {error}") from error
            adapter.is_added = True
            self._in_memory[adapter] = None
            self._evict()
        self._publish()

    def restore(self, records: Sequence[AdapterRecord]) -> None:
        """Know the adapters that a predecessor knew; each is loaded when a request needs it."""
        for record in records:
            adapter = CachedAdapter(
                id=record.id,
                name=record.name,
                path=record.path,
                number=record.number,
                digest=record.digest,
                is_added=record.is_added,
                is_pinned=record.is_pinned,
                is_current=record.is_current,
            )
            self._inherited.add(adapter)
            if adapter.is_current:
                self._known[adapter.id] = adapter
            else:
                self._retired.append(adapter)
        self._publish()

    def find(self, lora: LoRARequest, may_open: bool, digest: str = "") -> CachedAdapter:
        """Return the adapter for a request, which becomes known if need be.

        `may_open`: the client may name folders; else the path of `lora` has no meaning, and the adapter must be known.
        `digest` is that of the weights with which an earlier core began the request; empty for a new request. If the
        adapter that has the id now has other weights, a retired one with these is returned.

        Raises ValueError if the id belongs to another name or path, or if every slot is pinned; AdapterChangedError if
        the weights are others than before; NotOperatorOfAdapterError if the client must not make the core open the
        folder.
        """
        adapter = self._known.get(lora.lora_int_id)
        is_of_request = (
            adapter is not None
            and (adapter.name, adapter.digest) == (lora.lora_name, digest)
            and (adapter.path == lora.lora_path or not may_open)
        )
        if digest and not is_of_request:
            adapter = self._find_retired(lora, digest) or adapter
        if adapter is None:
            if not may_open:
                raise NotOperatorOfAdapterError(
                    f"adapter {lora.lora_name!r} (id {lora.lora_int_id}) is not loaded, and only operators make this "
                    "core open a folder: have an operator call add_lora"
                )
            adapter = self._make(lora)
        elif adapter.is_current:
            self._check_same(adapter, lora, check_path=may_open)
        if digest and may_open and not adapter.digest:
            adapter.digest = digest
        if digest and adapter.digest and digest != adapter.digest:
            raise AdapterChangedError(f"the weights of {adapter} have changed since this request began; send it again")
        if self._num_pinned >= self._num_slots and not adapter.is_pinned and adapter.is_current:
            raise ValueError(
                f"{adapter} can never run: all {self._num_slots} slots are pinned by other adapters; call remove_lora "
                "for one of them, or raise max_loras"
            )
        if adapter.is_current:
            self._known[adapter.id] = adapter
        if adapter in self._in_memory:
            self._in_memory.move_to_end(adapter)
        return adapter

    def release(self, adapter: CachedAdapter) -> None:
        """Forget an adapter if nothing keeps it; call this when it has lost its slot, or a request that used it."""
        if not adapter.is_current and not adapter.requests:
            self._drop(adapter)
        self._forget_if_unused(adapter)

    def add(self, name: str, number: int, path: str, load_inplace: bool) -> "Future[bool]":
        """Load an adapter, and know it until `remove`. The future is done when it is in host memory.

        Its result is False if the adapter was listed before. With `load_inplace`, the folder is read in any case, and
        new requests use what it holds now; requests that have begun keep the former weights. The future holds a
        RuntimeError if the folder cannot be used; then nothing has changed. Loads go on side by side, and what counts
        in the end is the latest call of `add` or `remove` for an id.

        Raises ValueError for arguments that cannot work, and if the id belongs to another name or path, unless
        `load_inplace` is true.
        """
        try:
            lora = LoRARequest(name, number, path, load_inplace=load_inplace)
        except TypeError as error:
            raise ValueError(str(error)) from None
        done: Future[bool] = Future()
        known = self._known.get(lora.lora_int_id)
        if known is None:
            self._check_room(lora)
        if known is not None and lora.load_inplace:
            adapter = self._make(lora)
            self._replacements.add(adapter)
        elif known is not None:
            self._check_same(known, lora, check_path=True)
            adapter = known
        else:
            adapter = self._known[lora.lora_int_id] = self._make(lora)
        is_new = lora.load_inplace or not (known is not None and self._is_listed(known))
        if adapter.is_at_hand:
            self._keep(adapter)
            done.set_result(is_new)
            return done
        self._calls.setdefault(adapter, []).append((done, is_new))
        self.load(adapter)
        return done

    def remove(self, number: int) -> bool:
        """Forget an adapter, also one that calls of `add` still load; return False if there is none.

        Requests that use it run to their ends.
        """
        known = self._known.get(number) if isinstance(number, int) else None
        removed = [adapter for adapter in self._calls if adapter.id == number and adapter.is_current]
        if not removed and (known is None or not self._is_listed(known)):
            return False
        if known is not None and known not in removed:
            removed.append(known)
        for adapter in removed:
            self._retire(adapter)
        self._publish()
        return True

    def pin(self, number: int) -> bool:
        """Keep an adapter in host memory and, once it has one, in its slot; `remove` ends that.

        Raises ValueError if it is not known, if as many adapters as there are slots are pinned already, or if requests
        with other adapters could then never run.
        """
        adapter = self._known.get(number) if isinstance(number, int) else None
        if adapter is None or not self._is_listed(adapter):
            raise ValueError(f"no adapter with id {number} is loaded; call add_lora first")
        if adapter.is_pinned:
            return True
        if self._num_pinned >= self._num_slots:
            raise ValueError(
                f"{adapter} cannot be pinned: all {self._num_slots} slots are pinned; remove a pinned adapter, or "
                "raise max_loras"
            )
        if self._num_pinned == self._num_slots - 1:
            others = [other for other in self._known.values() if other.requests and not other.is_pinned]
            if blocked := [other for other in others if other is not adapter]:
                raise ValueError(
                    f"{adapter} cannot be pinned to the last slot while requests use {blocked[0]}; pin it after their "
                    "ends, or raise max_loras"
                )
        adapter.is_pinned = adapter.is_added = True
        self._publish()
        return True

    def ids(self) -> list[int]:
        """Return the ids of the adapters that requests may use without a folder."""
        return sorted(adapter.id for adapter in self._known.values() if self._is_listed(adapter))

    @property
    def num_ahead(self) -> int:
        """Number of adapters that may be in host memory without a slot, because they get one next."""
        return max(1, self._max_in_memory - self._num_slots)

    @property
    def is_busy(self) -> bool:
        """Whether as many adapters are loaded now as may be at a time."""
        return bool(self._queued) or not self._may_start()

    def load(self, adapter: CachedAdapter) -> None:
        """Begin to load an adapter that is not at hand; no-op while it is loaded already."""
        if adapter not in self._loads and adapter not in self._queued:
            self._queued.append(adapter)
            self._start_queued()

    def take_loaded(self) -> list[tuple[CachedAdapter, str]]:
        """Make the results of ended loads known; return (adapter, reason) of those that failed.

        The requests that use these adapters must be ended.
        """
        failures = []
        for loaded in self._ended_loads():
            del self._loads[loaded.adapter]
            why = self._settle(loaded)
            if why is not None:
                logger.warning("%s", why)
                failures.append((loaded.adapter, why))
            for done, result in self._calls.pop(loaded.adapter, ()):
                if why is None:
                    done.set_result(result)
                else:
                    done.set_exception(RuntimeError(why))
        self._start_queued()
        return failures

    def _ended_loads(self) -> list[_Loaded]:
        """Return the loads that have ended since the last call."""
        if not self._loads:
            return []
        try:
            num_ended = os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        return [self._ended.get() for _ in range(num_ended)]

    def _settle(self, loaded: _Loaded) -> str | None:
        """Make an adapter that was loaded available; return why, if it is not."""
        adapter, error = loaded.adapter, loaded.error
        is_replacement = adapter in self._replacements
        self._replacements.discard(adapter)
        if error is None and adapter.digest and adapter.digest != loaded.digest:
            remedy = "send the request again"
            if adapter.is_current:
                remedy = "call add_lora with load_inplace=True to use them"
            error = ValueError(f"its files have changed since it was first loaded; {remedy}")
        if error is not None:
            is_known = self._known.get(adapter.id) is adapter  # another may have replaced it meanwhile
            if is_known and not adapter.digest and not adapter.is_added:
                del self._known[adapter.id]
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            return f"{adapter} cannot be loaded: {reason}"
        adapter.weights, adapter.digest = loaded.weights, loaded.digest
        if is_replacement and adapter.is_current:
            for other in [other for other in self._replacements if other.id == adapter.id]:
                if other.number < adapter.number:  # of an earlier call
                    self._retire(other)
            former = self._known.get(adapter.id)
            if former is not None:
                if (former.digest, former.name, former.path) == (adapter.digest, adapter.name, adapter.path):
                    self._keep(former)
                    return None
                adapter.is_pinned = former.is_pinned
                self._retire(former)
            self._known[adapter.id] = adapter
        self._in_memory[adapter] = None
        if adapter in self._calls and adapter.is_current:
            adapter.is_added = True
        if not adapter.is_current and not adapter.requests:
            self._drop(adapter)
        self._evict()
        self._publish()
        return None

    def _keep(self, adapter: CachedAdapter) -> None:
        """Know an adapter until it is removed."""
        if not adapter.is_added:
            adapter.is_added = True
            self._publish()

    def _find_retired(self, lora: LoRARequest, digest: str) -> CachedAdapter | None:
        """Return the retired adapter of a request that began with the weights `digest`; None if there is none."""
        wanted = (lora.lora_int_id, lora.lora_name, digest)
        found = [adapter for adapter in self._retired if (adapter.id, adapter.name, adapter.digest) == wanted]
        return max(found, key=lambda adapter: adapter.path == lora.lora_path, default=None)

    def _make(self, lora: LoRARequest) -> CachedAdapter:
        return CachedAdapter(id=lora.lora_int_id, name=lora.lora_name, path=lora.lora_path, number=next(self._numbers))

    def _check_same(self, known: CachedAdapter, lora: LoRARequest, check_path: bool) -> None:
        """Raise ValueError if `lora` has another name or, with `check_path`, another path than the known adapter."""
        names = [("lora_name", known.name, lora.lora_name)]
        if check_path:
            names.append(("lora_path", known.path, lora.lora_path))
        for field, old, new in names:
            if old != new:
                raise ValueError(
                    f"lora_int_id {known.id} belongs to the adapter with {field} {old!r}, got {new!r}; choose another "
                    "id, or call add_lora with load_inplace=True to replace that adapter"
                )

    def _is_listed(self, adapter: CachedAdapter) -> bool:
        return adapter.is_added or adapter.is_at_hand

    def _retire(self, adapter: CachedAdapter) -> None:
        """Let no new request use an adapter."""
        if self._known.get(adapter.id) is adapter:
            del self._known[adapter.id]
        adapter.is_current = adapter.is_added = adapter.is_pinned = False
        if adapter.requests or adapter in self._inherited:
            self._retired.append(adapter)
            unused = [other for other in self._retired if not other.requests]
            for other in unused[:-_MAX_UNUSED_RETIRED]:
                self._retired.remove(other)
        self.release(adapter)

    def _drop(self, adapter: CachedAdapter) -> None:
        """Free the host memory of an adapter."""
        self._in_memory.pop(adapter, None)
        adapter.weights = None

    def _evict(self) -> None:
        """Free host memory beyond the limit: of the least recently used adapters that no request needs there."""
        while len(self._in_memory) > self._max_in_memory:
            unneeded = (
                adapter
                for adapter in self._in_memory
                if adapter.is_idle
                and not adapter.is_selected
                and not adapter.is_pinned
                and (adapter.is_current or not adapter.requests)  # its folder may hold other weights
            )
            adapter = next(unneeded, None)
            if adapter is None:
                return
            self._drop(adapter)
            self._forget_if_unused(adapter)

    def _forget_if_unused(self, adapter: CachedAdapter) -> None:
        is_kept = adapter.is_added or adapter.is_at_hand or adapter.requests or adapter in self._loads
        if not is_kept and adapter not in self._queued and self._known.get(adapter.id) is adapter:
            del self._known[adapter.id]
            self._publish()

    def _check_room(self, lora: LoRARequest) -> None:
        """Raise ValueError if there are too many added adapters for a successor to be told of another."""
        added = [(adapter.name, adapter.path) for adapter in self._known.values() if adapter.is_added]
        added.append((lora.lora_name, lora.lora_path))
        if sum(len(name.encode()) + len(path.encode()) + _RECORD_BYTES for name, path in added) > MAX_ADAPTER_BYTES:
            raise ValueError(f"too many adapters are added: {len(added) - 1}; remove one of them first")

    def _publish(self) -> None:
        """Tell the successor of all adapters that were loaded: the added ones first, the retired ones last."""
        self._num_pinned = sum(adapter.is_pinned for adapter in self._known.values())
        known = sorted(self._known.values(), key=lambda adapter: not adapter.is_added)
        self._note(
            [
                AdapterRecord(
                    id=adapter.id,
                    name=adapter.name,
                    path=adapter.path,
                    digest=adapter.digest,
                    is_added=adapter.is_added,
                    is_pinned=adapter.is_pinned,
                    number=adapter.number,
                    is_current=adapter.is_current,
                )
                for adapter in (*known, *self._retired)
                if adapter.digest
            ]
        )

    def _may_start(self) -> bool:
        """Whether another load may begin now."""
        slow = time.monotonic() - _SLOW_LOAD_S
        num_quick = sum(started > slow for started in self._loads.values())
        return num_quick < _MAX_LOADS and len(self._loads) < _MAX_THREADS

    def _start_queued(self) -> None:
        while self._queued and self._may_start():
            adapter = self._queued.popleft()
            self._loads[adapter] = time.monotonic()
            requests = list(adapter.requests.values())
            is_suspect = all(request.isolate_until_num_tokens for request in requests)
            alone = is_suspect and (bool(requests) or self._outside.has_suspect_calls)
            tasks = [request.task for request in requests]
            thread = threading.Thread(
                target=self._load, args=(adapter, tasks, alone), name=f"load-adapter-{adapter.id}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the system has no thread left; that must not end the core
                self._note_end(_Loaded(adapter, None, "", error))

    def _load(self, adapter: CachedAdapter, tasks: Sequence[OutsideTask], alone: bool) -> None:
        """Read the folder of an adapter for the requests `tasks`, in a thread."""
        weights, digest, error = None, "", None
        try:
            with self._outside.of(tasks, alone):
                weights, digest = self._read_folder(adapter)
        except Exception as failure:
            error = failure.with_traceback(None)
        self._note_end(_Loaded(adapter, weights, digest, error))

    def _read_folder(self, adapter: CachedAdapter) -> "tuple[Adapter, str]":
        return self._read(adapter.path)

    def _note_end(self, loaded: _Loaded) -> None:
        os.eventfd_write(self.fd, 1)  # `_ended_loads` waits for what follows
        self._ended.put(loaded)
