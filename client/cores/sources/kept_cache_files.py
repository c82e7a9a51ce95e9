"""The memory of the KV cache that this process keeps for one core after another."""

import contextlib
import logging
import os
import stat
from collections.abc import Sequence

from vllm_mp.client.cores.sources.prefix_cache_file import PrefixCacheFile
from vllm_mp.config import VllmConfig
from vllm_mp.core_link.core_launch import KeptCache, Predecessor
from vllm_mp.core_link.mailbox import empty_mailbox, new_mailbox

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY = "out_of_memory"
_TRUSTED_KINDS = (_OUT_OF_MEMORY, "hang")
"""Kinds of deaths, beside those from outside, by which a core has not written where it should not."""
_HEADER_BYTES = 64
"""The digest of the header of the memory, without which the header counts as damaged."""


class KeptCacheFiles:
    """A file in memory for each rank of a core. Their memory is free once this process and the core have closed them.

    Unless the core computes on CPUs, there is also a mailbox for each rank, in which a descriptor of the GPU's memory
    waits for the next core; this process never receives it. So that memory, too, is free once both have closed it.

    A core that died by itself, such as of an invalid address or a failed kernel, may have written anything anywhere:
    its successor does not use what it has left, unless the option `recover_kv_cache` is "always".

    With a prefix cache file there is always such memory, because the file is written from there.
    """

    def __init__(self, config: VllmConfig, inherited: Sequence[int] = ()) -> None:
        """Make the files, if this core uses them and the system has them.

        `inherited`: those of another process, as its property `inherited` has them; they are used if they fit, and else
        closed.
        """
        self._mode = config.liveness_config.recover_kv_cache
        self._last: Predecessor | None = None
        """The core whose cache the latest successor might use."""
        self._is_excused = False
        """The latest successor did not start for another reason than what it found."""
        self.descriptors: list[int] = []
        """By rank; empty: the KV cache ends with the core."""
        self.mailboxes: list[tuple[int, int]] = []
        """By rank; empty: the core computes on CPUs, or the KV cache ends with it."""
        self._prefix_file: PrefixCacheFile | None = None
        num_ranks = config.parallel_config.world_size
        ends = [each for each in inherited if stat.S_ISSOCK(os.fstat(each).st_mode)]
        others = [each for each in inherited if each not in ends]
        caches, files = others[:num_ranks], others[num_ranks:]
        has_ends = len(ends) == 2 * num_ranks or (not ends and config.device_config.device == "cpu")
        if len(caches) == num_ranks and has_ends and len(files) <= 1 and self._is_used(config):
            self.descriptors = caches
            self.mailboxes = list(zip(ends[::2], ends[1::2], strict=True))
        else:
            for descriptor in inherited:
                os.close(descriptor)
            files = []
            self._make(config, num_ranks)
        if self.descriptors and config.cache_config.prefix_cache_file is not None:
            self._prefix_file = PrefixCacheFile(config, self.descriptors[0], *files)
        else:
            for descriptor in files:
                os.close(descriptor)

    def _make(self, config: VllmConfig, num_ranks: int) -> None:
        if not self._is_used(config):
            return
        try:
            for rank in range(num_ranks):
                self.descriptors.append(os.memfd_create(f"vllm_mp-kv-cache-{rank}"))
                if config.device_config.device != "cpu":
                    self.mailboxes.append(new_mailbox())
        except OSError as error:
            logger.warning("the KV cache will not outlive its core: %s", error)
            self.close()

    def _is_used(self, config: VllmConfig) -> bool:
        is_used_again = self._mode != "never" and config.liveness_config.recovery
        has_file = config.cache_config.prefix_cache_file is not None
        return (is_used_again or has_file) and config.parallel_config.nnodes == 1

    @property
    def inherited(self) -> list[int]:
        """The descriptors that a core inherits."""
        file = None if self._prefix_file is None else self._prefix_file.descriptor
        ends = [end for mailbox in self.mailboxes for end in mailbox]
        return [*self.descriptors, *ends, *([] if file is None else [file])]

    def for_successor_of(self, predecessor: Predecessor | None, *, writes: bool = True) -> KeptCache | None:
        """Return what the next core is told of the files; `writes`: also see that the prefix cache file is written.

        A successor that does not start may have failed because of what it found, so a second one finds nothing, unless
        the first was excused. After two deaths for want of memory in a row, the memory of the cache is given back.
        """
        if not self.descriptors:
            return None
        last, self._last = self._last, predecessor
        adopts = predecessor is not None and self._mode != "never" and self._is_trusted(predecessor)
        if predecessor is not None and last is not None:
            is_second_attempt = predecessor.incarnation == last.incarnation and not self._is_excused
            lacks_memory = predecessor.kind == last.kind == _OUT_OF_MEMORY
            adopts = adopts and not is_second_attempt and not lacks_memory
        self._is_excused = False
        if not adopts:
            for _, receives in self.mailboxes:
                empty_mailbox(receives)  # here, because a core needs the memory of the GPU before it looks at this
        if self._prefix_file is None or (predecessor is not None and predecessor.kind == "hang"):
            return self._kept(adopts)  # a disk may be what did not answer
        if writes:
            self._prefix_file.keep_writing()
        return self._kept(adopts, self._prefix_file.descriptor)

    def excuse_successor(self) -> None:
        """Note that another process has killed the latest successor, before it served."""
        self._is_excused = True

    def note_end(self, predecessor: Predecessor | None) -> None:
        """Note that a core has ended, after the death of `predecessor`, which may be the same.

        What an untrusted core has left is not written to the prefix cache file.
        """
        if self._prefix_file is not None and predecessor is not None and not self._is_trusted(predecessor):
            with contextlib.suppress(OSError):
                os.pwrite(self.descriptors[0], bytes(_HEADER_BYTES), 0)

    def for_replacement(self) -> KeptCache | None:
        """Return what a process is told of the files that is to take over from the core."""
        return self._kept(True) if self.descriptors else None

    def _kept(self, adopts: bool, prefix_file: int | None = None) -> KeptCache:
        return KeptCache(descriptors=self.descriptors, mailboxes=self.mailboxes, adopts=adopts, prefix_file=prefix_file)

    def keep_writing(self) -> None:
        """See that the prefix cache file is written."""
        if self._prefix_file is not None:
            self._prefix_file.keep_writing()

    def stop_writing(self) -> None:
        """Write nothing more to the prefix cache file, until there is another core."""
        if self._prefix_file is not None:
            self._prefix_file.stop_writing()

    def close(self, *, goes_on: bool = False) -> None:
        """Let go of the files; `goes_on`: another process, which has them too, goes on with them. Idempotent."""
        if self._prefix_file is not None:
            self._prefix_file.close(goes_on=goes_on)
        for descriptor in [*self.descriptors, *(end for mailbox in self.mailboxes for end in mailbox)]:
            os.close(descriptor)
        self.descriptors, self.mailboxes = [], []

    def _is_trusted(self, predecessor: Predecessor) -> bool:
        if self._mode == "always":
            return True
        return predecessor.is_from_outside or predecessor.kind in _TRUSTED_KINDS
