"""What a gateway tells on /metrics, and what queries ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.house.source import ROOT

DEPLOY = ROOT / "deploy"
#: Prometheus' own.
GIVEN = frozenset({"up"})
GIVEN_LABELS = frozenset({"instance", "job"})
_NAME = re.compile(r"\b(tangram_\w+|up)\b")
_SELECTOR = re.compile(r"\b(tangram_\w+)\{([^}]*)\}")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
_BY = re.compile(r"\bby \(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class Exposition:
    """Names of series, with the labels of each that has samples."""

    names: frozenset[str]
    labels: dict[str, frozenset[str]]


def told(text: str) -> Exposition:
    """Read an exposition: a family without a sample is told by its type."""
    names: set[str] = set()
    labels: dict[str, frozenset[str]] = {}
    for family in text_string_to_metric_families(text):
        match family.type:
            case "counter":
                names.add(f"{family.name}_total")
            case "histogram":
                names.update(f"{family.name}_{part}" for part in ("bucket", "sum", "count"))
            case _:
                names.add(family.name)
        for sample in family.samples:
            labels[sample.name] = labels.get(sample.name, frozenset()) | set(sample.labels)
    return Exposition(frozenset(names), labels)


def queries() -> dict[str, str]:
    """Each query of the alerts and the dashboard, by who asks it."""
    found = {f"alert {rule['alert']}": str(rule["expr"]) for rule in alerts()}
    for panel in panels():
        for target in panel.get("targets", ()):
            found[f"panel {panel['title']} {target['refId']}"] = str(target["expr"])
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            asked, _, label = str(variable["query"])[len("label_values(") : -1].rpartition(", ")
            found[f"variable {variable['name']}"] = f"count by ({label}) ({asked})"
    return found


def alerts() -> list[dict[str, Any]]:
    """Every rule of deploy/prometheus/alerts.yaml."""
    document = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    """The model that Grafana imports."""
    model: dict[str, Any] = json.loads((DEPLOY / "grafana" / "tangram.json").read_text())
    return model


def panels() -> list[dict[str, Any]]:
    return list(dashboard()["panels"])


def names_of(query: str) -> frozenset[str]:
    """The series that a query asks for."""
    return frozenset(_NAME.findall(query))


def labels_of(query: str) -> Iterator[tuple[str, str]]:
    """(series, label) for each label that a query selects or groups by."""
    for name, inside in _SELECTOR.findall(query):
        yield from ((name, label) for label, _ in _MATCHER.findall(inside))
    for grouped in _BY.findall(query):
        for label in grouped.split(","):
            yield from ((name, label.strip()) for name in names_of(query) - GIVEN)


def values_of(query: str, label: str) -> frozenset[str]:
    """The values of a label that a query names, alternatives of an expression each."""
    given = {value for _, inside in _SELECTOR.findall(query) for key, value in _MATCHER.findall(inside) if key == label}
    return frozenset(each for value in given for each in value.split("|") if not each.startswith("$"))
