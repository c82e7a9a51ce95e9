"""The restarts of a core, counted once for all processes that use it."""

from pathlib import Path

from vllm_mp.client.stats.cells import Cells
from vllm_mp.client.stats.metrics import Counter

REPLACED = "replaced"
"""Kind of the death of a core from which another process has taken over, as it was told."""
DEATH_KINDS = ("exit", "signal", "hang", "out_of_memory", "connection", REPLACED)
"""How a core may die; `Death.kind` is one of them."""
_FOLDER = "core"
"""Where in the folder of a server the restarts are counted."""
_PARENT = "parent"


class RestartCounter:
    """Counts restarts by the kind of the death before.

    Each client of a shared core sees its deaths, as the end of a connection. A parent process that watches the core
    knows more: then it counts, and the clients only read.
    """

    def __init__(self) -> None:
        self._cells = Cells()
        self._counter = Counter(self._cells, DEATH_KINDS, takes_maximum=True)
        self._counts = True

    def add(self, kind: str) -> None:
        """Count a restart, unless a parent process does."""
        if self._counts:
            self._counter.add(1, kind)

    def share(self, folder: Path, name: str) -> None:
        """Count in the folder of a server, as a client called `name`."""
        self._share(folder, name)
        self._counts = not (folder / _FOLDER / f"{_PARENT}.cells").exists()

    def share_as_parent(self, folder: Path) -> None:
        """Count in the folder of a server for all clients; call this before clients share the folder."""
        self._share(folder, _PARENT)

    def read(self) -> dict[str, float]:
        """Return the number of restarts by kind."""
        return self._counter.read(self._cells.total())

    def _share(self, folder: Path, name: str) -> None:
        (folder / _FOLDER).mkdir(mode=0o700, exist_ok=True)
        self._cells.share(folder / _FOLDER, name)
