"""A cell of IPython that Ctrl-C interrupts. A stand-in for IPython's shell runs cells as the shell does."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from vllm_mp.testing.engines import ENDLESS, eventually, is_empty

PROMPT = {"prompt_token_ids": [300, 301]}


class InteractiveShell:
    """The part of IPython's shell that runs cells: in one event loop, which stands still between two cells."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.callbacks = []
        self.events = self

    def register(self, event, callback):
        assert event == "post_run_cell"
        if callback not in self.callbacks:
            self.callbacks.append(callback)

    async def run_cell_async(self, cell):
        result = SimpleNamespace(error_in_exec=None)
        try:
            await cell
        except BaseException as error:
            result.error_in_exec = error
        return result

    def run_cell(self, cell):
        """Run the coroutine `cell`; return the error that ended it, or None."""
        try:
            result = self.loop.run_until_complete(self.run_cell_async(cell))
        except BaseException as error:
            result = SimpleNamespace(error_in_exec=error)
        for callback in self.callbacks:
            callback(result)
        return result.error_in_exec


@pytest.fixture(scope="module", autouse=True)
def shell():
    """The shell, which the engine finds when it is made."""
    shell = InteractiveShell()
    helpers = SimpleNamespace(get_asyncio_loop=lambda: shell.loop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
        patch.setitem(sys.modules, "IPython.core.async_helpers", helpers)
        yield shell
    shell.loop.close()


class Cells:
    """Cells of a test and what they do, in its order."""

    def __init__(self, llm):
        self.llm = llm
        self.steps = []
        self.background = None

    async def begin_background(self):
        self.background = asyncio.create_task(self.read("background"))
        await self.until_read("background")

    async def read(self, name):
        async for _ in self.llm.generate(PROMPT, ENDLESS):
            self.steps.append(name)

    async def until_read(self, name):
        """Return when a further output of a reader has arrived."""
        count = self.steps.count(name)
        await eventually(lambda: as_result(self.steps.count(name) > count))

    async def until_only_background_runs(self):
        await eventually(self.only_background_runs)
        await self.until_read("background")
        self.background.cancel()
        await eventually(lambda: is_empty(self.llm))

    async def only_background_runs(self):
        return (await self.llm.core_status())["num_running"] == 1


async def as_result(value):
    return value


def interrupt():
    raise KeyboardInterrupt


def test_interrupted_cell_ends_with_its_requests_and_other_tasks_go_on(llm, shell):
    cells = Cells(llm)

    async def interrupted():
        async with asyncio.TaskGroup() as group:
            try:
                group.create_task(cells.read("cell"))
                await cells.until_read("cell")
                asyncio.get_running_loop().call_soon(interrupt)
                await asyncio.Event().wait()
            finally:
                cells.steps.append("left")
        cells.steps.append("after")

    assert shell.run_cell(cells.begin_background()) is None
    assert isinstance(shell.run_cell(interrupted()), KeyboardInterrupt)
    assert "left" in cells.steps
    assert shell.run_cell(cells.until_only_background_runs()) is None
    assert "after" not in cells.steps


def test_cell_that_an_interrupt_unwinds_and_a_cell_that_ends_cancel_nothing(llm, shell):
    cells = Cells(llm)

    async def unwound():
        raise KeyboardInterrupt

    assert shell.run_cell(cells.begin_background()) is None
    assert isinstance(shell.run_cell(unwound()), KeyboardInterrupt)
    assert shell.run_cell(cells.until_only_background_runs()) is None
