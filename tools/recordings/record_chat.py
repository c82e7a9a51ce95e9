"""Record a chat that survives a kill of its core, and draw it as docs/using/chat.svg.

    python tools/recordings/record_chat.py
    python tools/recordings/record_chat.py --message "Tell me a story about a fox." --kill-after 300 --output chat.svg

`vllm-mp chat` runs with the default model on a terminal of 80 columns. The message is typed, and in the middle of the
answer the core gets SIGKILL. The drawing replays the terminal in real time: each character appears when it appeared
there. The exit code is 1 if the chat did not go on. A viewer that does not animate SVG shows the last screen.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import psutil
import pyte

from vllm_mp.testing.measuring.recording import (
    COLUMNS,
    HOLD_S,
    LINE_PX,
    MARGIN_PX,
    ROOT,
    WIDTH_PX,
    appearing,
    beginning,
    provenance,
)
from vllm_mp.testing.terminal import EmulatedTerminal

_LINES = 40
_KEY_S = 0.05
"""Seconds between two keys."""
_SHOWN_S = 0.8
"""Seconds for which the welcome is seen before the first key."""


class Cell(NamedTuple):
    """A character on the screen that is no blank."""

    character: str
    is_dimmed: bool
    time_s: float
    """When it appeared, since the start of the recording."""


class _Screen(pyte.Screen):
    """A screen that keeps dimmed characters apart. pyte drops this attribute, so it is kept as italics."""

    def select_graphic_rendition(self, *attributes: int, **options: bool) -> None:
        as_italics = {2: 3, 22: 23}
        super().select_graphic_rendition(*(as_italics.get(attribute, attribute) for attribute in attributes), **options)


class RecordedTerminal(EmulatedTerminal):
    """A terminal that notes when each character of its screen has appeared."""

    def __init__(self, arguments: list[str], **environment: str) -> None:
        super().__init__(arguments, (_LINES, COLUMNS), **environment)
        self.screen = _Screen(COLUMNS, _LINES)
        self._stream = pyte.ByteStream(self.screen)
        self._started = time.monotonic()
        self.rows: list[list[Cell | None]] = [[None] * COLUMNS for _ in range(_LINES)]

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def restart_clock(self) -> None:
        """Let the recording begin now; what is on the screen was there from the start."""
        self._started = time.monotonic()
        self.rows = [[cell and cell._replace(time_s=0.0) for cell in row] for row in self.rows]

    def show(self, data: bytes) -> None:
        now = self.elapsed_s()
        super().show(data)
        for y in self.screen.dirty:
            for x, known in enumerate(self.rows[y]):
                seen = self.screen.buffer[y][x]
                if seen.data == " ":
                    self.rows[y][x] = None
                elif known is None or (known.character, known.is_dimmed) != (seen.data, seen.italics):
                    self.rows[y][x] = Cell(seen.data, seen.italics, now)
        self.screen.dirty.clear()

    def type_slowly(self, text: str) -> None:
        for key in text:
            self.type(key)
            self.wait(_KEY_S)

    def wait(self, seconds: float) -> None:
        """Show for so long what the command writes."""
        deadline = time.monotonic() + seconds
        while (data := self.read(deadline)) is not None:
            self.show(data)


class Recording(NamedTuple):
    rows: list[list[Cell | None]]
    killed_s: float
    killed_pid: int
    next_pid: int
    end_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--message", default="Why is the sea salty?")
    parser.add_argument("--kill-after", type=int, default=150, help="characters of the answer before the kill (150)")
    parser.add_argument("--seed", type=int, default=2, help="seed of the chat (2)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/using/chat.svg", help="where to write the drawing")
    args = parser.parse_args()
    arguments = ["chat", "--seed", str(args.seed)]
    recording = _record(arguments, args.message, args.kill_after)
    text = "\n".join(_text(row) for row in recording.rows)
    mark = re.search(r"· the engine restarts … (\d+\.\d) s ·", text)
    if mark is None or recording.next_pid == recording.killed_pid:
        print(f"the chat did not go on:\n{text}", file=sys.stderr)
        return 1
    command = " ".join(["vllm-mp", *arguments])
    args.output.write_text(draw(recording, command, float(mark[1]), provenance("bfloat16")))
    print(f"{args.output}: the chat paused for {mark[1]} s")
    return 0


def _record(arguments: list[str], message: str, kill_after: int) -> Recording:
    with (
        tempfile.TemporaryDirectory(prefix="record-chat-") as state,
        RecordedTerminal(arguments, XDG_STATE_HOME=state) as terminal,
    ):
        terminal.until_prompt(1)
        terminal.restart_clock()
        terminal.wait(_SHOWN_S)
        terminal.type_slowly(message)
        num_before = sum(map(len, terminal.lines))
        terminal.type("\r")
        terminal.until(lambda lines: sum(map(len, lines)) > num_before + kill_after)
        killed_pid = _core_of(terminal)
        os.kill(killed_pid, signal.SIGKILL)
        killed_s = terminal.elapsed_s()
        terminal.until_prompt(2)
        return Recording(terminal.rows, killed_s, killed_pid, _core_of(terminal), terminal.elapsed_s())


def _core_of(terminal: RecordedTerminal) -> int:
    children = psutil.Process(terminal.process.pid).children()
    [core] = [child for child in children if not child.name().startswith("core-")]
    return core.pid


def _text(row: list[Cell | None]) -> str:
    return "".join(" " if cell is None else cell.character for cell in row).rstrip()


def _cells(row: list[Cell | None]) -> list[Cell]:
    """Return the cells of a row up to its last character; a blank appears with the character that follows it."""
    cells: list[Cell] = []
    for cell in reversed(row):
        if cell is not None or cells:
            cells.append(cell or cells[-1]._replace(character=" "))
    return cells[::-1]


def draw(recording: Recording, command: str, pause_s: float, source: str) -> str:
    """Return the recording as an animated SVG: the terminal, and below it what was done in another terminal."""
    total_s = recording.end_s + HOLD_S
    rows = recording.rows[: 1 + max(y for y, row in enumerate(recording.rows) if _text(row))]
    below_y = MARGIN_PX + (len(rows) + 2.4) * LINE_PX
    parts = [
        *beginning(
            below_y + 3 * LINE_PX,
            f"A chat goes on after kill -9 of its core, {pause_s:.1f} s later",
            f"{source}; drawn by tools/recordings/record_chat.py",
        ),
        f'<text x="{MARGIN_PX}" y="{MARGIN_PX + 8}">$ {escape(command)}</text>',
    ]
    for y, row in enumerate(rows, 1):
        runs = groupby(_cells(row), key=lambda cell: (cell.is_dimmed, cell.time_s))
        spans = [
            appearing("".join(cell.character for cell in run), "dimmed" if is_dimmed else "first", time_s, total_s)
            for (is_dimmed, time_s), run in runs
        ]
        parts.append(f'<text x="{MARGIN_PX}" y="{MARGIN_PX + 8 + y * LINE_PX}">{"".join(spans)}</text>')
    kill = appearing(f"kill -9 {recording.killed_pid}", "kill", recording.killed_s, total_s)
    caption = "# the core of the chat"
    parts += [
        f'<path class="card" d="M0 {below_y - 1.2 * LINE_PX:.0f}h{WIDTH_PX}"/>',
        f'<text class="small" x="{MARGIN_PX}" y="{below_y}">another terminal</text>',
        f'<text x="{MARGIN_PX}" y="{below_y + LINE_PX}">$ {kill} '
        f"{appearing(caption, 'dimmed', recording.killed_s, total_s)}</text>",
        f'<text class="small" x="{MARGIN_PX}" y="{below_y + 2 * LINE_PX}">{escape(source)}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
