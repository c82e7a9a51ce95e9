"""A cell of IPython that Ctrl-C interrupts."""

import asyncio
import sys
from types import ModuleType

import pytest

from vllm_mp.testing.engines import ENDLESS, eventually, is_empty

pytestmark = pytest.mark.extended  # needs IPython
PROMPT = {"prompt_token_ids": [300, 301]}


@pytest.fixture(scope="module", autouse=True)
def shell(tmp_path_factory):
    """The shell, which the engine finds when it is made."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config(HistoryManager={"enabled": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        # The shell would replace the module __main__.
        patch.setitem(sys.modules, "cells", cells := ModuleType("cells"))
        yield InteractiveShell.instance(config=config, user_module=cells)
        InteractiveShell.clear_instance()


def run_cell(shell, code, **names):
    """Run `code` as a cell that knows `names`; return the error that ended it, or None."""
    shell.push(names)
    return shell.run_cell(code).error_in_exec


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

    assert run_cell(shell, "await cells.begin_background()", cells=cells) is None
    assert isinstance(run_cell(shell, "await interrupted()", interrupted=interrupted), KeyboardInterrupt)
    assert "left" in cells.steps
    assert run_cell(shell, "await cells.until_only_background_runs()") is None
    assert "after" not in cells.steps


def test_cell_that_an_interrupt_unwinds_and_a_cell_that_ends_cancel_nothing(llm, shell):
    cells = Cells(llm)
    assert run_cell(shell, "await cells.begin_background()", cells=cells) is None
    assert isinstance(
        run_cell(shell, "await cells.until_read('background')\nraise KeyboardInterrupt"), KeyboardInterrupt
    )
    assert run_cell(shell, "await cells.until_only_background_runs()") is None
