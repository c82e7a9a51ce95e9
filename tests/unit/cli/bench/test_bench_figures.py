"""The figures of benchmarks, and their progress."""

import argparse
import io
import os
import statistics
import sys

import pytest

from vllm_mp.cli.bench.flags import add_json_flag
from vllm_mp.cli.bench.load_generator import percentiles
from vllm_mp.cli.bench.progress import progress


@pytest.mark.parametrize("count", range(1, 12))
def test_percentiles_of_few_values_rise_from_the_median_to_the_highest_value(count):
    values = [float(7 * number % 11) for number in range(count)]
    median, p90, p99, highest = percentiles(values, (0.5, 0.9, 0.99, 1.0))
    assert median == statistics.median(values)
    assert median <= p90 <= p99 <= highest == max(values)


def test_percentiles_are_interpolated_between_values():
    assert percentiles([4.0, 2.0], (0.0, 0.25, 0.5, 0.9)) == pytest.approx([2.0, 2.5, 3.0, 3.8])


def test_percentiles_of_no_values_are_refused():
    with pytest.raises(ValueError, match="no values"):
        percentiles([], (0.5,))


@pytest.mark.parametrize("is_there", [True, False])
def test_file_for_figures_is_refused_at_once_if_it_cannot_be_written(is_there, tmp_path, monkeypatch, capsys):
    parser = argparse.ArgumentParser()
    add_json_flag(parser)
    file = tmp_path / "figures.json"
    assert parser.parse_args(["--json", str(file)]).json == file
    if is_there:
        file.touch()
    refused = file if is_there else tmp_path
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (refused, os.W_OK))
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", str(file)])
    assert f"--json: '{file}' cannot be written" in capsys.readouterr().err


def test_progress_of_a_benchmark_is_shown_on_a_terminal_only(monkeypatch, capfd):
    with progress("kills", 2) as count:
        count()
    assert capfd.readouterr() == ("", "")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("kills", 2) as count:
        count()
    assert "kills:   0%" in terminal.getvalue()
