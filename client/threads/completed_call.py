"""Results of methods that work at once, for callers of an API in which they are coroutines."""

from collections.abc import Generator, Iterator
from typing import Any


class CompletedCall:
    """A call that has been carried out. `await` on it returns None at once, so that callers may leave it out."""

    def __await__(self) -> Iterator[None]:
        return iter(())


class AwaitableInt(int):
    """An int; `await` on it returns it at once."""

    def __await__(self) -> Generator[Any, None, int]:
        yield from ()
        return int(self)
