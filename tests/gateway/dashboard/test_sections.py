"""Sections: the verdict says for what most wait, and names stay bounded."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dashboard.stream import Names, Troubles, sections, verdict
from gateway.stats import Stats


def seen(**given: object) -> dict[str, Any]:
    pools = {
        "cpu:n0": {"kind": "cpu", "total": 4, "free": 0},
        "cpu:n1": {"kind": "cpu", "total": 8, "free": 2},
        "search": {"kind": "search", "total": 10, "free": 0, "timed": True},
    }
    return {"running": 4, "waiting": 0, "causes": [], "pools": pools} | given


def cause(kind: str, count: int, pool: str = "") -> dict[str, object]:
    return {"kind": kind, "pool": pool, "count": count}


@pytest.mark.parametrize(
    ("given", "code", "told"),
    [
        ({"running": 0}, "idle", "nothing runs"),
        ({}, "ok", "4 running"),
        ({"waiting": 9, "causes": [cause("units", 7, "cpu:n0"), cause("trajectory", 2)]}, "units", "7 of 9"),
        ({"waiting": 9, "causes": [cause("units", 7, "cpu:n0")]}, "units", "wait for cores; 10 of 12 are busy"),
        ({"waiting": 5, "causes": [cause("quota", 5, "search")]}, "quota", "for search; 10 of 10 are used up"),
        ({"waiting": 5, "causes": [cause("memory", 5, "node:n0")]}, "memory", "wait for memory"),
        ({"waiting": 5, "causes": [cause("trajectory", 5)]}, "waiting", "earlier actions"),
        ({"waiting": 1}, "waiting", "0 of 1"),
        ({"waiting": 50, "causes": [cause("trajectory", 40), cause("units", 6, "cpu:n0")]}, "units", "6 of 50"),
        ({"waiting": 50, "causes": [cause("trajectory", 46), cause("units", 4, "cpu:n0")]}, "waiting", "46 of 50"),
        (
            {"waiting": 50, "causes": [cause("turn", 30), cause("trajectory", 18), cause("units", 2, "cpu:n0")]},
            "units",
            "32 of 50",
        ),
    ],
)
def test_the_verdict_names_what_most_wait_for(given: dict[str, object], code: str, told: str) -> None:
    found, text = verdict(seen(**given), Troubles(), {"f": ("ready", "")}, 0)
    assert found == code and told in text and "rate" not in text


def test_the_verdict_tells_when_what_waits_has_begun_where_a_rate_is_known() -> None:
    waits = seen(waiting=60, causes=[cause("units", 60, "cpu:n0")])
    assert verdict(waits, Troubles(), {}, 120)[1].endswith("At the present rate they have begun in about 30 s")
    assert verdict(waits, Troubles(), {}, 10)[1].endswith("in about 6 min")
    assert "rate" not in verdict(waits, Troubles(), {}, 9)[1], "too few to tell"


def test_what_stops_the_gateway_comes_before_everything_else() -> None:
    functions = {"f": ("unavailable", "image missing")}
    lost = Troubles(lost=["n1", "n2"])
    assert verdict(seen(), Troubles("draining"), functions, 0) == ("draining", "draining")
    assert verdict(seen(), lost._replace(stopped="the disk is full"), functions, 0)[0] == "stopped"
    assert verdict(seen(), lost, functions, 0) == ("lost", "n1 was lost, and 1 more; 4 running, 0 waiting")
    assert verdict(seen(), Troubles(), functions, 0) == ("unavailable", "f: image missing")


@pytest.mark.parametrize(
    ("kind", "wanted", "shown"), [("cpu", set(), False), ("cpu", {"gpu"}, True), ("cuda", set(), True)]
)
def test_devices_of_a_processor_are_shown_where_a_function_wants_some(kind: str, wanted: set[str], shown: bool) -> None:
    device = {"memory_bytes": 2, "used_bytes": 1, "resident": [{"service": "teacher", "dop": 1, "bytes": 1}]}
    pool = {
        "kind": "gpu",
        "node": "",
        "total": 1,
        "free": 1,
        "cells": [],
        "devices": [device],
        "hits": 3,
        "restores": 1,
    }
    glance = seen(causes_left_out=0, nodes={}, tasks={}, longest=[], trajectories={})
    glance["pools"] = {"gpu": {**pool, "regions": {"n0": [0, 1, kind]}}}
    stats = Stats(lambda: 1.0, lambda: 1e9)
    pools: Any = sections(glance, stats, 1e9, Troubles(), {}, wanted)["pools"]
    assert ("gpu" in pools) is shown
    if shown:
        assert pools["gpu"]["warm"] == 75 and pools["gpu"]["devices"] == [[2, 1, [["teacher", 1]]]]
        assert pools["gpu"]["regions"] == {"n0": [0, 1, kind]}


def test_names_beyond_the_bound_share_a_number() -> None:
    names = Names(most=3)
    assert [names.of(name) for name in ("a", "b", "c", "a", "d")] == [1, 2, 0, 1, 0]
    assert names.listed == ["other", "a", "b"]
