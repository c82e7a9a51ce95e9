"""tools/recordings/record_recovery.py as a user runs it, with a short story."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("forked_programs")

TOOL = Path(__file__).resolve().parents[2] / "tools" / "recordings" / "record_recovery.py"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.slow
def test_drawing_shows_the_text_of_both_cores_the_kill_and_the_pause(tmp_path):
    drawing = tmp_path / "recovery.svg"
    command = [sys.executable, str(TOOL), "--kill-after", "8", "--tokens", "24", "--output", str(drawing)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pause_s = float(re.search(r"paused for ([\d.]+) s", done.stdout)[1])
    root = ET.parse(drawing).getroot()
    drawn_s = float(re.search(r"([\d.]+) s later", root.findtext(f"{SVG}title"))[1])
    assert drawn_s == pytest.approx(pause_s, abs=0.06)  # both are rounded
    assert {span.get("class") for span in root.iter(f"{SVG}tspan")} == {"first", "second"}
    labels = list(root.itertext())
    killed_pid, next_pid = (label.split()[1] for label in labels if re.match(r"core \d+ ", label))
    assert killed_pid != next_pid
    assert f"kill -9 {killed_pid}" in labels
    assert "commit" in root.findtext(f"{SVG}desc")
