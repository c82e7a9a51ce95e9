"""Line breaks in an answer on a terminal, seen through a terminal emulator."""

import io
import itertools
import os
import pty
import sys
import termios

import pyte
import pytest

from vllm_mp.cli.terminal.screen import Screen
from vllm_mp.cli.terminal.word_wrap import WordWrap

TEXT = "A lighthouse keeper, who was well-known in his village, watched the sea\n\n* by day\n\tand   by night."


def lines_of(written, columns):
    """Return the lines of a terminal of `columns` after `written`."""
    screen = pyte.Screen(columns, 60)
    screen.set_mode(pyte.modes.LNM)
    pyte.Stream(screen).feed(written)
    return [line.rstrip() for line in screen.display]


@pytest.mark.parametrize("length", [1, 2, 7, len(TEXT)])
@pytest.mark.parametrize("columns", [12, 25, 33, 40, 80])
def test_words_are_whole_and_lines_are_full(columns, length):
    wrap = WordWrap()
    pieces = [TEXT[i : i + length] for i in range(0, len(TEXT), length)]
    written = "".join(wrap.wrapped(piece, columns) for piece in pieces) + wrap.released(columns)
    lines = lines_of(written, columns)
    if columns > 24:
        assert " ".join(lines).split() == TEXT.split()
    for line, following in itertools.pairwise(lines):
        if line and following and not following.startswith(("*", " ")):
            assert len(f"{line} {following.split()[0]}") > columns
    assert "".join(written.split()) == "".join(TEXT.split())


def test_word_is_shown_at_once_before_the_margin_and_when_complete_in_it():
    wrap = WordWrap()
    assert wrap.wrapped("Once up", 40) == "Once up"
    assert wrap.wrapped("on a time in a f", 40) == "on a time in a "
    assert wrap.wrapped("ar ", 40) == "far "
    assert wrap.wrapped("land", 29) + wrap.wrapped(" ", 29) == "\nland "


def test_word_longer_than_the_margin_is_broken_by_the_terminal():
    address = "https://example.org/" + "path/" * 30
    wrap = WordWrap()
    assert wrap.wrapped(f"See {address} there", 60) + wrap.released(60) == f"See {address} there"


def test_characters_of_two_columns_may_end_each_line():
    wrap = WordWrap()
    text = "日本" * 20
    written = wrap.wrapped("a " + text, 21) + wrap.released(21)
    assert written == f"a {text}"
    assert wrap.wrapped(" next", 21) + wrap.released(21) == " next"


def test_mark_within_an_answer_stays_on_one_line():
    for words in range(1, 40):
        wrap = WordWrap()
        mark = "· engine restarted, 1.6 s ·"
        written = wrap.wrapped("word " * words + "end", 40)
        written += wrap.released_before(mark, 40) + mark
        written += wrap.wrapped(" goes on.", 40) + wrap.released(40)
        assert sum(mark in line for line in lines_of(written, 40)) == 1
        assert " ".join(written.split()) == f"{'word ' * words}end {mark} goes on."


def test_screen_breaks_an_answer_between_words_and_dims_its_marks(monkeypatch):
    def shown_on_30_columns():
        master, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, 30))
        with os.fdopen(terminal, "w", encoding="utf-8") as output:
            monkeypatch.setattr(sys, "stdout", output)
            screen = Screen()
            screen.write("The fox jumped over the la")
            screen.write("ughing dog")
            screen.mark("· engine restarted ·")
            screen.write(" and\n")
            monkeypatch.undo()
            shown = b""
            while not shown.endswith(b" and\r\n"):  # a terminal may deliver what was written in parts
                shown += os.read(master, 4096)
        os.close(master)
        return shown.decode().replace("\r\n", "\n")

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert shown_on_30_columns() == "The fox jumped over the \nlaughing dog\n\x1b[2m· engine restarted ·\x1b[22m and\n"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown_on_30_columns() == "The fox jumped over the \nlaughing dog\n· engine restarted · and\n"


def test_in_a_pipe_an_answer_keeps_its_lines_and_marks_go_to_standard_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    screen = Screen()
    text = "The fox jumped over the laughing dog. " * 10
    screen.write(text)
    screen.mark("· engine restarted ·")
    assert sys.stdout.getvalue() == text
    assert capsys.readouterr().err == "· engine restarted ·\n"
