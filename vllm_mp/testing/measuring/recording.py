"""What drawings of recordings share: their style, text that appears when it appeared, and where they come from."""

import datetime
import subprocess
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[3]
COLUMNS = 80
CHARACTER_PX, LINE_PX, MARGIN_PX = 8.43, 22, 24
WIDTH_PX = 2 * MARGIN_PX + int(COLUMNS * CHARACTER_PX)
HOLD_S = 5.0
"""Seconds that the whole text stays visible before the replay starts again."""

STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; white-space: pre }
.small { font-size: 12px; fill: #59636e }
.card { fill: #f6f8fa; stroke: #d1d9e0 }
.first { fill: #1f2328 } .second { fill: #0969da } .dimmed { fill: #59636e }
.bar1 { stroke: #1f2328 } .bar2 { stroke: #0969da } .head { stroke: #59636e }
.kill { fill: #cf222e; font-weight: bold } .pause { fill: #cf222e; fill-opacity: 0.12 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .small { fill: #9198a1 } .card { fill: #151b23; stroke: #3d444d }
  .first { fill: #f0f6fc } .second { fill: #4493f8 } .dimmed { fill: #9198a1 }
  .bar1 { stroke: #f0f6fc } .bar2 { stroke: #4493f8 } .head { stroke: #9198a1 }
  .kill { fill: #f85149 } .pause { fill: #f85149; fill-opacity: 0.25 }
}"""


def beginning(height: int, title: str, description: str) -> list[str]:
    """Return the first elements of a drawing: an SVG of `height` pixels with a card in it."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH_PX}" height="{height}" '
        f'viewBox="0 0 {WIDTH_PX} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(description)}</desc>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH_PX - 1}" height="{height - 1}" rx="8"/>',
    ]


def appearing(text: str, kind: str, time_s: float, total_s: float) -> str:
    """Return a span of the class `kind` that appears `time_s` after the start of a replay, which takes `total_s`."""
    share = min(0.999, time_s / total_s)
    return (
        f'<tspan class="{kind}">{escape(text)}<animate attributeName="fill-opacity" values="0;1" '
        f'keyTimes="0;{share:.4f}" calcMode="discrete" dur="{total_s:.2f}s" repeatCount="indefinite"/></tspan>'
    )


def provenance(dtype: str) -> str:
    """Return model, processor, date and commit of this run."""
    env = _output([sys.executable, "-m", "vllm_mp.cli", "env"]).splitlines()
    processor = next(line.removeprefix("cpu").strip() for line in env if line.startswith("cpu "))
    commit = _output(["git", "rev-parse", "--short", "HEAD"]) or "unknown"
    date = datetime.datetime.now(datetime.UTC).date()
    return f"SmolLM2-135M-Instruct, {dtype}, {processor}, {date}, commit {commit}"


def _output(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
