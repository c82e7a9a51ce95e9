"""A program that imports `vllm` runs with this package in its place."""

import json
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import importlib.metadata, importlib.util, json, sys
    import vllm, vllm.v1.engine.async_llm as module
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    import vllm_mp, vllm_mp.lora.request
    try:
        import vllm.platforms
    except ImportError as error:
        refused = str(error)
    try:
        from vllm import nothing
    except ImportError as error:
        missing = str(error)
    own = [vllm_mp.LLM, vllm_mp.lora.request.LoRARequest, vllm_mp.v1.engine.async_llm]
    print(json.dumps({
        "same": [found is expected for found, expected in zip([LLM, LoRARequest, module], own)],
        "versions": [vllm.__version__, importlib.metadata.version("vllm")],
        "spec": vllm_mp.lora.request.__spec__.name,
        "found": [bool(importlib.util.find_spec(name)) for name in ("vllm", "vllm.entrypoints.llm", "vllm.nothing")],
        "run": [__name__, sys.argv[1:]],
        "refused": refused,
        "missing": missing,
    }))
"""


@pytest.mark.parametrize("as_module", [False, True], ids=["file", "module"])
def test_program_finds_this_package_under_the_other_name(tmp_path, as_module):
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    command = ["-m", "program"] if as_module else ["program.py"]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_mp.as_vllm", *command, "--flag", "x"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"] == [True] * 3
    assert found["versions"] == ["0.33.0"] * 2
    assert found["spec"] == "vllm_mp.lora.request"
    assert found["found"] == [True, True, False]
    assert found["run"] == ["__main__", ["--flag", "x"]]
    assert "the module platforms of vLLM is not in vllm_mp: the option device" in found["refused"]
    assert "nothing" in found["missing"]


def test_command_without_a_program_says_how_it_is_used():
    done = subprocess.run([sys.executable, "-m", "vllm_mp.as_vllm"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "usage: python -m vllm_mp.as_vllm" in done.stderr
