"""The log of a program as text and as JSON."""

import json
import subprocess
import sys

import pytest

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


def test_text_is_the_default():
    assert "WARNING core: a line" in log_of("set_up_core_log('core')", PYTHONPATH=":".join(sys.path))


def test_unknown_format_is_refused(monkeypatch):
    with pytest.raises(subprocess.CalledProcessError) as failed:
        log_of("set_up_log()", PYTHONPATH=":".join(sys.path), VLLM_MP_LOG_FORMAT="xml")
    assert "VLLM_MP_LOG_FORMAT must be one of text, json, got 'xml'" in failed.value.stderr
