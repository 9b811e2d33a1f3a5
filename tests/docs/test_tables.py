"""The page of metrics holds what the registry tells."""

from __future__ import annotations

from pathlib import Path

from gateway.metrics import reference
from tests.gateway.conftest import GatewayBench, serving
from tests.house.source import ROOT

REFERENCE = ROOT / "docs" / "reference"


async def test_the_page_of_metrics_holds_every_metric_of_a_gateway(tmp_path: Path) -> None:
    traces = {"endpoint": "http://127.0.0.1:9/v1/traces", "share": 0}
    async with serving(GatewayBench(tmp_path, server={"traces": traces})) as gateway:
        await gateway.invoke({})
        await gateway.invoke({}, function="nope")
        table = reference(gateway.app.metrics.registry)
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    assert page.endswith(table), f"it is to end with:\n{table}"
    assert table.count("\n") > 30
