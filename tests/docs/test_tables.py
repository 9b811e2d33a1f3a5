"""The pages of bounds and of metrics hold what the configuration declares and the registry tells."""

from __future__ import annotations

from pathlib import Path

from gateway.config.reference import TOLD, bounds, limits_markdown
from gateway.metrics import reference
from tests.gateway.conftest import GatewayBench, serving
from tests.house.source import ROOT

REFERENCE = ROOT / "docs" / "reference"


def test_the_page_of_limits_holds_every_bound_of_the_configuration() -> None:
    page = (REFERENCE / "limits.md").read_text(encoding="utf-8")
    assert page.endswith(limits_markdown()), "write gateway.config.reference.limits_markdown() there"
    places = {path for path, _ in bounds()}
    assert TOLD.keys() <= places, "each is a setting that there is"
    assert {"sandbox.memory", "server.body_limit", "scheduler.max_queued", "functions.NAME.timeout"} <= places


async def test_the_page_of_metrics_holds_every_metric_of_a_gateway(tmp_path: Path) -> None:
    traces = {"endpoint": "http://127.0.0.1:9/v1/traces", "share": 0}
    async with serving(GatewayBench(tmp_path, server={"traces": traces})) as gateway:
        await gateway.invoke({})
        await gateway.invoke({}, function="nope")
        table = reference(gateway.app.metrics.registry)
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    assert page.endswith(table), f"it is to end with:\n{table}"
    assert table.count("\n") > 30
