"""The fixtures of tests of the client: a client of a replay core, and both output paths."""

import pytest

from vllm_mp import AsyncLLM
from vllm_mp.client.outputs import output_path
from vllm_mp.testing.engines import replay_core

PATHS = {"python": output_path.PYTHON, "compiled": output_path.COMPILED}


@pytest.fixture(scope="module")
def llm(default_model, tmp_path_factory):
    """A client of a replay core that makes 200 tokens in a second for each request."""
    with replay_core(tmp_path_factory.mktemp("replay"), "--rate", "200") as address:
        llm = AsyncLLM.connect(address)
        yield llm
        llm.shutdown()


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Use one of the two output paths; skip the compiled one if there was no compiler."""
    functions = PATHS[request.param]
    if functions is None:
        pytest.skip("the output path was not compiled: there was no C compiler")
    monkeypatch.setattr(output_path, "current", functions)
    return functions
