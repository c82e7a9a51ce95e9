"""The fixtures of tests of the client: a client of a replay core, its input alone, and both output paths."""

import shutil

import pytest

from vllm_mp import AsyncLLM, EngineArgs
from vllm_mp.client.cores.sources.runtime_folder import make_folder
from vllm_mp.client.engine.input_processor import InputProcessor
from vllm_mp.client.outputs import output_path
from vllm_mp.testing.engines import replay_core
from vllm_mp.testing.random_models import CONFIGS, save_config

PATHS = {"python": output_path.PYTHON, "compiled": output_path.COMPILED}


@pytest.fixture(scope="module")
def llm(default_model, tmp_path_factory):
    """A client of a replay core that makes 200 tokens in a second for each request."""
    with replay_core(tmp_path_factory.mktemp("replay"), "--rate", "200") as address:
        llm = AsyncLLM.connect(address)
        yield llm
        llm.shutdown()


@pytest.fixture
def input_processor(tmp_path):
    """A function that returns the input processor of a new client, for options of its engine."""
    folder = save_config(CONFIGS["llama"], tmp_path)

    def made(**options):
        args = EngineArgs(str(folder), load_format="dummy", skip_tokenizer_init=True, **options)
        return InputProcessor(args.create_engine_config(), None)

    return made


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Use one of the two output paths; skip the compiled one if there was no compiler."""
    functions = PATHS[request.param]
    if functions is None:
        pytest.skip("the output path was not compiled: there was no C compiler")
    monkeypatch.setattr(output_path, "current", functions)
    return functions


@pytest.fixture
def socket_folder():
    """A folder in which the path of a socket is not too long, as it may be in `tmp_path`."""
    folder = make_folder()
    yield folder
    shutil.rmtree(folder)
