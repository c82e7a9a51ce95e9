"""The log of a program as text and as JSON."""

import json
import subprocess
import sys

import pytest

from vllm_mp import AsyncEngineArgs, AsyncLLM

PROGRAM = """
import logging
from vllm_mp.machine.log_setup import set_up_core_log, set_up_log
{set_up}
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("vllm_mp.x").warning("a %s", "line", exc_info=True)
"""


def log_of(set_up: str, **environment: str) -> str:
    command = [sys.executable, "-c", PROGRAM.format(set_up=set_up)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(
    ("set_up", "environment"),
    [("set_up_log(True, 'json')", {}), ("set_up_core_log('core')", {"VLLM_MP_LOG_FORMAT": "json"})],
    ids=["flag", "environment"],
)
def test_each_line_is_an_object(set_up, environment, monkeypatch):
    [line] = log_of(set_up, PYTHONPATH=":".join(sys.path), **environment).splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"]) == ("WARNING", "vllm_mp.x", "a line")
    assert "ZeroDivisionError" in entry["exception"]
    assert entry.get("program") == ("core" if environment else None)


@pytest.mark.parametrize(
    "environment", [{}, {"VLLM_MP_LOG_LEVEL": "", "VLLM_MP_LOG_FORMAT": ""}], ids=["unset", "empty"]
)
def test_text_is_the_default(environment):
    assert "WARNING core: a line" in log_of("set_up_core_log('core')", PYTHONPATH=":".join(sys.path), **environment)


@pytest.mark.parametrize(
    ("variable", "value", "values"),
    [
        ("VLLM_MP_LOG_FORMAT", "xml", "text, json"),
        ("VLLM_MP_LOG_LEVEL", "loud", "DEBUG, INFO, WARNING, ERROR, CRITICAL"),
    ],
)
def test_wrong_variable_is_named_by_programs_and_before_a_core_starts(
    variable, value, values, monkeypatch, small_model
):
    message = f"{variable} must be one of {values}, got '{value}'"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        log_of("set_up_log()", PYTHONPATH=":".join(sys.path), **{variable: value})
    assert message in failed.value.stderr
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(small_model), device="cpu"))
