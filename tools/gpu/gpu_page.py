#!/usr/bin/env python3
"""Write the results of tools/gpu_check.py as one HTML page with tables and plots.

    python tools/gpu/gpu_page.py kernels.json fp8.json bf16.json --out gpu.html

Each file is a section of the page, in the order of the command. It needs matplotlib (the extra `bench`), no GPU.
"""

import argparse
import html
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from vllm_mp.machine.file_owner import write_output
from vllm_mp.testing.measuring.gpu_report import table

_HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>GPU check</title>'
    "<style>body {font: 16px sans-serif; margin: 2em} pre {overflow-x: auto}</style>"
)


def page(reports: dict[str, dict[str, Any]]) -> str:
    """Return the page for these findings by title."""
    return _HEAD + "".join(
        f"<h1>{html.escape(title)}</h1><pre>{html.escape(table(found))}</pre>{''.join(map(_svg, plots(found)))}"
        for title, found in reports.items()
    )


def plots(found: dict[str, Any]) -> Iterator[Figure]:
    """Yield a plot of the engines' shares of the device's limits, and one of the products, as far as there are any."""
    shares = {
        f"{name}, {kind} {figure[size]}": 100 * max(figure["share_of_bandwidth"], figure["share_of_matrix_rate"])
        for name, record in found["benchmarks"].items()
        for kind, size in (("decode", "batch"), ("prefill", "prompt_len"))
        for figure in record[kind]
        if figure["share_of_bandwidth"] is not None
    }
    if shares:
        figure = Figure(figsize=(9, 1 + 0.3 * len(shares)), layout="constrained")
        axes = figure.subplots()
        axes.barh(list(shares), list(shares.values()))
        axes.invert_yaxis()
        axes.set_xlabel("share of the nearer limit of the device, %")
        yield figure
    if found["linear"]:
        yield _products(found["linear"])


def _products(products: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(product["product"] for product in products):
        of_name = [product for product in products if product["product"] == name]
        rows = [product["rows"] for product in of_name]
        for field, title, line in (("share_of_bandwidth", "16 bits", "-"), ("fp8_share_of_bandwidth", "8 bits", "--")):
            axes.plot(rows, [100 * product[field] for product in of_name], line, label=f"{name}, {title}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows")
    axes.set_ylabel("share of the bandwidth, %")
    axes.legend(fontsize="small")
    return figure


def _svg(figure: Figure) -> str:
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="files that tools/gpu_check.py has written")
    parser.add_argument("--out", type=Path, required=True, help="the page to write")
    args = parser.parse_args()
    write_output(args.out, page({path.stem: json.loads(path.read_text()) for path in args.results}))


if __name__ == "__main__":
    main()
