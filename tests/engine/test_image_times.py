"""tools/speed/prompts/image_times.py, run as a user runs it, in its short form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended
TOOL = Path(__file__).resolve().parents[2] / "tools" / "speed" / "prompts" / "image_times.py"


def test_second_question_and_encoding_are_measured():
    done = subprocess.run([sys.executable, TOOL, "--quick", "--json"], stdout=subprocess.PIPE, check=True, timeout=300)
    question, encoding = json.loads(done.stdout)
    assert (question["name"], encoding["name"]) == ("second question", "encoding")
    assert 0 < question["measured_s"] < question["base_s"]
    assert encoding["ratio"] > 0
