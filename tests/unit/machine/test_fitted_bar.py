"""Lines of progress on terminals of several widths: none wraps, and none is cut within a number."""

import contextlib
import os
import pty
import re
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from vllm_mp.cli.bench.progress import progress
from vllm_mp.cli.terminal.waiting_line import WaitingLine
from vllm_mp.client.blocking.progress_bar import ProgressBar
from vllm_mp.machine.fitted_bar import FittedBar
from vllm_mp.machine.terminal_width import shortened, terminal_columns
from vllm_mp.model_store.progress import Progress
from vllm_mp.outputs import CompletionOutput, RequestOutput

WIDTHS = [40, 80, 200]
NAME = "SmolLM2-135M-Instruct-Q8_0.gguf"
PART = re.compile(r"\s*(\d+%(\|.*\||)|\d\d:\d\d|\d+/\d+|\d+|\[[\d:?]+(<[\d:?]+)?(, .+)?\])")
"""A part of a bar that is complete."""


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Iterator[Callable[[], list[str]]]:
    """Make standard error a terminal. Yield a function that returns the lines drawn since the start, without spaces."""
    master, end = pty.openpty()
    termios.tcsetwinsize(end, (24, columns))
    shown: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the terminal is closed
            while data := os.read(master, 65_536):
                shown.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(end, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        yield lambda: [line.rstrip() for line in re.split(r"[\r\n]+", drawn(shown)) if line.strip()]
        monkeypatch.undo()
    thread.join()
    os.close(master)


def drawn(shown: list[bytes]) -> str:
    return b"".join(shown).decode(errors="ignore").replace("\x1b[K", "")


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def output_of(num_tokens: int) -> RequestOutput:
    return RequestOutput("a", "", list(range(50)), None, [CompletionOutput(0, "", list(range(num_tokens)))], True)


def assert_whole(line: str, columns: int, description: str) -> None:
    """Fail if the line is too long, or if after its description it has anything but complete parts."""
    assert len(line) <= columns
    words = line
    for length in range(len(description), 0, -1):
        if line.startswith(description[:length]):
            words = line[length:]
            break
    rest = words.lstrip("…: ")
    while match := PART.match(rest):
        rest = rest[match.end() :]
    assert rest.strip() == "", line


@pytest.mark.parametrize("columns", WIDTHS)
def test_bar_of_a_conversion_or_a_download_fits(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    text = f"converting {NAME} (145 MB, format 16) to safetensors (once)"
    with terminal(monkeypatch, columns) as lines:
        with Progress().task(text) as show:
            show(0.5)
        wait_for(lambda: any("100%" in line for line in lines()))
        for line in lines():
            assert_whole(line, columns, text)
        assert lines()[-1].startswith(f"converting {NAME}"[: columns - 6])
        if columns == 200:
            assert lines()[-1].startswith(f"{text} 100%|█")


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("total", [10_000, None])
def test_bar_of_a_batch_fits(monkeypatch: pytest.MonkeyPatch, columns: int, total: int | None) -> None:
    with terminal(monkeypatch, columns) as lines:
        bar = ProgressBar(True, total)
        for _ in range(3):
            bar.add(output_of(1000))
            bar.refresh()
        bar.close()
        wait_for(lambda: lines()[-1:] and re.search(r"\b3(/| \[)", lines()[-1]))
        for line in lines():
            assert_whole(line, columns, "Processed prompts")
        assert ("toks/s" in lines()[-1]) == (columns > 40 or total is None)
        assert ("est. speed input" in lines()[-1]) == (columns == 200)


@pytest.mark.parametrize("columns", WIDTHS)
def test_bar_of_a_benchmark_fits(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    with terminal(monkeypatch, columns) as lines, progress("requests of the load", 100_000) as count:
        count()
        wait_for(lambda: any("/100000" in line for line in lines()))
        for line in lines():
            assert_whole(line, columns, "requests of the load")


@pytest.mark.parametrize("columns", WIDTHS)
def test_line_that_waits_fits_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr("vllm_mp.cli.terminal.waiting_line._FIRST_S", 0.0)
    monkeypatch.setattr("vllm_mp.cli.terminal.waiting_line._INTERVAL_S", 0.01)
    text = f"loading /a/folder/of/models/{NAME * 2}"
    with terminal(monkeypatch, columns) as lines, WaitingLine(text):
        wait_for(lambda: len(lines()) > 3)
        for line in lines()[:-1]:  # the last one may not have arrived as a whole
            assert len(line) <= columns
            assert re.fullmatch(r"loading /a/folder\S* … \d\.\d s", line)


def test_bar_of_the_caller_keeps_its_form_where_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    form = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt} of {total_fmt} and many more words about it"
    for columns, expected in ((120, "of 4.00k and many"), (70, "2.00k/4.00k ["), (40, "2.00k/4.00k")):
        with terminal(monkeypatch, columns) as lines:
            bar = FittedBar(total=4000, desc="Reconstructing", bar_format=form, unit="B", unit_scale=True)
            bar.update(2000)
            bar.refresh()
            bar.close()
            wait_for(lambda lines=lines: any("2.00k" in line for line in lines()))
            assert expected in lines()[-1]
            assert len(lines()[-1]) <= columns


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        ("short", 5, "short"),
        ("two words", 8, "two…"),
        ("a-very-long-word", 8, "a-very-…"),
        ("weights of 145 MB", 14, "weights of…"),
        ("model-1.25.gguf", 9, "model-…"),
        ("word", 1, "…"),
        ("word", 0, ""),
        ("word", -3, ""),
    ],
)
def test_shortened_text_ends_between_words_or_before_a_number(text: str, columns: int, expected: str) -> None:
    assert shortened(text, columns) == expected


def test_terminal_of_unknown_width_has_80_columns(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    with terminal(monkeypatch, 0):
        assert terminal_columns(sys.stderr) == 80
    with (tmp_path / "file").open("w") as file:
        assert terminal_columns(file) == 80
    assert terminal_columns(None) == 80
