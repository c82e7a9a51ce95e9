"""What users read about the metrics: the table in the docs, and the dashboard for Grafana."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/operating/metrics.md"
DASHBOARD = ROOT / "deploy/grafana/dashboards/vllm_mp.json"


@pytest.fixture
def families(in_process) -> list[Any]:
    """The metrics of a server that has answered a request and refused another."""

    async def run() -> str:
        async with in_process() as client:
            body = {"prompt": [1, 2], "max_tokens": 3, "unknown": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert (await client.get("/nowhere")).status_code == 404
            return (await client.get("/metrics")).text

    return list(text_string_to_metric_families(asyncio.run(run())))


def found_in(value: Any, key: str) -> list[str]:
    """Return the strings under `key` anywhere in `value`."""
    if isinstance(value, list):
        return [found for item in value for found in found_in(item, key)]
    if not isinstance(value, dict):
        return []
    own = [value[key]] if isinstance(value.get(key), str) else []
    return own + found_in(list(value.values()), key)


def test_the_table_in_the_docs_has_every_metric_with_its_type_and_labels(families):
    rows = re.findall(r"^\| `(vllm\S*)` \| (\w+) \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    in_docs = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    common = {"model_name", "engine", "le"}
    served = {
        family.name: (family.type, {label for sample in family.samples for label in sample.labels} - common)
        for family in families
    }
    assert len(rows) == len(in_docs)
    assert in_docs == served


def test_every_metric_and_label_in_the_dashboard_exists(families):
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    expressions = found_in(json.loads(DASHBOARD.read_text()), "expr")
    assert len(expressions) > 40
    for expression in expressions:
        used = re.findall(r"(vllm(?:_mp)?:\w+)\{([^}]*)\}", expression)
        assert used, expression
        for name, selector in used:
            assert name in labels, expression
            # Prometheus adds the label `instance`.
            wanted = set(re.findall(r"(\w+)=", selector)) - {"instance"}
            wanted |= {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
            assert wanted <= labels[name], expression


def test_the_panels_of_the_dashboard_have_ids_of_their_own_and_do_not_overlap():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
