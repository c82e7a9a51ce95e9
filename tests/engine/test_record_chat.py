"""tools/recordings/record_chat.py as a user runs it."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("forked_programs")

TOOL = Path(__file__).resolve().parents[2] / "tools" / "recordings" / "record_chat.py"
SVG = "{http://www.w3.org/2000/svg}"


def appearance(line, text):
    """Return when the span of a line that has `text` appears, as a share of the time of the replay."""
    [span] = [span for span in line.iter(f"{SVG}tspan") if text in span.text]
    return float(span.find(f"{SVG}animate").get("keyTimes").split(";")[1])


@pytest.mark.slow
def test_drawing_shows_the_chat_with_its_pause_and_the_kill_in_their_order(tmp_path):
    drawing = tmp_path / "chat.svg"
    command = [sys.executable, str(TOOL), "--kill-after", "20", "--output", str(drawing)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pause = re.search(r"paused for ([\d.]+ s)", done.stdout)[1]
    root = ET.parse(drawing).getroot()
    assert f"{pause} later" in root.findtext(f"{SVG}title")
    lines = {"".join(line.itertext()).strip(): line for line in root.iter(f"{SVG}text")}
    [message, answer] = [
        line for text, line in lines.items() if text == "> Why is the sea salty?" or "· the engine" in text
    ]
    [kill] = [line for text, line in lines.items() if re.fullmatch(r"\$ kill -9 \d+ # the core of the chat", text)]
    assert "$ vllm-mp chat --seed 2" in lines
    assert f"· the engine restarts … {pause} ·" in "".join(answer.itertext())
    typed, killed, marked = (
        appearance(line, text) for line, text in ((message, "?"), (kill, "kill"), (answer, "restarts"))
    )
    assert 0 < typed < killed < marked < 1
