"""Merging asynchronous iterators: what arrives, in which order, and what happens to the iterators at the end."""

import asyncio

import pytest

from vllm_mp.utils.async_utils import collect_from_async_generator, merge_async_iterators


class Source:
    """An iterator whose items a test puts, and which notes how it ended."""

    def __init__(self):
        self.items = asyncio.Queue()
        self.num_read = 0
        self.end = None

    async def iterate(self):
        try:
            while (item := await self.items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                self.num_read += 1
                yield item
            self.end = "exhausted"
        except GeneratorExit:
            self.end = "closed"
            raise
        except BaseException as error:
            self.end = type(error).__name__
            raise


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def test_items_come_in_the_order_of_arrival_with_the_number_of_their_iterator():
    async def run():
        sources = [Source() for _ in range(3)]
        merged = merge_async_iterators(*[source.iterate() for source in sources])
        seen = []
        for number in (2, 0, 1, 1, 0, 2):
            sources[number].items.put_nowait(f"item of {number}")
            seen.append(await anext(merged))
        for source in sources:
            source.items.put_nowait(None)
        assert await collect_from_async_generator(merged) == []
        assert [source.end for source in sources] == ["exhausted"] * 3
        return seen

    assert asyncio.run(run()) == [(number, f"item of {number}") for number in (2, 0, 1, 1, 0, 2)]


def test_items_that_wait_for_the_consumer_keep_their_order():
    async def run():
        sources = [Source() for _ in range(20)]
        merged = merge_async_iterators(*[source.iterate() for source in sources])
        sources[0].items.put_nowait("first")
        assert await anext(merged) == (0, "first")
        order = [7, 3, 19, 0, 11, 5]
        for number in order:
            sources[number].items.put_nowait(number)
            await settle()
        assert [(await anext(merged))[1] for _ in order] == order
        await merged.aclose()

    asyncio.run(run())


def test_no_iterator_runs_more_than_one_item_ahead_of_the_consumer():
    async def run():
        fast, slow = Source(), Source()
        for number in range(10):
            fast.items.put_nowait(number)
        merged = merge_async_iterators(fast.iterate(), slow.iterate())
        await anext(merged)
        await settle()
        assert fast.num_read == 2
        await merged.aclose()

    asyncio.run(run())


def test_an_iterator_that_ends_early_does_not_end_the_others():
    async def run():
        short, long = Source(), Source()
        short.items.put_nowait(None)
        for item in ("a", "b", None):
            long.items.put_nowait(item)
        return await collect_from_async_generator(merge_async_iterators(short.iterate(), long.iterate()))

    assert asyncio.run(run()) == [(1, "a"), (1, "b")]


def test_merging_nothing_yields_nothing():
    assert asyncio.run(collect_from_async_generator(merge_async_iterators())) == []


@pytest.mark.parametrize("error", [ValueError("broken"), asyncio.CancelledError()], ids=["error", "cancelled"])
def test_error_of_an_iterator_travels_and_closes_the_others(error):
    async def run():
        sources = [Source() for _ in range(3)]
        merged = merge_async_iterators(*[source.iterate() for source in sources])
        sources[0].items.put_nowait("item")
        assert await anext(merged) == (0, "item")
        sources[1].items.put_nowait(error)
        with pytest.raises(type(error)) as caught:
            await anext(merged)
        assert caught.value is error
        assert [source.end for source in sources] == ["CancelledError", type(error).__name__, "CancelledError"]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_cancelling_the_consumer_ends_the_iterators():
    async def run():
        sources = [Source() for _ in range(3)]
        merged = merge_async_iterators(*[source.iterate() for source in sources])
        consumer = asyncio.create_task(collect_from_async_generator(merged))
        await settle()
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        assert [source.end for source in sources] == ["CancelledError"] * 3
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_leaving_the_loop_early_closes_iterators_that_wait_with_an_item_or_for_one():
    async def run():
        ready, silent = Source(), Source()
        for item in ("a", "b"):
            ready.items.put_nowait(item)
        async for _ in (merged := merge_async_iterators(ready.iterate(), silent.iterate())):
            await settle()
            break
        await merged.aclose()
        assert (ready.end, silent.end) == ("closed", "CancelledError")
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_each_iterator_stays_in_one_task_so_that_time_limits_inside_it_work():
    async def limited():
        async with asyncio.timeout(30):
            for number in range(3):
                yield number
                await asyncio.sleep(0)

    merged = merge_async_iterators(limited(), limited())
    assert len(asyncio.run(collect_from_async_generator(merged))) == 6
