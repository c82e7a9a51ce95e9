"""Tables, sizes and times that commands print."""

import sys

import pytest

from vllm_mp.cli.terminal.table import duration_text, print_table, size_text

ROWS = [("one", "1 MiB"), ("three", "3 MiB")]


def test_columns_are_as_wide_as_their_longest_cells(capsys):
    print_table(("NAME", "SIZE"), ROWS)
    assert capsys.readouterr().out == "NAME   SIZE\none    1 MiB\nthree  3 MiB\n"


@pytest.mark.parametrize(("columns", "is_block"), [(12, False), (11, True)])
def test_table_that_is_wider_than_the_terminal_becomes_blocks(columns, is_block, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("NAME", "SIZE"), ROWS)
    blocks = "NAME  one\nSIZE  1 MiB\n\nNAME  three\nSIZE  3 MiB\n"
    assert (capsys.readouterr().out == blocks) == is_block


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (541_638_656, "517 MiB"), (2**41, "2.0 TiB")],
)
def test_sizes_have_a_unit(num_bytes, text):
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 minute"), (7199, "1 hour"), (7200, "2 hours"), (2e5, "2 days")],
)
def test_times_have_the_largest_unit_that_fits(seconds, text):
    assert duration_text(seconds) == text
