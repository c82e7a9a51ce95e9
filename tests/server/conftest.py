"""Fixtures with servers: a real `vllm-mp serve` process, and the parts of a server over a core that needs no model."""

import contextlib
from collections.abc import Iterator

import httpx
import psutil
import pytest
from support.chromium import running_chromium
from support.engine_fixtures import starting_from
from support.page_stand_in import PageStandIn
from support.server_process import ServedModel, served

from vllm_mp import AsyncLLM
from vllm_mp.model_store import DEFAULT_MODEL
from vllm_mp.server.app import build_app
from vllm_mp.server.http.options import ServerOptions
from vllm_mp.testing.engines import replay_core


@pytest.fixture(scope="session")
def server(default_model, core_template, tmp_path_factory) -> Iterator[ServedModel]:
    """A server of the default model, ready. Its core may die (it is started again), but nothing may stop the server."""
    folder = tmp_path_factory.mktemp("server")
    with contextlib.ExitStack() as stack:
        with starting_from(core_template):
            process = stack.enter_context(served(DEFAULT_MODEL, folder, TMPDIR=str(folder)))
        process.wait_until_ready()
        yield process
        children = psutil.Process(process.pid).children(recursive=True)
        process.process.terminate()
        assert process.process.wait(30) == 0, process.log.read_text()
        _, left = psutil.wait_procs(children, timeout=10)
        assert not left
        assert [path.name for path in folder.iterdir()] == ["server.log"]


@pytest.fixture(scope="session")
def replay_address(default_model, tmp_path_factory) -> Iterator[str]:
    """The address of a replay core, which answers each request with recorded tokens as fast as possible."""
    with replay_core(tmp_path_factory.mktemp("replay")) as address:
        yield address


@pytest.fixture(scope="session")
def replay_engine(replay_address) -> Iterator[AsyncLLM]:
    """An engine of the replay core, for applications in this process; see `in_process`."""
    engine = AsyncLLM.connect(replay_address)
    yield engine
    engine.shutdown()


@pytest.fixture
def in_process(replay_engine):
    """A function that returns a client of an application with the given options, in this process.

    It calls the application without a socket. Use it in `async with`, inside an event loop.
    """

    def client(**options) -> httpx.AsyncClient:
        app = build_app(replay_engine, ServerOptions(**options))
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")

    return client


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium."""
    with running_chromium() as browser:
        yield browser


@pytest.fixture
def stand_in(browser) -> Iterator[PageStandIn]:
    """The page without a server. After the test, it may have logged no error and sent nothing to another host."""
    stand_in = PageStandIn(browser)
    yield stand_in
    stand_in.context.close()
    assert stand_in.problems == []
