"""`vllm-mp bench tokenizer`, with little work."""

import json
from pathlib import Path

import pytest

from vllm_mp.cli import main


@pytest.mark.extended
def test_report_has_every_figure(tmp_path: Path) -> None:
    few = {"prompts": 20, "long-prompts": 2, "long-prompt-len": 500, "longest-text": 20_000, "rounds": 1}
    streams = {"streams": 8, "rate": 400, "seconds": 1}
    file = tmp_path / "figures.json"
    flags = [argument for name, value in {**few, **streams}.items() for argument in (f"--{name}", str(value))]
    assert main(["bench", "tokenizer", *flags, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert len(report["short prompts, s"]) == len(report["lone prompt, s"]) == 3
    lags = {**report["lag while tokenizing, ms"], "streams": report["lag with streams, ms"]}
    assert len(lags) == 4
    for lag in lags.values():
        assert 0 <= lag["p50"] <= lag["p99"] <= lag["max"]
