"""Alerts and the dashboard ask for what a gateway tells: names, labels and their values."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from gateway.errors import ERROR_STATUSES
from manager.action import State
from manager.errors import Reason
from tests.deploy.metrics import (
    DEPLOY,
    GIVEN,
    GIVEN_LABELS,
    Exposition,
    labels_of,
    names_of,
    queries,
    told,
    values_of,
)
from tests.gateway.conftest import GatewayBench, serving
from tests.house.source import ROOT

QUERIES = queries()


@pytest.fixture
async def exposition(tmp_path: Path) -> AsyncIterator[Exposition]:
    """What a real gateway tells after a success, a failure and a refusal."""
    async with serving(GatewayBench(tmp_path)) as running:
        await running.invoke({})
        await running.invoke({"reason": "handler_error"})
        await running.invoke({}, function="nobody")
        yield told((await running.http.get("/metrics")).raise_for_status().text)


async def test_every_series_that_is_asked_for_is_told(exposition: Exposition) -> None:
    missing = {
        f"{who}: {name}" for who, query in QUERIES.items() for name in names_of(query) - GIVEN - exposition.names
    }
    assert not missing
    assert all(names_of(query) for query in QUERIES.values())


async def test_every_label_that_is_asked_for_is_one_of_its_series(exposition: Exposition) -> None:
    missing = {
        f"{who}: {name}{{{label}}}"
        for who, query in QUERIES.items()
        for name, label in labels_of(query)
        if label not in exposition.labels[name] | GIVEN_LABELS
    }
    assert not missing


def test_every_value_of_a_label_that_is_asked_for_is_one_that_there_is() -> None:
    known = {
        "state": {*(state.value for state in State), "total", "free"},
        "reason": {reason.value for reason in Reason},
        "code": set(ERROR_STATUSES),
    }
    strangers = {
        f"{who}: {label}={value}"
        for who, query in QUERIES.items()
        for label, values in known.items()
        for value in values_of(query, label) - values
    }
    assert not strangers


@pytest.fixture(scope="module")
def promtool() -> str:
    """Debian's, if the machine has it or its mirror can be reached; without, the test is skipped and says so."""
    try:
        found = subprocess.run([ROOT / ".ci" / "promtool"], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("no promtool: Debian's mirror does not answer")
    if found.returncode:
        pytest.skip(f"no promtool: {found.stderr.strip()[-200:]}")
    return found.stdout.strip()


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.xdist_group("promtool")
def test_promtool_accepts_the_rules_and_they_fire_when_they_should(promtool: str) -> None:
    folder = DEPLOY / "prometheus"
    for words in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts.test.yaml"]):
        done = subprocess.run([promtool, *words], cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.xdist_group("promtool")
def test_promtool_reads_every_query_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    asked = [query for who, query in QUERIES.items() if not who.startswith("alert")]
    rules = [
        {"record": f"dashboard:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(asked)
    ]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    words = [promtool, "check", "rules", "--lint=none", "rules.yaml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
