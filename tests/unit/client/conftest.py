"""The fixture that runs a test with the output path in Python and with the compiled one."""

import pytest

from vllm_mp.client.outputs import output_path

PATHS = {"python": output_path.PYTHON, "compiled": output_path.COMPILED}


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Use one of the two output paths; skip the compiled one if there was no compiler."""
    functions = PATHS[request.param]
    if functions is None:
        pytest.skip("the output path was not compiled: there was no C compiler")
    monkeypatch.setattr(output_path, "current", functions)
    return functions
