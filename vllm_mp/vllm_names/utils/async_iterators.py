"""Asynchronous iterators as a whole: several merged into one, and all items of one as a list."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def merge_async_iterators(*iterators: AsyncIterator[T]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield `(i, item)` for each item of `iterators[i]`, in the order of arrival, until all iterators have ended.

    The iterators run at the same time, each in a task of its own and at most one item ahead of the consumer. The error
    of an iterator ends the iteration and is raised. However the iteration ends, also if it is closed or cancelled, all
    iterators are closed by then.
    """
    # An item and the event that it has been taken; the error of an iterator; or None for the end of an iterator.
    arrived: asyncio.Queue[tuple[int, T, asyncio.Event] | BaseException | None] = asyncio.Queue()

    async def read(index: int, iterator: AsyncIterator[T]) -> None:
        try:
            async for item in iterator:
                taken = asyncio.Event()
                arrived.put_nowait((index, item, taken))
                await taken.wait()
        except BaseException as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)
        finally:
            if (close := getattr(iterator, "aclose", None)) is not None:
                await close()

    readers = [asyncio.create_task(read(index, iterator)) for index, iterator in enumerate(iterators)]
    num_open = len(readers)
    try:
        while num_open:
            news = await arrived.get()
            if news is None:
                num_open -= 1
            elif isinstance(news, BaseException):
                raise news
            else:
                index, item, taken = news
                taken.set()
                yield index, item
    finally:
        for reader in readers:
            reader.cancel()
        if readers:
            await asyncio.wait(readers)


async def collect_from_async_generator(iterator: AsyncIterator[T]) -> list[T]:
    """Return all items of `iterator` as a list; raise what it raises."""
    return [item async for item in iterator]
