"""docs/howto/watch-it.md and its dashboard are about what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import structlog

import penstock

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "watch-it.md").read_text()
DASHBOARD = json.loads((ROOT / "docs" / "howto" / "grafana.json").read_text())


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def metrics() -> set[str]:
    """The names of what a registry has."""
    prometheus = pytest.importorskip("prometheus_client")
    from penstock.telemetry import PrometheusMetrics

    registry = prometheus.CollectorRegistry()
    PrometheusMetrics(registry)
    families = registry.collect()
    return {f"{each.name}_total" if each.type == "counter" else each.name for each in families}


def test_every_metric_is_on_the_page() -> None:
    listed = set(re.findall(r"^\| `(penstock_\w+)`", PAGE, re.MULTILINE))

    assert listed == metrics()


def test_the_dashboard_asks_for_metrics_that_there_are_and_for_all_of_them() -> None:
    asked = re.findall(r"penstock_\w+", json.dumps(DASHBOARD["panels"]))

    assert {re.sub(r"_bucket$", "", name) for name in asked} == metrics()
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"penstock": penstock, "state": {"w": np.ones(10)}}

    async def run() -> None:
        for code in blocks("python"):
            body = "".join(f"    {line}\n" for line in code.splitlines())
            exec(f"async def example():\n{body}    globals().update(locals())\n", names)
            await names["example"]()
            if "structlog.configure(" in code:
                await penstock.save("told_by_structlog", names["state"])
                structlog.reset_defaults()

    anyio.run(run)
    text = prometheus.generate_latest(names["registry"]).decode()
    assert 'penstock_operations_total{operation="save"} 1.0' in text
    assert "is the bottleneck" in names["notes"].lines[0]
    written = capsys.readouterr()
    for stream in (written.out, written.err):  # of structlog, then of `logging`
        lines = [json.loads(line) for line in stream.splitlines()]
        (finalized,) = [line for line in lines if line["event"] == "save.finalized"]
        assert (finalized["nbytes"], finalized["level"]) == (80, "info")
        assert set(finalized) >= set(json.loads(blocks("json")[0])) - {"logger", "timestamp"}
