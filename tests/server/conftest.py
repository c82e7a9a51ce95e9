"""Fixtures with servers: a real `vllm-mp serve` process, shared by all tests that neither configure nor harm it."""

from collections.abc import Iterator

import pytest
from support.server_process import ServedModel, served

from vllm_mp.model_store import DEFAULT_MODEL


@pytest.fixture(scope="session")
def server(default_model, tmp_path_factory) -> Iterator[ServedModel]:
    """A server of the default model, ready. Its core may die (it is started again), but nothing may stop the server."""
    with served(DEFAULT_MODEL, tmp_path_factory.mktemp("server")) as process:
        process.wait_until_ready()
        yield process
        process.process.terminate()
        assert process.process.wait(30) == 0, process.log.read_text()
